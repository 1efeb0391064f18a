"""`shardcache demo`: two training jobs on one cache, and a check of what they read."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.common import fail, json_option, print_json
from shardcache.errors import ShardcacheError

if TYPE_CHECKING:
    from rich.console import Console

    from shardcache.cli.demo.outcome import Epoch, Outcome
    from shardcache.cli.demo.world import Node, Run

_INDEX = "index.json"

Say = Callable[[str], None]


@click.command()
@json_option
def demo(as_json: bool) -> None:
    """Run a complete example on this machine, without external services.

    Starts an S3 server with a small dataset of JPEG images and a daemon with an empty cache, writes an index, and runs
    two training jobs concurrently, each with 2 ranks of 2 DataLoader workers, for 2 epochs; one job is stopped midway
    and resumes from its checkpoint with 1 rank. Exits 1 unless every job saw each sample exactly once per epoch (apart
    from padding), all ranks took the same number of steps, and the dataset was downloaded only once. Removes all its
    files at the end.
    """
    _require_packages()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # the same orderly shutdown
    from shardcache.cli.display.output import make_console

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
    """Print nothing: with --json, the outcome is the only line."""


async def _run(folder: Path, say: Say) -> Outcome:
    from shardcache.cli.admin_client import AdminClient
    from shardcache.cli.demo import images, outcome, world

    node = world.Node(folder)
    uneven = images.IMAGES_OF_SHARDS
    say(f"creating {len(uneven)} tar shards of {min(uneven)} to {max(uneven)} JPEG images, {sum(uneven)} in total")
    shards = list(images.draw_shards())
    keys = frozenset(key for shard in shards for key in shard.keys)
    dataset = outcome.Dataset(keys, len(shards), sum(len(shard.body) for shard in shards))
    with world.s3_server() as endpoint:
        say(f"uploading them to an S3 server at {endpoint}, and starting a daemon with an empty cache")
        await asyncio.to_thread(world.upload, endpoint, {shard.name: shard.body for shard in shards})
        async with node.daemon(endpoint), AdminClient(node.socket) as daemon:
            pattern = f"s3://{world.BUCKET}/train-{{0000..{len(shards) - 1:04d}}}.tar"
            say(f"counting their samples: shardcache index '{pattern}' -o {_INDEX}")
            await asyncio.to_thread(world.upload, endpoint, {_INDEX: await node.index(pattern)})
            say(f"training 2 concurrent jobs from s3://{world.BUCKET}/{_INDEX}: {world.RANKS} ranks × 2 workers each;")
            say("the second is stopped midway through its last epoch, and resumes from its checkpoint with 1 rank")
            epochs = await _train(node, f"s3://{world.BUCKET}/{_INDEX}")
            page = await daemon.status()
    return outcome.Outcome(dataset, tuple(epochs), page["counters"]["origin_bytes"])


async def _train(node: Node, urls: str) -> list[Epoch]:
    from shardcache.cli.demo.outcome import epochs_of
    from shardcache.cli.demo.world import Run

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


async def _in_turn(node: Node, urls: str, runs: Sequence[Run]) -> list[list[Any]]:
    return [await node.train(urls, run) for run in runs]


def _show(console: Console, outcome: Outcome) -> None:
    from shardcache.cli.display.output import make_table
    from shardcache.units import duration, size

    dataset = outcome.dataset
    columns = ("job", "epoch", "samples", "padding", "each once", "steps by rank", "equal", "loss", "data wait")
    table = make_table(*columns, numbers=("epoch", "samples", "padding", "loss", "data wait"))
    for row in outcome.epochs:
        samples, padding = f"{len(dataset.keys & set(row.keys)):,}", str(row.padding(dataset))
        once, equal = _verdict(row.wrong_samples(dataset)), _verdict(row.wrong_steps())
        steps = ", then ".join(" | ".join(map(str, leg.steps)) for leg in row.legs)
        loss, waited = f"{row.loss:.2f}", duration(row.waited_s)
        table.add_row(row.job, str(row.epoch), samples, padding, once, steps, equal, loss, waited)
    console.print()
    console.print(table)
    once = "[green]once[/green]" if outcome.fetched_once else "[red]not once[/red]"
    fetched, whole = outcome.origin_bytes, dataset.size_bytes
    console.print(f"\nfrom the origin: {size(fetched)}, {fetched / whole:.2f} × the dataset's {size(whole)}: {once}")
    console.print(f"read by the jobs: {size(len(outcome.epochs) * whole)}, from the node's disk")


def _verdict(problem: str) -> str:
    return f"[red]no: {problem}[/red]" if problem else "[green]yes[/green]"
