"""What both sides have in common: how often they measure, and how they tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence

NUM_WARMUPS = 2
NUM_SAMPLES = 10

Series = dict[str, list[float]]
"""What a record measured, sample by sample: the ``seconds``, and by other names what was counted."""


def steady(seconds: Sequence[float]) -> Series:
    """Return the seconds of all samples but the warm-ups."""
    return {"seconds": list(seconds[NUM_WARMUPS:])}


def report(records: Mapping[str, Callable[[], Series]]) -> None:
    """Measure the records named on the command line; print a JSON line with the samples of each."""
    for name in sys.argv[1:]:
        print(json.dumps({"name": name, **records[name]()}), flush=True)
