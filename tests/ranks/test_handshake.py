"""The handshake and the frames, without a socket: what is said, byte for byte, and what is not accepted."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.ranks._connection import Refused
from hicache_async.ranks._frames import BadFrame, Frame, Kind, encode, read_frame
from hicache_async.ranks._handshake import Hello, Verdict, hear_hello, say_hello, verdict_bytes

T = TypeVar("T")
SECRET = bytes(range(32))


def feed(conversation: Generator[int, bytes, T], data: bytes) -> tuple[bool, T | None]:
    """Give a conversation bytes as it asks for them; returns whether it has returned, and what."""
    try:
        wanted = next(conversation)
        while len(data) >= wanted:
            chunk, data = data[:wanted], data[wanted:]
            wanted = conversation.send(chunk)
    except StopIteration as end:
        return True, end.value
    return False, None


class Meeting:
    """Both sides of a handshake, each with a secret of its own."""

    def __init__(self, hub_secret: bytes, peer_secret: bytes, rank: int = 2, size: int = 4) -> None:
        self.hub_secret = hub_secret
        self.hub_said: list[bytes] = []
        self.peer_said: list[bytes] = []
        self.hub = hear_hello(self.hub_said.append, hub_secret)
        self.peer = say_hello(self.peer_said.append, peer_secret, rank, size)
        self.hub_wants = next(self.hub)
        self.peer_wants = next(self.peer)

    def hello(self) -> Hello:
        """Let the other rank say hello and rank 0 hear it."""
        (challenge,) = self.hub_said
        assert len(challenge) == self.peer_wants
        self.peer_wants = self.peer.send(challenge)
        (hello,) = self.peer_said
        assert len(hello) == self.hub_wants
        with pytest.raises(StopIteration) as heard:
            self.hub.send(hello)
        assert isinstance(heard.value.value, Hello)
        return heard.value.value

    def answer(self, verdict: bytes) -> None:
        """Let the other rank hear what rank 0 makes of it."""
        assert len(verdict) == self.peer_wants
        with pytest.raises(StopIteration):
            self.peer.send(verdict)


def test_who_knows_the_secret_is_welcome() -> None:
    """Both prove it, and rank 0 learns who it is; the secret itself is never sent."""
    meeting = Meeting(SECRET, SECRET)
    hello = meeting.hello()
    assert (hello.rank, hello.size) == (2, 4)
    verdict = verdict_bytes(SECRET, hello, Verdict.WELCOME)
    meeting.answer(verdict)
    assert not any(SECRET in said for said in [*meeting.hub_said, *meeting.peer_said, verdict])


def test_who_does_not_know_the_secret_is_refused() -> None:
    """Rank 0 hears a wrong proof and says nothing more."""
    with pytest.raises(Refused, match="secret"):
        Meeting(SECRET, bytes(32)).hello()


def test_another_rank_0_is_not_believed() -> None:
    """A verdict under another secret is refused, whatever it says."""
    meeting = Meeting(SECRET, SECRET)
    hello = meeting.hello()
    with pytest.raises(Refused, match="secret"):
        meeting.answer(verdict_bytes(bytes(32), hello, Verdict.WELCOME))


def test_a_verdict_cannot_be_turned_round() -> None:
    """The proof covers what is said: a refusal is no welcome with another first byte."""
    meeting = Meeting(SECRET, SECRET)
    hello = meeting.hello()
    refusal = verdict_bytes(SECRET, hello, Verdict.TAKEN)
    with pytest.raises(Refused, match="secret"):
        meeting.answer(bytes([Verdict.WELCOME]) + refusal[1:])


def test_what_was_heard_once_proves_nothing_again() -> None:
    """A recorded hello and a recorded verdict belong to nonces that do not come again."""
    first, second = Meeting(SECRET, SECRET), Meeting(SECRET, SECRET)
    old_verdict = verdict_bytes(SECRET, first.hello(), Verdict.WELCOME)
    with pytest.raises(Refused):
        second.hub.send(first.peer_said[0])
    second = Meeting(SECRET, SECRET)
    second.hello()
    with pytest.raises(Refused):
        second.answer(old_verdict)


def test_a_proof_cannot_be_sent_back() -> None:
    """Who answers rank 0 with rank 0's own words has proved nothing: each side's proofs name the speaker."""
    meeting = Meeting(SECRET, SECRET)
    hello = meeting.hello()
    proof = verdict_bytes(SECRET, Hello(hello.rank, 0, hello.nonces), Verdict.WELCOME)[1:]
    peer_nonce = meeting.peer_said[0][:32]
    other = hear_hello(list[bytes]().append, SECRET)
    next(other)
    with pytest.raises(Refused):
        other.send(peer_nonce + (2).to_bytes(4, "big") + bytes(4) + proof)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [(Verdict.TAKEN, "another process has joined as rank 2"), (Verdict.NO_SUCH_RANK, "no rank 2 of 4")],
)
def test_a_refusal_says_why(verdict: Verdict, message: str) -> None:
    """A rank that proved itself and is not wanted learns the reason."""
    meeting = Meeting(SECRET, SECRET)
    with pytest.raises(Refused, match=message):
        meeting.answer(verdict_bytes(SECRET, meeting.hello(), verdict))


def test_another_program_is_noticed() -> None:
    """What does not begin as rank 0 does gets no proof of anything."""
    meeting = Meeting(SECRET, SECRET)
    with pytest.raises(Refused, match="another program"):
        meeting.peer.send(b"HTTP/1.1 400 Bad Request\r\n".ljust(meeting.peer_wants))
    assert meeting.peer_said == []


@given(
    st.sampled_from(Kind),
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(0, 2**63 - 1), max_size=8).map(tuple),
)
def test_frames_come_back_as_they_were(kind: Kind, ticket: bytes, values: tuple[int, ...]) -> None:
    """What is written is read, and no frame is longer than 82 bytes."""
    frame = Frame(kind, ticket, values)
    data = encode(frame)
    assert len(data) <= 82
    assert feed(read_frame(), data) == (True, frame)


@given(st.binary(min_size=18, max_size=200))
def test_rubbish_is_no_frame(data: bytes) -> None:
    """Any bytes are a frame that would be written the same, or too few, or refused."""
    try:
        done, frame = feed(read_frame(), data)
    except BadFrame:
        return
    if done:
        assert frame is not None
        assert data.startswith(encode(frame))
        assert min(frame.values, default=0) >= 0
