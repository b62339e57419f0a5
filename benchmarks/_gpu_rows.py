"""What the parts of gpu_check are made of: sizes, and the rows of the table that they yield."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from ._gpu import Gpu
from .harness import Param, rounded

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything; tests take next to nothing.

    Attributes:
        pages: tokens and KV heads of the pages that are measured: 256 KiB, 1 MiB and 8 MiB in float16.
        copied_nbytes: bytes of one copy that is measured; twice as many are held in each tier.
        pin_nbytes: bytes that are pinned to see how long it takes.
        far_nbytes: how far apart pages lie whose places take more than 32 bits.
        long_s: how long the kernel runs that must not delay anybody.
        delay_s: how long one runs that something is queued behind.
        pause_s: the same, where the host waits for it.
        bridge_s: how long waits are watched.
    """

    num_layers: int = 32
    head_dim: int = 128
    pages: tuple[tuple[int, int], ...] = ((8, 2), (32, 2), (64, 8))
    copied_nbytes: int = 256 * MIB
    pin_nbytes: int = 1024 * MIB
    far_nbytes: int = 2**30 + 2**20 + 1
    rounds: int = 5
    long_s: float = 1.5
    delay_s: float = 0.2
    pause_s: float = 0.1
    bridge_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: as ``exam.moves_every_dtype``; with ``params`` it names the row.
        figures: what was measured, each with its unit in its name.
        is_goal_met: None: no goal was set.
        error: why it failed; empty: it did not.
    """

    name: str
    params: dict[str, Param] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    is_goal_met: bool | None = None
    error: str = ""

    @property
    def verdict(self) -> str:
        """What became of it, in a word or two."""
        if self.error:
            return "failed"
        if self.is_goal_met is not None:
            return "goal met" if self.is_goal_met else "goal missed"
        return "measured" if self.figures else "passed"

    def as_dict(self) -> dict[str, object]:
        """Return what goes into the table."""
        figures = {name: rounded(value) for name, value in self.figures.items()}
        row = {"name": self.name, "verdict": self.verdict, "params": self.params, "figures": figures}
        return row | ({"error": self.error} if self.error else {})

    def as_line(self) -> str:
        """Return it for people."""
        words = [f"{name}={value}" for name, value in self.params.items()]
        words += [f"{name}={rounded(value):g}" for name, value in self.figures.items()]
        return f"{self.verdict:<11} {self.name:<40} {' '.join(words)}" + (
            f"\n            {self.error}" if self.error else ""
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows that belong together.

    Attributes:
        budget_s: seconds after which it is given up.
        rows: yields them; what it raises fails the part, and keeps the rows that it has yielded.
    """

    name: str
    budget_s: float
    rows: Callable[[Gpu, Sizes], AsyncIterator[Row]]


def check(holds: bool, otherwise: str) -> None:
    """Raise AssertionError unless something holds; unlike ``assert`` under ``python -O``, too."""
    if not holds:
        raise AssertionError(otherwise)


def why(error: BaseException) -> str:
    """Return an error as one line or several."""
    return f"{type(error).__name__}: {error}"
