"""Running a program of ours as somebody who has installed the library would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_program(script: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in ``directory`` with warnings as errors; returns how it ended and what it printed."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
