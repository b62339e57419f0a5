"""The demo's path on a model of two random layers: each tier, a restart, a damaged page, byte by byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hicache_async import Books, Tier
from hicache_async.config import HostLayout, WritePolicy
from tests.e2e.tiny_model import Recomputed, TinyEngine, open_engine, page_hashes, prompt

pytestmark = pytest.mark.asyncio

PROMPT = prompt(1)
RECOMPUTED = Recomputed()
LAYOUTS = (HostLayout.LAYER_FIRST, HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT)


def books(device: int = 0, host: int = 0, store: int = 0) -> Books:
    return Books(len(PROMPT), device, host, store, len(PROMPT) - device - host - store)


def damage(directory: Path, page_hash: bytes) -> None:
    """Change one byte in the middle of a stored page."""
    (path,) = directory.rglob(f"{page_hash.hex()}*.kv")
    content = bytearray(path.read_bytes())
    content[-100] ^= 0xFF
    path.write_bytes(content)


async def check_tiers(engine: TinyEngine, directory: Path, *tiers: Tier) -> None:
    """Check every page wherever it is, and that the prompt's six pages are in ``tiers``."""
    await engine.cache.admin.flush()
    engine.cache.audit()
    found = engine.check_local()
    found[Tier.STORE] = await engine.check_stored(directory)
    assert all(found[tier] >= 6 for tier in tiers), found


@pytest.mark.parametrize("write_policy", WritePolicy)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_prefix_from_any_tier_gives_the_very_logits(
    tmp_path: Path, layout: HostLayout, write_policy: WritePolicy
) -> None:
    """From device, host, store and a restart a prefix gives the logits and pages of recomputing."""
    async with open_engine(tmp_path, RECOMPUTED, layout=layout, write_policy=write_policy) as engine:
        assert (await engine.answer(PROMPT)).books == books()
        await check_tiers(engine, tmp_path, Tier.DEVICE)
        assert (await engine.answer(PROMPT)).books == books(device=24)
        await engine.push_out([11, 12])
        assert (await engine.answer(PROMPT)).books == books(host=24)
        await check_tiers(engine, tmp_path, Tier.DEVICE, Tier.HOST, Tier.STORE)
        await engine.push_out(range(20, 26))
        assert (await engine.answer(PROMPT)).books == books(store=24)
        await check_tiers(engine, tmp_path, Tier.DEVICE, Tier.HOST, Tier.STORE)
    async with open_engine(tmp_path, RECOMPUTED, layout=layout, write_policy=write_policy) as engine:
        assert (await engine.answer(PROMPT)).books == books(store=24)
        await check_tiers(engine, tmp_path, Tier.DEVICE, Tier.HOST, Tier.STORE)


@pytest.mark.parametrize("write_policy", WritePolicy)
@pytest.mark.parametrize("layout", LAYOUTS[:2])
async def test_a_damaged_page_shortens_the_prefix_and_is_made_up_for(
    tmp_path: Path, layout: HostLayout, write_policy: WritePolicy
) -> None:
    """Behind a damaged page all is recomputed and stored anew, under each policy; no answer ever differs."""
    for restart in ("cold", "damaged", "whole again"):
        async with open_engine(tmp_path, RECOMPUTED, layout=layout, write_policy=write_policy) as engine:
            store = {"cold": 0, "damaged": 12, "whole again": 24}[restart]
            assert (await engine.answer(PROMPT)).books == books(store=store)
            await engine.answer(PROMPT)
            await engine.push_out([11, 12])
            await check_tiers(engine, tmp_path, Tier.HOST, Tier.STORE)
        if restart == "cold":
            damage(tmp_path, page_hashes(PROMPT)[3])


@pytest.mark.parametrize(("writer", "reader"), list(itertools.permutations(LAYOUTS, 2)))
async def test_caches_share_stored_pages_exactly_where_their_bytes_are_the_same(
    tmp_path: Path, writer: HostLayout, reader: HostLayout
) -> None:
    """A cache of another host layout finds stored pages of the same byte order, and takes no others."""
    async with open_engine(tmp_path, RECOMPUTED, layout=writer) as engine:
        await engine.answer(PROMPT)
    async with open_engine(tmp_path, RECOMPUTED, layout=reader) as engine:
        shares = HostLayout.PAGE_FIRST_DIRECT not in (writer, reader)
        assert (await engine.answer(PROMPT)).books == books(store=24 if shares else 0)
