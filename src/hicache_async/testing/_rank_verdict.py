"""What the ranks of an exam have done, compared: the same result, never above a vote, the same batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ._watched_ranks import BallotRecord, Ballots
from .lockstep_engine import LockstepRecord


def check_ballots(records: Sequence[BallotRecord], *, survivors: bool = False, max_torn: int = 0) -> None:
    """Check that each ticket has one result on all ranks, zeros or the minimum of all votes, and that two orders hold.

    What every rank has voted for in the same order settles in that order, and is heard of in it everywhere.

    Args:
        survivors: whether there were other ranks, whose votes are not known, and which were lost.
        max_torn: how many results above zeros some survivors may have heard and others not: the rank that
            counts the votes may die while it tells them.
    Raises: AssertionError: naming the ticket and the ranks.
    """
    cast = {record.rank: dict(record.votes) for record in records}
    agreed: dict[bytes, tuple[int, tuple[int, ...]]] = {}
    for record in records:
        for ticket, result in record.results:
            rank, first = agreed.setdefault(ticket, (record.rank, result))
            _demand(
                first == result,
                f"ticket {ticket.hex()} is {first} on rank {rank} and {result} on rank {record.rank}",
            )
    _check_torn(agreed, records, max_torn)
    for ticket, (_, result) in agreed.items():
        if any(result):
            _check_value(ticket, result, {rank: each.get(ticket) for rank, each in cast.items()}, survivors)
    decided = {ticket for ticket, (_, result) in agreed.items() if any(result)}
    heard = {
        record.rank: list(
            dict.fromkeys(t for t, _ in record.results if t in decided and t not in record.given_up)
        )
        for record in records
    }
    _check_order(heard, {} if survivors else {record.rank: record.votes for record in records})


def _check_torn(
    agreed: Mapping[bytes, tuple[int, tuple[int, ...]]], records: Sequence[BallotRecord], max_torn: int
) -> None:
    heard = {record.rank: {ticket for ticket, _ in record.results} for record in records}
    torn: list[str] = []
    for ticket, (rank, result) in agreed.items():
        without = [each.rank for each in records if ticket in each.lost and ticket not in heard[each.rank]]
        if any(result) and without:
            torn.append(f"ticket {ticket.hex()} is {result} on rank {rank}, and lost on {without}")
    _demand(len(torn) <= max_torn, "; ".join(torn))


def _check_value(
    ticket: bytes, result: tuple[int, ...], votes: Mapping[int, tuple[int, ...] | None], survivors: bool
) -> None:
    for rank, vote in votes.items():
        _demand(vote is not None, f"ticket {ticket.hex()} is {result}, and rank {rank} has not voted")
        above = any(got > said for got, said in zip(result, vote or (), strict=True))
        _demand(not above, f"ticket {ticket.hex()} is {result}, above {vote}, the vote of rank {rank}")
    least = tuple(min(column) for column in zip(*(vote or () for vote in votes.values()), strict=True))
    _demand(survivors or result == least, f"ticket {ticket.hex()} is {result}, the votes were {dict(votes)}")


def _check_order(heard: Mapping[int, list[bytes]], votes: Mapping[int, Ballots]) -> None:
    for one in heard:
        for other in heard:
            common = set(heard[one]) & set(heard[other])
            mine, theirs = ([t for t in heard[rank] if t in common] for rank in (one, other))
            _demand(mine == theirs, f"ranks {one} and {other} hear of the same tickets in different orders")
    if not votes:
        return
    cast_at = {rank: {ticket: at for at, (ticket, _) in enumerate(each)} for rank, each in votes.items()}
    for rank, order in heard.items():
        for earlier, later in _inversions(order, cast_at):
            _demand(
                False,
                f"every rank voted for {later.hex()} before {earlier.hex()}, rank {rank} hears of it after it",
            )


def _inversions(
    order: list[bytes], cast_at: Mapping[int, Mapping[bytes, int]]
) -> Iterable[tuple[bytes, bytes]]:
    for at, later in enumerate(order):
        for earlier in order[:at]:
            if all(each.get(later, 1 << 60) < each.get(earlier, -1) for each in cast_at.values()):
                yield earlier, later


def check_lockstep(records: Sequence[LockstepRecord], *, survivors: bool = False) -> None:
    """Check that all ranks ran the same batches from the same lengths, and read no foreign byte.

    Args:
        survivors: whether the run was ended by a loss; then each may have come one step further than another.
    Raises: AssertionError: naming the step, the ranks and what each did.
    """
    for record in records:
        _demand(not record.foreign, f"rank {record.rank} read foreign bytes: {'; '.join(record.foreign)}")
    lengths = [len(record.steps) for record in records]
    for number in range(1, min(lengths) + 1):
        check_steps(records, number)
    if not survivors:
        _demand(len(set(lengths)) == 1, f"the ranks {[r.rank for r in records]} did {lengths} steps")
        _check_loads(records)


def check_steps(records: Sequence[LockstepRecord], number: int) -> None:
    """Check that all ranks did the same in step ``number``, counted from 1; each has done it."""
    first = records[0]
    for record in records[1:]:
        one, other = first.steps[number - 1], record.steps[number - 1]
        _demand(
            one == other,
            f"step {number} differs: rank {first.rank} did {one}, rank {record.rank} did {other}",
        )


def _check_loads(records: Sequence[LockstepRecord]) -> None:
    for key in sorted({key for record in records for key in record.loads}):
        # Not all ranks need to know it: a client may have hung up before its load returned there.
        tokens = {record.rank: record.loads[key] for record in records if key in record.loads}
        _demand(
            len(set(tokens.values())) == 1,
            f"{key[0]}, lease {key[1]}: loading.tokens differ between ranks: {tokens}",
        )


def _demand(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)
