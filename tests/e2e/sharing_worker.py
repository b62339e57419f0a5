"""A process that is one rank of one deployment after the other: it serves prompts and says where their KV came from.

python -m tests.e2e.sharing_worker DIRECTORY

Each line that it reads is a job, each line that it prints is what came of it, or nothing where it was no rank.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from hicache_async.config import IO_MODES, HostLayout
from hicache_async.ranks.hub import HubRanks
from tests.ranks.worker import Folder
from tests.sharing.caches import CACHE_OPTIONS, open_rank, prompt
from tests.sharing.models import MODELS
from tests.sharing.ranks import Cut, Grid, configs


async def run(directory: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Serve the prompts of a job as its rank."""
    (model,) = [model for model in MODELS if model.name == job["model"]]
    grid, layout = Grid(**job["grid"]), HostLayout(job["layout"])
    options = {"host_layout": layout, "io_mode": IO_MODES[layout][0], **Cut(**job["cut"]).options(model)}
    config = list(configs(model, grid, **CACHE_OPTIONS, **options))[job["rank"]]
    async with AsyncExitStack() as stack:
        ranks = None
        if config.group_size > 1:
            ranks = await HubRanks.join(config, Folder(directory), name=job["name"], timeout_s=30)
            stack.push_async_callback(ranks.aclose)
        rank = await stack.enter_async_context(
            open_rank(model, grid, config, f"file://{directory}/kv", ranks)
        )
        books = [await rank.serve(prompt(model, number)) for number in job["prompts"]]
        return {"store": [each.store for each in books]}


def main(directory: Path) -> None:
    """Do jobs until there are no more."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(run(directory, json.loads(line)))), flush=True)  # noqa: T201 - for its parent


if __name__ == "__main__":
    main(Path(sys.argv[1]))
