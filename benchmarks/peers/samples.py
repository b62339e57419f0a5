"""What both sides have in common: how often they measure, and how they tell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

NUM_WARMUPS = 2
NUM_SAMPLES = 10


def report(records: Mapping[str, Callable[[], list[float]]]) -> None:
    """Measure the records named on the command line; print a JSON line with the seconds of each."""
    for name in sys.argv[1:]:
        seconds = records[name]()[NUM_WARMUPS:]
        print(json.dumps({"name": name, "seconds": seconds}), flush=True)
