"""The public schema of KV events: bytes that independent decoders read, and what is kept to be sent again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hicache_async import Gap, KVEvent, Removed, Stored, Tier
from hicache_async.integrations._event_schema import BatchEncoder, parts_of, runs_of
from hicache_async.integrations._replay import ReplayBuffer
from tests.flows.rig import PAGE_TOKENS, page_hashes, tokens
from tests.integrations.subscriber import AllBlocksCleared, Batch, BlockRemoved, BlockStored, block_hash


def stored(letters: str, start: int = 0, *, tier: Tier = Tier.DEVICE, **name: object) -> Stored:
    """Return the event of the pages of a prompt from page ``start`` on."""
    hashes = page_hashes(letters)
    data = np.array(tokens(letters)[start * PAGE_TOKENS : -1], dtype="<u4").tobytes()
    parent_hash = hashes[start - 1] if start else None
    names = {"salt": b"", "adapter": None, **name}
    return Stored(tier, tuple(hashes[start:]), parent_hash, data, **names)  # type: ignore[arg-type]


def removed(letters: str, tier: Tier = Tier.DEVICE) -> Removed:
    """Return the event of the removal of a whole prompt."""
    return Removed(tier, tuple(page_hashes(letters)))


def decoded(*events: KVEvent) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Encode events in the current form and decode them."""
    payload = BatchEncoder(True, "CPU_PINNED", 3).encode(1.5, events)
    batch = msgspec.msgpack.decode(payload, type=Batch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    return batch.events


def test_a_stored_run_has_every_field() -> None:
    """Hashes are the first 8 bytes of the page hashes, signed; the page before the run is named."""
    blocks = [block_hash(page_hash) for page_hash in page_hashes("abc")]
    assert min(blocks) < 0
    assert decoded(stored("abc", 1, tier=Tier.HOST, salt=b"tenant", adapter="lora")) == [
        BlockStored(
            block_hashes=blocks[1:],
            parent_block_hash=blocks[0],
            token_ids=tokens("bc")[:-1],
            block_size=PAGE_TOKENS,
            lora_id=None,
            medium="CPU_PINNED",
            lora_name="lora",
            cache_salt="tenant",
        )
    ]


def test_removals_and_gaps() -> None:
    """A removal names the medium; a gap clears everything."""
    blocks = [block_hash(page_hash) for page_hash in page_hashes("ab")]
    assert decoded(removed("ab"), Gap(7)) == [
        BlockRemoved(block_hashes=blocks, medium="GPU"),
        AllBlocksCleared(),
    ]


def test_what_continues_is_told_together() -> None:
    """Runs of one tier that follow one another share an event, and so do removals; others do not."""
    first, second, branch = stored("ab"), stored("abcd", 2), stored("abxy", 2)
    assert runs_of([first, second]) == [[first, second]]
    assert runs_of([first, second, branch]) == [[first, second], [branch]]
    assert runs_of([first, stored("abcd", 2, tier=Tier.HOST)]) == [
        [first],
        [stored("abcd", 2, tier=Tier.HOST)],
    ]
    assert len(runs_of([removed("ab"), removed("cd"), removed("ab", Tier.HOST), Gap(0), Gap(0)])) == 4
    (joined,) = decoded(first, second)
    assert decoded(stored("abcd")) == [joined]


def test_a_long_run_is_parted_and_its_parts_continue_one_another() -> None:
    """Parts of a bounded size say the same as the whole."""
    whole = stored("abcdefg")
    parts = list(parts_of(whole, 3 * PAGE_TOKENS))
    assert [len(part.hashes) for part in parts if isinstance(part, Stored)] == [3, 3, 1]
    assert decoded(*parts) == decoded(whole)
    assert [len(runs_of([*parts_of(stored("abc"), size)])[0]) for size in (1, PAGE_TOKENS, 12)] == [3, 3, 1]
    assert list(parts_of(removed("abc"), 1)) == [removed("abc")]


def test_the_earlier_form_is_positional() -> None:
    """An event is an array of the same values, up to the name of the adapter."""
    payload = BatchEncoder(False, "CPU", 0).encode(
        1.5, [stored("a", adapter="lora", salt=b"t", tier=Tier.HOST), removed("a"), Gap(0)]
    )
    (block,) = (block_hash(page_hash) for page_hash in page_hashes("a"))
    assert msgspec.msgpack.decode(payload) == [
        1.5,
        [
            ["BlockStored", [block], None, tokens("a")[:-1], PAGE_TOKENS, None, "CPU", "lora"],
            ["BlockRemoved", [block], "GPU"],
            ["AllBlocksCleared"],
        ],
        0,
    ]


def test_a_salt_that_is_no_text_is_still_told() -> None:
    """Bytes outside of UTF-8 are escaped."""
    (event,) = decoded(stored("a", salt=b"t\xff"))
    assert isinstance(event, BlockStored)
    assert event.cache_salt == "t\\xff"


@pytest.mark.parametrize(("max_steps", "max_nbytes"), [(3, 1000), (1000, 30)])
def test_the_last_messages_are_kept(max_steps: int, max_nbytes: int) -> None:
    """The buffer is bounded in messages and in bytes, and says whether it has all that is asked for."""
    buffer = ReplayBuffer(max_steps, max_nbytes)
    assert (buffer.since(0), buffer.tells_all_since(0)) == ([], True)
    for number in range(6):
        buffer.append(number, b"0123456789", resets=number == 0)
    assert [number for number, _ in buffer.since(0)] == [3, 4, 5]
    assert [number for number, _ in buffer.since(5)] == [5]
    assert buffer.since(6) == []
    assert [buffer.tells_all_since(number) for number in (0, 2, 3, 6)] == [False, False, True, True]
    buffer.append(6, b"0123456789", resets=True)
    assert buffer.tells_all_since(0)
    buffer.append(7, bytes(2 * max_nbytes), resets=False)
    assert buffer.since(0)[-1] == (7, bytes(2 * max_nbytes))
    assert len(buffer) <= max_steps
