"""Makes the modules of the examples importable, as they are for whoever runs one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
