"""The exam for devices: right bytes in the right order behind the right fences, whatever moves them.

All it takes to adopt a device of your own is a maker and a test::

    from hicache_async.testing.device_exam import check_device


    def test_my_device() -> None:
        check_device(MyDevice)

What holds for every device is asked here; how fast it is, and that a stream really waits, is not.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from ..abc import Device
from ._device_bench import Bench
from ._device_fences import FENCE_CHECKS, SubmitWaitsError
from ._device_moves import MOVE_CHECKS
from ._device_order import ORDER_CHECKS
from ._exam_loop import LoopFactory, Surroundings, check_names, warm_up

CHECKS: dict[str, Callable[[Bench], Awaitable[None]]] = {
    check.__name__: check for check in (*FENCE_CHECKS, *ORDER_CHECKS, *MOVE_CHECKS)
}
"""Each property of a device by name; first the one without which the others would hang."""

LIMIT_S = 30.0
"""How long one check may take, on a busy machine too."""

GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What an exam has done: the names of the checks that passed, in order."""

    passed: tuple[str, ...]


def check_device(
    make_device: Callable[[], Device],
    *,
    only: Collection[str] = (),
    torch_device: str = "cpu",
    loop_factory: LoopFactory | None = None,
) -> DeviceReport:
    """Examine a device, a new one for each check, on a loop of its own.

    Args:
        make_device: makes one, on the loop. Its copies move without being told to.
        only: names out of :data:`CHECKS`; none: all.
        torch_device: where the pages of an engine are that it copies.
        loop_factory: makes the loops; None: asyncio's own.

    Raises:
        AssertionError: which checks failed, each with what was wrong.
        ConfigError: a name that is no check.
    """
    check_names("only", only, CHECKS)
    warm_up(loop_factory)
    passed, failed = [], []
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        try:
            _run(check, make_device, torch_device, loop_factory)
        except Exception as error:  # noqa: BLE001 - a device may raise anything; the report says what
            failed.append((name, error))
            if isinstance(error, SubmitWaitsError):
                break
        else:
            passed.append(name)
    if failed:
        lines = [f"  {name}: {type(error).__name__}: {error}" for name, error in failed]
        raise AssertionError("\n".join([f"{len(failed)} of {len(CHECKS)} checks failed:", *lines])) from (
            failed[0][1]
        )
    return DeviceReport(tuple(passed))


def _run(
    check: Callable[[Bench], Awaitable[None]],
    make_device: Callable[[], Device],
    torch_device: str,
    loop_factory: LoopFactory | None,
) -> None:
    with tempfile.TemporaryDirectory(prefix="hicache-exam-") as directory:
        around = Surroundings(Path(directory), GRACE_S)

        async def examine() -> None:
            device = make_device()
            try:
                async with asyncio.timeout(LIMIT_S):
                    await check(Bench(device, torch_device))
            finally:
                await device.aclose()

        around.run(examine, loop_factory)
