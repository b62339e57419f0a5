"""An operator's pins: kept whatever comes, for a time, and never all of the room."""

from __future__ import annotations

import pytest

from hicache_async import ConfigError, Tier
from hicache_async.stores.memory import MemoryStore
from tests.flows.rig import PAGE_TOKENS, Opener, Rig, tokens, turns

pytestmark = pytest.mark.asyncio


async def flood(rig: Rig, num_prompts: int = 12) -> None:
    """Serve so many other prompts that everything that may leave has left."""
    for number in range(num_prompts):
        for _ in range(2):
            await rig.serve(chr(ord("A") + number) + "yz", prefetch=False)
        await rig.cache.admin.flush(Tier.HOST)
    rig.cache.audit()


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
async def test_a_pinned_prefix_stays_until_its_time_is_over(open_cache: Opener, policy: str) -> None:
    """What is pinned outlives any traffic, and goes like anything else when its time has come."""
    rig = await open_cache(device_pages=6, host_pages=8, write_policy=policy)
    await rig.serve("abc")
    assert rig.cache.admin.pin(tokens("abc"), ttl_s=60) == 3 * PAGE_TOKENS
    await rig.cache.admin.flush(Tier.HOST)
    await flood(rig)
    assert len(rig.where("abc")) == 3
    rig.check_local("abc")
    rig.clock.advance(59)
    await flood(rig)
    assert len(rig.where("abc")) == 3
    rig.clock.advance(2)
    rig.cache.audit()
    await flood(rig)
    assert rig.where("abc") == ""


async def test_a_pin_keeps_no_device_pages_from_requests(open_cache: Opener) -> None:
    """A pinned prefix is brought to the host at once, also under the policy that would wait for a second commit."""
    rig = await open_cache(device_pages=5, host_pages=8, write_policy="write_through_selective")
    await rig.serve("ab")
    assert rig.where("ab") == "dd"
    rig.cache.admin.pin(tokens("ab"), ttl_s=1)
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("ab") == "bb"
    await rig.serve("wxyz", prefetch=False)  # and one token: all pages of the device
    assert rig.where("ab") == "hh"


async def test_unpin_lets_go(open_cache: Opener) -> None:
    """After unpin the prefix leaves like any other; a second unpin does nothing."""
    rig = await open_cache(device_pages=6, host_pages=8)
    await rig.serve("abc")
    rig.cache.admin.pin(tokens("abc"), ttl_s=60)
    rig.cache.admin.unpin(tokens("ab"))  # not what was pinned
    await flood(rig)
    assert len(rig.where("abc")) == 3
    rig.cache.admin.unpin(tokens("abc"))
    rig.cache.admin.unpin(tokens("abc"))
    rig.cache.audit()
    await flood(rig)
    assert rig.where("abc") == ""


async def test_pinning_again_sets_the_time_anew_and_holds_once(open_cache: Opener) -> None:
    """Two pins of the same tokens are one: the later time counts, and one unpin ends it."""
    rig = await open_cache(device_pages=6, host_pages=8)
    await rig.serve("abc")
    rig.cache.admin.pin(tokens("abc"), ttl_s=10)
    rig.clock.advance(9)
    rig.cache.admin.pin(tokens("abc"), ttl_s=10)
    rig.clock.advance(9)
    await flood(rig)
    assert len(rig.where("abc")) == 3
    rig.cache.admin.unpin(tokens("abc"))
    await flood(rig)
    assert rig.where("abc") == ""


async def test_pins_leave_room_for_requests(open_cache: Opener) -> None:
    """All pins together keep their share of the host and no more, shared pages counted once."""
    rig = await open_cache(device_pages=16, host_pages=16, pin_capacity_fraction=0.25)
    for prompt in ("abcde", "abxy"):
        await rig.serve(prompt)
    await rig.cache.admin.flush(Tier.HOST)
    pin = rig.cache.admin.pin
    assert pin(tokens("abc"), ttl_s=9) == 3 * PAGE_TOKENS
    assert pin(tokens("abxy"), ttl_s=9) == 3 * PAGE_TOKENS  # "ab" is kept already, "x" fits, "y" does not
    assert pin(tokens("abcde"), ttl_s=9) == 3 * PAGE_TOKENS
    rig.cache.audit()
    rig.cache.admin.unpin(tokens("abxy"))
    assert pin(tokens("abcde"), ttl_s=9) == 4 * PAGE_TOKENS
    rig.cache.audit()


async def test_what_is_not_on_the_host_keeps_a_share_of_the_device_only(open_cache: Opener) -> None:
    """Where the host has no room, as many pages are pinned on the device as leave requests the rest."""
    rig = await open_cache(
        device_pages=16,
        host_pages=16,
        write_policy="write_back",
        max_offloads_in_flight=1,
        pin_capacity_fraction=0.125,
    )
    rig.virtual.auto = False
    await rig.serve("abcdef")
    with rig.lease("abcdef") as other:
        await other.load()
        other.release(offload=True)  # the one copy that may be under way
    assert rig.where("abcdef") == "bbbbbb"
    await rig.serve("uvw")
    pinned = rig.cache.admin.pin(tokens("uvw"), ttl_s=9)
    assert (pinned, rig.where("uvw")) == (2 * PAGE_TOKENS, "ddd")
    rig.cache.audit()


async def test_nothing_is_pinned_where_nothing_is_cached(open_cache: Opener) -> None:
    """A pin of unknown tokens, or of less than a page, keeps nothing and says so."""
    rig = await open_cache()
    assert rig.cache.admin.pin(tokens("abc"), ttl_s=9) == 0
    assert rig.cache.admin.pin([1, 2], ttl_s=9) == 0
    rig.cache.admin.unpin([1, 2])
    await rig.serve("abc")
    assert rig.cache.admin.pin(tokens("abz"), ttl_s=9) == 2 * PAGE_TOKENS
    assert rig.cache.admin.pin(tokens("abc"), ttl_s=9, salt=b"other") == 0
    assert rig.cache.admin.pin(tokens("abc"), ttl_s=9, adapter="other") == 0


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan"), 10**400, True, "60", None])
async def test_a_time_that_cannot_be_is_refused(open_cache: Opener, ttl_s: object) -> None:
    """A pin needs a finite number of seconds above 0."""
    rig = await open_cache()
    with pytest.raises(ConfigError, match="ttl_s is .*; give a finite number of seconds > 0"):
        rig.cache.admin.pin(tokens("abc"), ttl_s=ttl_s)  # type: ignore[arg-type]


async def test_a_pin_outlives_neither_the_cache_nor_keeps_its_clock(open_cache: Opener) -> None:
    """Closing lets go of every pin and cancels its timer."""
    rig = await open_cache(store=MemoryStore())
    await rig.serve("abc")
    rig.cache.admin.pin(tokens("abc"), ttl_s=9)
    await rig.cache.close()
    rig.clock.advance(10)
    await turns()
    assert not rig.clock.pending


async def test_a_pinned_page_of_a_running_forward_is_kept(open_cache: Opener) -> None:
    """A pin taken while a forward still writes the pages keeps them, and they reach the host when it is over."""
    rig = await open_cache(device_pages=8, host_pages=8, write_policy="write_through_selective")
    fence = rig.cache.host_fence()
    with rig.lease("abc") as lease:
        loading = await lease.load()
        await rig.forward(lease, loading)
        lease.commit(lease.num_tokens, after=fence)
        assert rig.cache.admin.pin(tokens("abc"), ttl_s=9) == 3 * PAGE_TOKENS
        assert rig.where("abc") == "ddd"
        fence.set()
        await turns()
        lease.release()
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.where("abc") == "bbb"
    await flood(rig)
    assert len(rig.where("abc")) == 3


async def test_pins_never_take_all_of_the_device(open_cache: Opener) -> None:
    """What is pinned on the host stays there, so that the device can always give its copy up."""
    rig = await open_cache(device_pages=16, host_pages=40, store=MemoryStore())
    await rig.serve("abcdefghijklmno")
    await rig.cache.admin.flush(Tier.HOST)
    assert rig.cache.admin.pin(tokens("abcdefghijklmno"), ttl_s=1000) == 15 * PAGE_TOKENS
    for number in range(20):
        prompt = chr(ord("A") + number) + "xy"
        await rig.put_in_store(prompt)
        with rig.lease(prompt) as lease:
            await lease.prefetch()
    assert rig.where("abcdefghijklmno") == "b" * 15
    await rig.serve("uvwz")
    await rig.serve("UVWXYZuvwxyz")
    assert len(rig.where("abcdefghijklmno")) == 15
    rig.cache.audit()


async def test_a_pin_that_was_cut_off_leaves_its_share_to_others(open_cache: Opener) -> None:
    """A prefix that is gone after a failed forward keeps no room from another pin."""
    rig = await open_cache(device_pages=16, host_pages=16, pin_capacity_fraction=0.5)
    fence = rig.cache.host_fence()
    with rig.lease("abcdefgh") as lease:
        loading = await lease.load()
        await rig.forward(lease, loading)
        lease.commit(lease.num_tokens, after=fence)
        assert rig.cache.admin.pin(tokens("abcdefgh"), ttl_s=1000) == 8 * PAGE_TOKENS
        fence.fail(OSError("the forward went wrong"))
        await turns()
        lease.release()
    await rig.serve("vwxyz")
    assert rig.cache.admin.pin(tokens("vwxyz"), ttl_s=1000) == 5 * PAGE_TOKENS
