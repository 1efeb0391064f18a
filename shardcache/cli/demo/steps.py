"""The steps of the demo, from its dataset to its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardcache.cli.demo import images, world
from shardcache.cli.demo.outcome import Dataset, Epoch, Outcome, epochs_of
from shardcache.cli.demo.world import DemoNode, Run

_INDEX = "index.json"


async def run(folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run the demo in a folder, and describe each step; return its outcome."""
    node = world.DemoNode(folder)
    uneven = images.IMAGES_OF_SHARDS
    say(f"creating {len(uneven)} tar shards of {min(uneven)} to {max(uneven)} JPEG images, {sum(uneven)} in total")
    shards = list(images.draw_shards())
    keys = frozenset(key for shard in shards for key in shard.keys)
    dataset = Dataset(keys, len(shards), sum(len(shard.body) for shard in shards))
    with world.s3_server() as endpoint:
        say(f"uploading them to an S3 server at {endpoint}, and starting a daemon with an empty cache")
        await asyncio.to_thread(world.upload, endpoint, {shard.name: shard.body for shard in shards})
        async with node.daemon(endpoint):
            pattern = f"s3://{world.BUCKET}/train-{{0000..{len(shards) - 1:04d}}}.tar"
            say(f"counting their samples: shardcache index '{pattern}' -o {_INDEX}")
            await asyncio.to_thread(world.upload, endpoint, {_INDEX: await node.index(pattern)})
            say(f"training 2 concurrent jobs from s3://{world.BUCKET}/{_INDEX}: {world.RANKS} ranks × 2 workers each;")
            say("the second is stopped midway through its last epoch, and resumes from its checkpoint with 1 rank")
            epochs = await _train(node, f"s3://{world.BUCKET}/{_INDEX}")
            page = await node.status()
    return Outcome(dataset, tuple(epochs), page["counters"]["origin_bytes"])


async def _train(node: DemoNode, urls: str) -> list[Epoch]:
    # Different seeds, so different orders: one download still serves both.
    runs = {
        "first": [Run("first", "first", seed=0)],
        "second": [Run("second", "second", seed=1, stop_after=8), Run("resumed", "second", seed=1, ranks=1)],
    }
    try:
        async with asyncio.TaskGroup() as group:
            jobs = {job: group.create_task(_in_turn(node, urls, each)) for job, each in runs.items()}
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [epoch for job, reports in jobs.items() for epoch in epochs_of(job, reports.result())]


async def _in_turn(node: DemoNode, urls: str, runs: Sequence[Run]) -> list[list[Any]]:
    return [await node.train(urls, run) for run in runs]
