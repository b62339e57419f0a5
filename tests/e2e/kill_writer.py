"""A process to be killed: it computes and backs up golden pages as fast as it can, prompt after prompt.

python -m tests.e2e.kill_writer DIRECTORY
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path

import torch

from hicache_async import DeviceKV
from hicache_async.stores._temp import TempFiles
from tests.toy_engine import NUM_LAYERS, PAGE_SIZE, open_cache, prompt, serve

PAGES_EACH = 8


def make_big_kv() -> DeviceKV:
    """Return tensors whose pages are 128 KiB, so that a kill meets one that is being written."""
    k, v = ([torch.zeros(64, PAGE_SIZE, 32, 64) for _ in range(NUM_LAYERS)] for _ in "kv")
    return DeviceKV.from_layers(k, v)


def prompt_of(number: int) -> list[int]:
    """Return the tokens of one prompt of the writer."""
    return prompt(number, PAGES_EACH * PAGE_SIZE + 1)


def begin_a_file(directory: str) -> None:
    """Begin an object that is never finished: whether the kill meets a real one is a matter of luck."""
    temps = TempFiles(f"{directory}/v2/temp")
    Path(temps.directory).mkdir(parents=True)
    Path(temps.new()).write_bytes(b"half a page")


async def main(directory: str) -> None:
    """Write until killed."""
    begin_a_file(directory)
    async with open_cache(kv=make_big_kv(), store=f"file://{directory}") as cache:
        for number in itertools.count():
            await serve(cache, f"request {number}", prompt_of(number))
            if number == 0:
                await cache.admin.flush()  # so that something is stored whenever the kill comes
            print(number, flush=True)  # noqa: T201 - what its parent waits for


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
