"""copy_pages, in Python processes of their own: this one never imports triton, which reads its environment once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_async.errors import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def run_child(*arguments: str, **environment: str) -> None:
    """Run Python on ``arguments`` and fail with all that it prints when it fails."""
    child = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if child.returncode:
        pytest.fail(f"{arguments[-1]} ended with {child.returncode}\n{child.stdout}", pytrace=False)


@pytest.mark.timeout(300)
def test_kernel_equals_oracle() -> None:
    """Interpreted on the CPU the kernel passes each of ``kernel_cases.py``; one that fails is named."""
    cases = str(HERE / "kernel_cases.py")
    run_child("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", cases, TRITON_INTERPRET="1")


@pytest.mark.timeout(180)
def test_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """Without a GPU the compiler makes code for one, which reads and writes 16 bytes at once where pages allow it."""
    script = str(HERE / "kernel_compiling.py")
    run_child(script, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where triton is missing the kernels are a ConfigError that names the extra and the mode that needs none."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hicache_async.cuda.kernels", raising=False)
    with pytest.raises(
        ConfigError, match=r'needs triton .*pip install "hicache-async\[triton\]".*io_mode="direct"'
    ):
        import hicache_async.cuda.kernels  # noqa: F401
