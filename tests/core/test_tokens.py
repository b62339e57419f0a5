"""Token ids: whatever holds them becomes the same bytes, and hashes found once are kept."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.core.hashing import HashChain
from hicache_async.core.tokens import TokenKey, token_bytes
from hicache_async.errors import ConfigError, InvariantError
from tests.core.world import QUICK

IDS = [0, 1, 2, 127]
BYTES = b"\x00\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00\x7f\x00\x00\x00"
BIGGEST = (1 << 32) - 1
INTEGER_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i4", ">u8"]
TORCH_DTYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32]

CHAIN = HashChain(b"", 8)


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        [np.int64(token) for token in IDS],
        [torch.tensor(token) for token in IDS],
        *(array.array(code, IDS) for code in "bBhHiIlLqQ"),
        *(np.array(IDS, dtype=dtype) for dtype in INTEGER_DTYPES),
        *(torch.tensor(IDS, dtype=dtype) for dtype in TORCH_DTYPES),
        np.array(IDS, dtype=np.int64).repeat(2)[::2],
        torch.tensor(IDS, dtype=torch.int64).repeat_interleave(2)[::2],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_every_form_of_tokens_gives_the_same_bytes(tokens: Any) -> None:
    """Lists, tuples, arrays and tensors of any integer type become little-endian uint32."""
    assert token_bytes(tokens) == BYTES


def test_a_range_gives_its_numbers() -> None:
    """A range is a sequence of token ids."""
    assert token_bytes(range(3, 9, 2)) == token_bytes([3, 5, 7])


@pytest.mark.parametrize(
    "tokens",
    [[], (), range(0), np.array([]), np.array([], dtype=np.int64), torch.tensor([]), array.array("i")],
)
def test_no_tokens_are_no_bytes(tokens: Any) -> None:
    """Nothing at all is refused for having no tokens, whatever the type of its missing elements."""
    assert token_bytes(tokens) == b""
    assert len(TokenKey(tokens)) == 0


@given(st.lists(st.integers(0, BIGGEST), max_size=40))
@QUICK
def test_list_array_and_tensor_agree(ids: list[int]) -> None:
    """Any ids in range give the same bytes from a list, an array and a tensor."""
    expected = b"".join(token.to_bytes(4, "little") for token in ids)
    for tokens in (ids, np.array(ids, dtype=np.uint32), np.array(ids, dtype=np.int64), torch.tensor(ids)):
        assert token_bytes(tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "position"),
    [
        ([5, 6, -1, -2], 2),
        ((5, BIGGEST + 1), 1),
        (range(-1, 3), 0),
        ([5, 1.0], 1),
        ([5, "6", 7], 1),
        ([None], 0),
        ([torch.tensor(5), 7, -1], 2),
        (np.array([5, 6, 7, -1], dtype=np.int8), 3),
        (np.array([5, BIGGEST + 1], dtype=np.int64), 1),
        (np.array([BIGGEST + 1, 5], dtype=np.uint64), 0),
        (array.array("q", [5, -1]), 1),
        (torch.tensor([5, -1], dtype=torch.int32), 1),
        (torch.tensor([5, 6, BIGGEST + 1]), 2),
    ],
)
def test_a_refusal_names_the_position(tokens: Any, position: int) -> None:
    """The first id that is no integer in 0 .. 2**32-1 is named by its position and value."""
    with pytest.raises(ConfigError, match=rf"^token {position} is .*; token ids are integers in 0 \.\. "):
        token_bytes(tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
        (torch.zeros(1, 2, dtype=torch.int64), r"shape \(1, 2\)"),
        (np.int64(3), r"shape \(\)"),
        ({1, 2}, r"shape \(\)"),
        (b"\x01\x02", r"shape \(\)"),
        (np.array([1.0, 2.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (torch.tensor([1.0]), "dtype float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "cannot be read as an array"),
        (torch.tensor([1.0], requires_grad=True), "cannot be read as an array"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "cannot be read as an array"),
    ],
)
def test_what_is_no_run_of_integers_is_refused(tokens: Any, message: str) -> None:
    """A wrong shape or type, or a tensor out of reach, is a ConfigError that says what was given."""
    with pytest.raises(ConfigError, match=message):
        token_bytes(tokens)


def test_extend_appends_all_or_nothing() -> None:
    """A turn with a bad id is refused whole; a good one continues the prompt."""
    key = TokenKey([1, 2])
    with pytest.raises(ConfigError, match="token 1 is -4"):
        key.extend([3, -4])
    assert key.data == token_bytes([1, 2])
    key.extend(np.array([3, 4]))
    assert key.data == token_bytes([1, 2, 3, 4])
    assert len(key) == 4


def test_a_fork_goes_its_own_way() -> None:
    """What is appended to a fork or to its origin does not show in the other; hashes found are shared."""
    key = TokenKey([1, 2, 3, 4])
    known = list(key.page_hashes(CHAIN, 2))
    fork = key.fork()
    fork.extend([5, 6])
    key.extend([7, 8])
    assert fork.data == token_bytes([1, 2, 3, 4, 5, 6])
    assert key.data == token_bytes([1, 2, 3, 4, 7, 8])
    ours, theirs = key.page_hashes(CHAIN, 3), fork.page_hashes(CHAIN, 3)
    assert ours[2] != theirs[2]
    for page in range(2):
        assert ours[page] is theirs[page] is known[page], "a known hash was computed again"


def test_truncated_keeps_whole_pages_of_hashes() -> None:
    """A shorter copy keeps the hashes of its whole pages and hashes what replaces the rest anew."""
    key = TokenKey([1, 2, 3, 4, 5, 6])
    known = list(key.page_hashes(CHAIN, 3))
    short = key.truncated(5)
    assert short.data == token_bytes([1, 2, 3, 4, 5])
    short.extend([9])
    assert short.page_hashes(CHAIN, 3)[:2] == known[:2]
    assert short.page_hashes(CHAIN, 3)[2] == TokenKey([1, 2, 3, 4, 5, 9]).page_hashes(CHAIN, 3)[2] != known[2]
    assert key.page_hashes(CHAIN, 3) == known


def test_a_longer_truncation_is_the_whole_key() -> None:
    """Cutting behind the end copies everything."""
    assert TokenKey([1, 2]).truncated(9).data == token_bytes([1, 2])


def test_hashes_grow_with_the_key_and_are_kept() -> None:
    """Asking for fewer pages than known returns those known; another turn adds to them."""
    key = TokenKey([1, 2, 3, 4])
    first = key.page_hashes(CHAIN, 2)
    assert len(key.page_hashes(CHAIN, 1)) == 2
    key.extend([5, 6])
    assert key.page_hashes(CHAIN, 3)[:2] == first[:2]
    assert key.page_hashes(CHAIN, 3) == TokenKey([1, 2, 3, 4, 5, 6]).page_hashes(CHAIN, 3)


def test_another_chain_forgets_the_hashes() -> None:
    """The hashes of one seed are never taken for those of another."""
    key = TokenKey([1, 2])
    plain, salted = list(key.page_hashes(CHAIN, 1)), key.page_hashes(HashChain(b"salt", 8), 1)
    assert plain != salted
    assert key.page_hashes(CHAIN, 1) == plain


def test_a_page_that_is_not_whole_is_never_hashed() -> None:
    """Asking for more hashes than there are whole pages raises and leaves the chain as it was."""
    key = TokenKey([1, 2, 3])
    with pytest.raises(InvariantError, match="2 pages to hash in 12 bytes"):
        key.page_hashes(CHAIN, 2)
    key.extend([4])
    assert key.page_hashes(CHAIN, 2) == TokenKey([1, 2, 3, 4]).page_hashes(CHAIN, 2)


def test_adopted_hashes_are_used_as_they_are() -> None:
    """Hashes that the tree knows stand for computed ones; fewer than known change nothing."""
    key = TokenKey([1, 2, 3, 4])
    key.adopt_hashes(CHAIN, [b"first"])
    assert key.page_hashes(CHAIN, 1) == [b"first"]
    key.adopt_hashes(CHAIN, [b"other", b"second"])
    key.adopt_hashes(CHAIN, [])
    assert key.page_hashes(CHAIN, 2) == [b"first", b"second"]
    key.adopt_hashes(HashChain(b"salt", 8), [b"salted"])
    assert key.page_hashes(HashChain(b"salt", 8), 1) == [b"salted"]


def test_a_key_knows_how_many_pages_it_has_hashed() -> None:
    """Computed and adopted hashes count alike; those of another chain count as none."""
    key, other = TokenKey([1, 2, 3, 4, 5, 6]), HashChain(b"salt", 8)
    assert key.num_hashed(CHAIN) == 0
    key.page_hashes(CHAIN, 1)
    assert (key.num_hashed(CHAIN), key.num_hashed(other)) == (1, 0)
    key.adopt_hashes(CHAIN, [b"first", b"second"])
    assert (key.num_hashed(CHAIN), key.num_hashed(other)) == (2, 0)
    assert key.truncated(3).num_hashed(CHAIN) == 1
    key.adopt_hashes(other, [b"salted"])
    assert (key.num_hashed(CHAIN), key.num_hashed(other)) == (0, 1)


def test_what_follows_adopted_hashes_is_chained_to_them() -> None:
    """The first page that nobody knows is hashed behind the last one that the tree knew."""
    whole = TokenKey([1, 2, 3, 4, 5, 6]).page_hashes(CHAIN, 3)
    key = TokenKey([1, 2, 3, 4, 5, 6])
    key.adopt_hashes(CHAIN, whole[:2])
    assert key.page_hashes(CHAIN, 3) == whole
    assert key.page_hashes(CHAIN, 3)[1] is whole[1]


def test_repr_counts_tokens() -> None:
    """A key shows its length and none of its content."""
    assert repr(TokenKey([1, 2, 3])) == "<TokenKey of 3 tokens>"
