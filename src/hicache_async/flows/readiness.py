"""Readiness: fences on tree pages, taken away when they have passed, and what follows when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .._fence import ThreadFence, until_passed
from .._hop import Hop
from ..abc import Fence
from ..core.node import Node
from ..types import Tier
from .context import Context, Pinned


def hold_until(
    ctx: Context, node: Node, fence: Fence, on_over: Callable[[Hop[None], Node], None]
) -> Hop[None]:
    """Keep the device pages up to ``node`` until ``fence`` has passed: a forward writes or reads them.

    Those that were committed behind it are usable afterwards, or cut off if it failed.

    Args:
        on_over: called with the hop and ``node`` when nothing is kept any more.
    """
    settled = partial(_forward_over, ctx, ctx.pin(node, Tier.DEVICE), fence, on_over)
    return ctx.hops.start_call("forward.fence", lambda stop: wait_fence(ctx, fence), settled)


def _forward_over(
    ctx: Context, pinned: Pinned, fence: Fence, on_over: Callable[[Hop[None], Node], None], hop: Hop[None]
) -> None:
    settle_ready(ctx, pinned.node, Tier.DEVICE, fence, hop.error)
    ctx.unpin(pinned)
    on_over(hop, pinned.node)


def awaits_engine(node: Node) -> bool:
    """Return whether bytes of ``node``, which the host has not, are still to come from a forward of the engine."""
    return node.host.pages is None and any(not fence.passed() for fence in node.device.ready)


async def wait_fence(ctx: Context, fence: Fence) -> None:
    """Wait for a fence of the device or of the engine; raises what failed, and never before it has passed."""
    if isinstance(fence, ThreadFence):
        await fence.wait()
        return
    try:
        await ctx.device.wait(fence)
    except Exception:
        await until_passed(fence)  # the device cannot wait, and what it does goes on
        raise


def open_fences(nodes: Sequence[Node], tier: Tier) -> list[Fence]:
    """Return the fences behind which ``tier`` of ``nodes`` is there, each once.

    A fence that has passed unobserved is among them: it may have failed, and only a copy that is
    queued behind it will then fail, too.
    """
    return list({fence: None for node in nodes for fence in node.copy_in(tier).ready})


def settle_ready(ctx: Context, node: Node, tier: Tier, fence: Fence, error: BaseException | None) -> None:
    """Take ``fence`` off the path to ``node``; after a failure cut off what was to come behind it.

    Nodes that were split meanwhile share the fence, so the whole run is found by walking up.
    """
    behind = [above for above in reversed(node.path()) if fence in above.copy_in(tier).ready]
    if error is None:
        for above in behind:
            above.copy_in(tier).ready = ()
    elif behind and behind[-1].attached:
        topmost = behind[-1]
        ctx.metrics.counters["doubted_pages"] += sum(below.num_pages for below in topmost.subtree())
        ctx.tree.detach(topmost)
