"""Compile the kernel for GPUs that this machine need not have, and look at what came out."""

from __future__ import annotations

import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hicache_async.cuda import kernels

LAUNCHES: dict[str, dict[str, int]] = {
    "a whole page": {"num_cells": 1, "num_tokens": 1, "num_groups": 1, "row_words": 4096},
    "a page in pieces": {"num_cells": 2, "num_tokens": 16, "num_groups": 4, "row_words": 32},
    "a page of one word": {"num_cells": 1, "num_tokens": 1, "num_groups": 1, "row_words": 1},
}
"""What a launch is given of each kind; all other numbers are multiples of 16."""


def compiled(launch: dict[str, int], arch: int) -> dict[str, str]:
    """Compile as a launch would: arguments of 1 are constants, and multiples of 16 are known to be that."""
    kernel = kernels._copy_words
    signature, constants, hints = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        is_address = name in {"source", "target", "source_pages", "target_pages"}
        signature[name] = "*i64" if is_address else "i32"
        constant = kernels._BLOCK_WORDS if name == "BLOCK" else 1 if launch.get(name) == 1 else None
        if constant is not None:
            signature[name], constants[position,] = "constexpr", constant
        elif name not in kernel.do_not_specialize and launch.get(name, 16) % 16 == 0:
            hints[position,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": kernels._NUM_WARPS, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm


def check(what: str, arch: int) -> None:
    """Raise AssertionError unless the code of ``what`` moves 16 bytes at once where there are so many."""
    code = compiled(LAUNCHES[what], arch)
    assert code["cubin"]
    moves = re.findall(r"(?:ld|st)\.global\.(?:v2\.b64|v4\.b32)", code["ptx"])
    wide = kernels._BLOCK_WORDS * 8 // (kernels._NUM_WARPS * 32) // 16
    expected = 0 if LAUNCHES[what]["row_words"] == 1 else 2 * wide
    assert len(moves) == expected, (
        f"{what} on sm_{arch}: {len(moves)} accesses of 16 bytes, expected {expected}"
    )


if __name__ == "__main__":
    for what in LAUNCHES:
        for arch in (80, 90):
            check(what, arch)
