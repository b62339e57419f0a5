"""The deadline of a prefetch: a formula with a cap, and times that cannot be one."""

from __future__ import annotations

import math

import pytest

from hicache_async import CacheConfig, ConfigError, PrefetchPolicy


@pytest.mark.parametrize(
    ("num_tokens", "deadline_s"),
    [(0, 1.0), (1, 1 + 0.25 / 1024), (1024, 1.25), (4096, 2.0), (28_672, 8.0), (1 << 20, 8.0)],
)
def test_the_deadline_by_default(num_tokens: int, deadline_s: float) -> None:
    """A second, a quarter more for each 1,024 tokens, and never more than eight."""
    assert PrefetchPolicy.timeout().deadline_s(num_tokens, CacheConfig()) == pytest.approx(deadline_s)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["base_s", "per_ki_token_s", "cap_s"])
def test_times_that_no_deadline_has_are_refused(name: str, value: float) -> None:
    """Neither a policy nor the options take a time that is negative, infinite or none, and both name it."""
    with pytest.raises(ConfigError, match=f"{name} is"):
        PrefetchPolicy.timeout(**{name: value})
    with pytest.raises(ConfigError, match=f"prefetch_timeout_{name} is"):
        CacheConfig(**{f"prefetch_timeout_{name}": value})  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [PrefetchPolicy.best_effort(), PrefetchPolicy.wait_complete()])
def test_only_timeout_has_a_deadline(policy: PrefetchPolicy) -> None:
    """Neither of the other two ends by time."""
    assert policy.deadline_s(1 << 20, CacheConfig()) is None


def test_the_times_of_a_policy_come_before_those_of_the_options() -> None:
    """Each time that a policy does not name comes from the options."""
    config = CacheConfig(
        prefetch_timeout_base_s=2, prefetch_timeout_per_ki_token_s=1, prefetch_timeout_cap_s=50
    )
    assert PrefetchPolicy.timeout().deadline_s(4096, config) == 6
    assert PrefetchPolicy.timeout(base_s=0).deadline_s(4096, config) == 4
    assert PrefetchPolicy.timeout(per_ki_token_s=0).deadline_s(4096, config) == 2
    assert PrefetchPolicy.timeout(cap_s=1).deadline_s(4096, config) == 1
