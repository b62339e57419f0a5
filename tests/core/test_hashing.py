"""Page hashes: fixed for ever, the same in every process, and apart for every salt and adapter."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_async.core.hashing import DIGEST_NBYTES, HashChain, chain_seed
from hicache_async.core.tokens import token_bytes
from hicache_async.errors import InvariantError
from tests.core.world import QUICK, start_core

PAGE_NBYTES = 16
EIGHT_TOKENS = token_bytes(range(8))

GOLDEN = {
    (b"", None): [
        "baed642339816affb3fe8719792d0e4ce82f12db72b7373d244eaa65445800fe",
        "01414b052706d93bd0f1f1646c0e8ca2fa8ef5efd7bcc99f7a1cee8eb11ad052",
    ],
    (b"tenant-a", None): [
        "9a9a1c452063dfcdae88db2c9ab8101243f0ae4a0f081da802d7c296fea290a3",
        "f8d0c0160f77dd43866a778e43740b3c858f6b46f8aa1d343164b3889f1ae1d0",
    ],
    (b"", "lora-1"): [
        "2b9b6bb11188b14fede864803e10468277d3cd00bb7d4e15e1f15a28547da6f4",
        "ce055518d5c24f645cc14aaa9bc055119711723f506a1f1d460af087403dc976",
    ],
    (b"tenant-a", "lora-1"): [
        "8e76e8cd982064b4f91fc14f0d02026d9a3e1b18026f565ff080620c4b404491",
        "da16de981ec63f6b53db72149552ce657f96ea0483bab27ff923415c10be4194",
    ],
}

PRINT_HASHES = """
from hicache_async.core.hashing import HashChain, chain_seed
from hicache_async.core.tokens import token_bytes
hashes = []
HashChain(chain_seed(b"tenant-a", "lora-1"), 16).extend(hashes, token_bytes(range(8)), 2)
print(*(page_hash.hex() for page_hash in hashes), hash("a word"))
"""


def hashes_of(data: bytes, num_pages: int, seed: bytes = b"") -> list[bytes]:
    """Return the chain of the first pages of ``data``."""
    hashes: list[bytes] = []
    HashChain(seed, PAGE_NBYTES).extend(hashes, data, num_pages)
    return hashes


@pytest.mark.parametrize(("salt", "adapter"), GOLDEN)
def test_golden_values(salt: bytes, adapter: str | None) -> None:
    """Two pages of four tokens hash to values that stored objects of any age are named by."""
    hashes = hashes_of(EIGHT_TOKENS, 2, chain_seed(salt, adapter))
    assert [page_hash.hex() for page_hash in hashes] == GOLDEN[salt, adapter]


def test_without_salt_and_adapter_the_chain_is_plain_sha256() -> None:
    """Anybody can name the pages of a plain prompt with sha256(previous digest + token ids)."""
    first = hashlib.sha256(EIGHT_TOKENS[:16]).digest()
    second = hashlib.sha256(first + EIGHT_TOKENS[16:]).digest()
    assert chain_seed() == chain_seed(b"", None) == b""
    assert hashes_of(EIGHT_TOKENS, 2) == [first, second]


@given(st.binary(max_size=40), st.lists(st.binary(min_size=PAGE_NBYTES, max_size=PAGE_NBYTES), max_size=6))
@QUICK
def test_each_hash_is_of_the_one_before_and_the_page(seed: bytes, pages: list[bytes]) -> None:
    """The chain is h_i = sha256(h_{i-1} || page i), starting from the seed."""
    previous, expected = seed, []
    for page in pages:
        previous = hashlib.sha256(previous + page).digest()
        expected.append(previous)
    assert hashes_of(b"".join(pages), len(pages), seed) == expected
    assert all(len(page_hash) == DIGEST_NBYTES for page_hash in expected)


@given(st.binary(min_size=96, max_size=111), st.integers(0, 6), st.integers(0, 6))
@QUICK
def test_a_chain_goes_on_where_it_stopped(data: bytes, some: int, more: int) -> None:
    """Hashing in two turns gives what hashing at once does; going back adds nothing."""
    hashes: list[bytes] = []
    chain = HashChain(b"seed", PAGE_NBYTES)
    chain.extend(hashes, bytearray(data), some)
    chain.extend(hashes, data, more)
    assert hashes == hashes_of(data, max(some, more), b"seed")


def test_a_page_that_is_not_whole_is_refused() -> None:
    """A chain never hashes fewer tokens than a page has, and appends nothing when asked to."""
    hashes = hashes_of(EIGHT_TOKENS, 1)
    with pytest.raises(InvariantError, match="2 pages to hash in 31 bytes of 16 bytes a page"):
        HashChain(b"", PAGE_NBYTES).extend(hashes, EIGHT_TOKENS[:-1], 2)
    assert len(hashes) == 1


def test_absent_empty_and_joined_parts_differ() -> None:
    """No salt with a name, a salt without, both run together or swapped: all are apart."""
    pairs: list[tuple[bytes, str | None]] = [
        (b"", None),
        (b"", ""),
        (b"X", None),
        (b"X", ""),
        (b"", "X"),
        (b"a", "bc"),
        (b"ab", "c"),
        (b"abc", ""),
        (b"abc", None),
        (b"", "abc"),
        (b"a:", "b"),
        (b"a", ":b"),
        (b"\x00", "\x00"),
        (b"\x00\x00", ""),
        ("ü".encode(), None),
        (b"", "ü"),
    ]
    assert len({chain_seed(*pair) for pair in pairs}) == len(pairs)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PAIR = st.tuples(st.binary(max_size=12), st.none() | TEXT)


@given(PAIR, PAIR)
@QUICK
def test_different_pairs_have_different_seeds(
    one: tuple[bytes, str | None], two: tuple[bytes, str | None]
) -> None:
    """Two pairs of salt and adapter share a seed only if they are equal."""
    assert (chain_seed(*one) == chain_seed(*two)) == (one == two)


def test_every_process_finds_the_same_hashes() -> None:
    """Processes whose own string hashes differ name the same pages."""
    children = [start_core(PRINT_HASHES, PYTHONHASHSEED=seed) for seed in "123"]
    outputs = [child.communicate()[0].split() for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len({words[-1] for words in outputs}) == 3, "the processes did not differ at all"
    for words in outputs:
        assert words[:-1] == GOLDEN[b"tenant-a", "lora-1"]
