"""CacheConfig: every option, its default, its range, and the combinations that are refused."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from .errors import ConfigError, NamespaceError
from .eviction import EvictionPolicy, policy_named


class _Word(enum.StrEnum):
    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        word = str(value).replace("-", "_")
        return next((member for member in cls if member.value == word), None)


class WritePolicy(_Word):
    """When a committed page is copied to the host."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchMode(_Word):
    """How a prefetch ends."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class HostLayout(_Word):
    """Axis order of the host arena."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"
    HEAD_GROUPED = "head_grouped"


class IoMode(_Word):
    """How bytes move between device and host."""

    KERNEL = "kernel"
    DIRECT = "direct"


class KeyScheme(_Word):
    """How an object of the store is named."""

    RANK_SUFFIX = "rank_suffix"
    UNIFIED = "unified"


class RankLoss(_Word):
    """What a cache does after a rank was lost."""

    NO_REUSE = "no_reuse"
    CLOSE = "close"


class PrefetchOverflow(_Word):
    """What a prefetch does when the host pool cannot take the whole hit."""

    SHRINK = "shrink"
    REFUSE = "refuse"


IO_MODES: dict[HostLayout, tuple[IoMode, ...]] = {
    HostLayout.LAYER_FIRST: (IoMode.KERNEL, IoMode.DIRECT),
    HostLayout.PAGE_FIRST: (IoMode.KERNEL,),
    HostLayout.PAGE_FIRST_DIRECT: (IoMode.DIRECT,),
    HostLayout.HEAD_GROUPED: (IoMode.KERNEL,),
}
"""The io modes that go with each host layout; any other pair is refused."""

_WORDS: dict[str, type[_Word]] = {
    "write_policy": WritePolicy,
    "prefetch_policy": PrefetchMode,
    "host_layout": HostLayout,
    "io_mode": IoMode,
    "key_scheme": KeyScheme,
    "on_rank_loss": RankLoss,
    "prefetch_overflow": PrefetchOverflow,
}

_ALIASES = {"io_backend": "io_mode", "mem_layout": "host_layout"}

# field: (type, lowest allowed, whether the lowest itself is allowed, highest allowed)
_RANGES: dict[str, tuple[type, float, bool, float]] = {
    "page_size": (int, 1, True, 1 << 20),
    "host_ratio": (float, 0, False, math.inf),
    "host_reserve_bytes": (int, 0, True, math.inf),
    "prefetch_threshold_tokens": (int, 0, True, math.inf),
    "prefetch_timeout_base_s": (float, 0, True, math.inf),
    "prefetch_timeout_per_ki_token_s": (float, 0, True, math.inf),
    "prefetch_timeout_cap_s": (float, 0, True, math.inf),
    "prefetch_capacity_fraction": (float, 0, False, 1),
    "write_back_low_water": (float, 0, True, 1),
    "pin_capacity_fraction": (float, 0, True, 1),
    "store_batch_pages": (int, 1, True, 1 << 16),
    "max_prefetches_in_flight": (int, 1, True, 1 << 16),
    "max_loads_in_flight": (int, 1, True, 1 << 10),
    "max_offloads_in_flight": (int, 1, True, 1 << 16),
    "max_backups_pending": (int, 1, True, 1 << 24),
    "close_timeout_s": (float, 0, True, math.inf),
    "store_timeout_s": (float, 0, False, math.inf),
    "consensus_timeout_s": (float, 0, False, math.inf),
    "ticket_timeout_s": (float, 0, False, math.inf),
    "group_timeout_s": (float, 0, False, math.inf),
    "tp_size": (int, 1, True, 1 << 16),
    "pp_size": (int, 1, True, 1 << 16),
    "cp_size": (int, 1, True, 1 << 16),
}

# As above, where None is allowed, too
_OPTIONAL_RANGES: dict[str, tuple[type, float, bool, float]] = {
    "host_bytes": (int, 0, False, math.inf),
    "ranks_on_host": (int, 1, True, 1 << 16),
    "load_threshold_tokens": (int, 0, True, math.inf),
    "total_kv_heads": (int, 1, True, 1 << 20),
    "head_group": (int, 1, True, 1 << 20),
    "tp_lcm_size": (int, 1, True, 1 << 20),
    "layer_partition": (int, 1, True, 1 << 20),
    "first_layer": (int, 0, True, 1 << 20),
    "total_layers": (int, 1, True, 1 << 20),
    "token_group": (int, 1, True, 1 << 20),
}

_UNIFIED_ONLY = ("head_group", "tp_lcm_size", "layer_partition", "total_layers", "token_group")
_HEAD_GROUPED_ONLY = ("head_group", "tp_lcm_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The options of one cache. Checked when built: a value that cannot work raises ConfigError.

    Times are seconds, sizes are bytes per rank, lengths are tokens; each name carries its unit.
    """

    model_id: str = "model"
    """Whose KV this is; part of every key. Two models must never share one."""
    fingerprint: str = ""
    """What else makes bytes non-interchangeable: revision, rope scaling, quantisation."""
    page_size: int = 64  # tokens; with context parallelism those of the whole group
    host_ratio: float = 2.0
    host_bytes: int | None = None
    host_reserve_bytes: int = 10 << 30
    ranks_on_host: int | None = None
    """How many ranks of this machine take a host pool of this size; None: all of the grid."""
    allow_small_host: bool = False
    host_layout: HostLayout = HostLayout.PAGE_FIRST
    io_mode: IoMode = IoMode.KERNEL
    device_eviction_policy: str | EvictionPolicy = "lru"
    host_eviction_policy: str | EvictionPolicy = "lru"
    """Who leaves the tier first: lru, lfu, slru, fifo, priority, or an object with the method ``key``."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH_SELECTIVE
    write_back_low_water: float = 0.1
    """Under write_back this share of the device pages is kept free, or copied to the host ahead of eviction."""
    pin_capacity_fraction: float = 0.5
    """How much of a pool an operator's pins may keep."""
    prefetch_policy: PrefetchMode = PrefetchMode.TIMEOUT
    prefetch_threshold_tokens: int = 256
    prefetch_timeout_base_s: float = 1.0
    prefetch_timeout_per_ki_token_s: float = 0.25
    prefetch_timeout_cap_s: float = 8.0
    prefetch_capacity_fraction: float = 0.5
    prefetch_overflow: PrefetchOverflow = PrefetchOverflow.SHRINK
    store_batch_pages: int = 128
    load_threshold_tokens: int | None = None
    """A smaller load is recomputed instead; None: one page."""
    max_prefetches_in_flight: int = 64
    """Prefetches that use the store at once; others wait their turn, by priority."""
    max_loads_in_flight: int = 3
    max_offloads_in_flight: int = 64
    """Device-to-host copies under way at once; one more is skipped, counted and made up for later."""
    max_backups_pending: int = 1024
    """Paths waiting to be written to the store; one more is skipped, counted and made up for later."""
    existence_ttl_s: float = 5.0
    """How long a store may believe that an object exists; -1: for ever."""
    close_timeout_s: float = 10.0
    store_timeout_s: float = 5.0
    consensus_timeout_s: float = 1.0
    ticket_timeout_s: float = 30.0
    group_timeout_s: float = 60.0
    on_rank_loss: RankLoss = RankLoss.NO_REUSE
    key_scheme: KeyScheme = KeyScheme.RANK_SUFFIX
    total_kv_heads: int | None = None
    """KV heads of the whole model; None: those of this rank x tp_size."""
    head_group: int | None = None
    """KV heads of one stored chunk; None: those of this rank."""
    tp_lcm_size: int | None = None
    """Another way to say head_group: the least common multiple of the fleet's tp sizes."""
    layer_partition: int | None = None
    """Layers of one stored chunk; None: those of this stage."""
    first_layer: int | None = None
    """Where this pipeline stage's layers begin in the model; to be said on all stages but the first."""
    total_layers: int | None = None
    """Layers of the whole model."""
    token_group: int | None = None
    """Tokens of one stored chunk; None: those of a page that this rank holds."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            object.__setattr__(self, name, _as_word(name, getattr(self, name), words))
        for name, (kind, low, low_allowed, high) in _RANGES.items():
            _check_number(name, getattr(self, name), kind, low, low_allowed, high)
        for name in ("device_eviction_policy", "host_eviction_policy"):
            policy_named(getattr(self, name), field=name)
        for name, (kind, low, low_allowed, high) in _OPTIONAL_RANGES.items():
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), kind, low, low_allowed, high)
        if self.existence_ttl_s != -1:
            _check_number("existence_ttl_s", self.existence_ttl_s, float, 0, True, math.inf)
        _check_text("model_id", self.model_id, may_be_empty=False)
        _check_text("fingerprint", self.fingerprint, may_be_empty=True)
        if not isinstance(self.allow_small_host, bool):
            raise ConfigError(f"allow_small_host is {self.allow_small_host!r}; give True or False")
        self._check_grid()
        self._check_layout()
        self._check_key_scheme()

    def _check_grid(self) -> None:
        for axis in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
                raise NamespaceError(
                    f"{axis}_rank is {rank!r}; it must be an integer in 0 .. {axis}_size-1 = {size - 1}"
                )

    def _check_layout(self) -> None:
        allowed = IO_MODES[self.host_layout]
        if self.io_mode not in allowed:
            pairs = "; ".join(f"{layout}: {', '.join(modes)}" for layout, modes in IO_MODES.items())
            raise ConfigError(
                f"host_layout {self.host_layout} does not go with io_mode {self.io_mode}; these do: {pairs}"
            )

    def _check_key_scheme(self) -> None:
        groups_heads = self.host_layout is HostLayout.HEAD_GROUPED
        for name in () if self.key_scheme is KeyScheme.UNIFIED else _UNIFIED_ONLY:
            if getattr(self, name) is not None and not (groups_heads and name in _HEAD_GROUPED_ONLY):
                raise NamespaceError(
                    f"{name} is {getattr(self, name)} and key_scheme is {self.key_scheme}, which names whole pages of "
                    f"one rank; leave {name} unset, or set key_scheme to {KeyScheme.UNIFIED}"
                )
        if self.tp_lcm_size is not None and self.tp_lcm_size % self.tp_size:
            raise NamespaceError(
                f"tp_lcm_size is {self.tp_lcm_size}, no multiple of tp_size {self.tp_size}; set it to the least "
                "common multiple of the tp sizes of all that share"
            )

    @classmethod
    def from_mapping(cls, options: Mapping[str, object]) -> Self:
        """Build from a mapping, as read from a file.

        Args:
            options: field names to values; ``io_backend`` is accepted for ``io_mode`` and
                ``mem_layout`` for ``host_layout``.
        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        known: dict[str, object] = {}
        for name, value in options.items():
            word = str(name).replace("-", "_")
            field_name = _ALIASES.get(word, word)
            if field_name not in names:
                raise ConfigError(f"{name} is not an option; the options are {', '.join(sorted(names))}")
            if field_name in known:
                raise ConfigError(
                    f"{name} is {value!r}, but {field_name} was given already; give one of the two"
                )
            known[field_name] = value
        return cls(**known)  # type: ignore[arg-type]

    @property
    def group_size(self) -> int:
        """Ranks of the whole grid, which agree as one flat group."""
        return self.tp_size * self.pp_size * self.cp_size

    @property
    def group_rank(self) -> int:
        """Where this process stands among them; tp varies fastest, then cp, then pp."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def effective_ranks_on_host(self) -> int:
        """Ranks that share this machine's memory."""
        return self.ranks_on_host or self.group_size

    @property
    def effective_prefetch_threshold_tokens(self) -> int:
        """Fewer missing tokens than this are not worth asking the store for."""
        return max(self.prefetch_threshold_tokens, self.page_size)

    @property
    def effective_load_threshold_tokens(self) -> int:
        """Fewer host tokens than this are recomputed rather than loaded."""
        return self.page_size if self.load_threshold_tokens is None else self.load_threshold_tokens


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How one prefetch ends; times that are None come from the cache's config.

    Formula: the deadline of ``timeout`` is min(cap, base + per_ki_token x tokens / 1024).
    """

    mode: PrefetchMode
    base_s: float | None = None
    per_ki_token_s: float | None = None
    cap_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _as_word("mode", self.mode, PrefetchMode))
        for name in ("base_s", "per_ki_token_s", "cap_s"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, float, 0, True, math.inf)

    @classmethod
    def best_effort(cls) -> PrefetchPolicy:
        """Run until complete, stopped, or its waiter is cancelled."""
        return cls(PrefetchMode.BEST_EFFORT)

    @classmethod
    def wait_complete(cls) -> PrefetchPolicy:
        """Run until complete; the cache never stops it, the caller's cancel does."""
        return cls(PrefetchMode.WAIT_COMPLETE)

    @classmethod
    def timeout(
        cls, base_s: float | None = None, per_ki_token_s: float | None = None, cap_s: float | None = None
    ) -> PrefetchPolicy:
        """Stop at a deadline that grows with the tokens asked for, up to a cap; what arrived is kept.

        Raises: ConfigError: a time that is negative, infinite or not a number.
        """
        return cls(PrefetchMode.TIMEOUT, base_s, per_ki_token_s, cap_s)

    def deadline_s(self, num_tokens: int, config: CacheConfig) -> float | None:
        """Return how long a prefetch of ``num_tokens`` may take; None: as long as it wants."""
        if self.mode is not PrefetchMode.TIMEOUT:
            return None
        base_s = config.prefetch_timeout_base_s if self.base_s is None else self.base_s
        per_s = config.prefetch_timeout_per_ki_token_s if self.per_ki_token_s is None else self.per_ki_token_s
        cap_s = config.prefetch_timeout_cap_s if self.cap_s is None else self.cap_s
        return min(cap_s, base_s + per_s * num_tokens / 1024)


def _as_word(name: str, value: object, words: type[_Word]) -> _Word:
    try:
        return words(str(value))
    except ValueError:
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(words)}") from None


def _check_text(name: str, value: object, *, may_be_empty: bool) -> None:
    right = isinstance(value, str) and (bool(value) or may_be_empty)
    if right and any("\ud800" <= letter <= "\udfff" for letter in str(value)):
        right = False  # half of a surrogate pair has no bytes, so it cannot be part of a key
    if not right:
        kind = "a string" if may_be_empty else "a non-empty string that names the model"
        raise ConfigError(f"{name} is {value!r}; give {kind}, of valid Unicode")


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that no float can hold
        return False


def _check_number(name: str, value: object, kind: type, low: float, low_allowed: bool, high: float) -> None:
    wanted = "an integer" if kind is int else "a finite number"
    bound = f"{'>=' if low_allowed else '>'} {low}" + (f" and <= {high}" if high != math.inf else "")
    accepted = int if kind is int else (int, float)
    right = isinstance(value, accepted) and not isinstance(value, bool)
    if right:
        number: float = value  # type: ignore[assignment]
        right = (
            (kind is int or _is_finite(number)) and low <= number <= high and (low_allowed or number != low)
        )
    if not right:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted} {bound}")
