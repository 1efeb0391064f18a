"""`shardcache demo`: two training jobs on one cache, and a check of what they got."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.cli.common import fail, json_option, print_json
from shardcache.errors import ShardcacheError

if TYPE_CHECKING:
    from rich.console import Console

    from shardcache.cli.demo.outcome import Epoch, Outcome
    from shardcache.cli.demo.world import Node

JOBS = ("first", "second")

Say = Callable[[str], None]


@click.command()
@json_option
def demo(as_json: bool) -> None:
    """Run the main job on this machine; nothing from outside is needed.

    Starts an S3 server with a small dataset of JPEG images, a daemon with an empty cache, and two training jobs at
    the same time, each of 2 ranks with 2 DataLoader workers, for 2 epochs. Exits 1 unless each job saw each sample
    exactly once an epoch and the dataset came from the store once. Leaves nothing behind.
    """
    _require_packages()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # the same orderly end
    from shardcache.cli.output import make_console

    console = make_console()
    with tempfile.TemporaryDirectory(prefix="shardcache-demo-") as folder:
        outcome = asyncio.run(_run(Path(folder), _silent if as_json else console.print))
    if as_json:
        print_json(outcome.to_json())
    else:
        _show(console, outcome)
    if not outcome.ok:
        fail()


def _require_packages() -> None:
    missing = [name for name in ("torch", "moto", "flask", "boto3", "PIL") if find_spec(name) is None]
    if missing:
        raise ShardcacheError(
            f"the demo needs packages that are not installed: {', '.join(missing)}",
            remedy="pip install 'shardcache[demo]'",
        )


def _silent(_line: str) -> None:
    """Say nothing: with --json, the outcome is the only line."""


async def _run(folder: Path, say: Say) -> Outcome:
    from shardcache.cli.client import AdminClient
    from shardcache.cli.demo import images, outcome, world

    node = world.Node(folder)
    say(f"drawing {images.SHARDS * images.IMAGES_PER_SHARD} JPEG images into {images.SHARDS} tar shards")
    shards = list(images.draw_shards())
    keys = frozenset(key for shard in shards for key in shard.keys)
    dataset = outcome.Dataset(keys, len(shards), sum(len(shard.body) for shard in shards))
    with world.s3_server() as endpoint:
        say(f"putting them into an S3 server at {endpoint}, and starting a daemon with an empty cache")
        await asyncio.to_thread(world.upload, endpoint, shards)
        async with node.daemon(endpoint), AdminClient(node.socket) as daemon:
            say(f"training {len(JOBS)} jobs at once: {world.RANKS} ranks × 2 workers, {world.EPOCHS} epochs each")
            epochs = await _train(node, f"s3://{world.BUCKET}/train-{{0000..{len(shards) - 1:04d}}}.tar")
            page = await daemon.status()
    return outcome.Outcome(dataset, tuple(epochs), page["counters"]["origin_bytes"])


async def _train(node: Node, urls: str) -> list[Epoch]:
    from shardcache.cli.demo.outcome import epochs_of

    try:
        async with asyncio.TaskGroup() as group:
            # Another seed, another order: one download serves both all the same.
            jobs = {name: group.create_task(node.train(urls, name, seed)) for seed, name in enumerate(JOBS)}
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [epoch for name, ranks in jobs.items() for epoch in epochs_of(name, ranks.result())]


def _show(console: Console, outcome: Outcome) -> None:
    from shardcache.cli.output import duration, make_table, size

    dataset = outcome.dataset
    numbers = ("epoch", "samples", "loss", "waited for data")
    table = make_table("job", "epoch", "samples", "each exactly once", "loss", "waited for data", numbers=numbers)
    for row in outcome.epochs:
        problem = row.problem(dataset)
        once = f"[red]no: {problem}[/red]" if problem else "[green]yes[/green]"
        table.add_row(row.job, str(row.epoch), f"{len(row.keys):,}", once, f"{row.loss:.2f}", duration(row.waited_s))
    console.print()
    console.print(table)
    once = "[green]once[/green]" if outcome.fetched_once else "[red]not once[/red]"
    fetched, whole = outcome.origin_bytes, dataset.size_bytes
    console.print(f"\nfrom the store: {size(fetched)}, {fetched / whole:.2f} × the dataset's {size(whole)}: {once}")
    console.print(f"read by the jobs: {size(len(outcome.epochs) * whole)}, from the node's disk")
