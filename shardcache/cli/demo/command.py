"""`shardcache demo`: two training jobs on one cache, and a check of what they read."""

from __future__ import annotations

import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardcache.cli.common import fail, json_option, print_json
from shardcache.errors import ShardcacheError

if TYPE_CHECKING:
    from rich.console import Console

    from shardcache.cli.demo.outcome import Outcome


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
    import asyncio

    from shardcache.cli.demo.world import run
    from shardcache.cli.output import make_console

    console = make_console()
    with tempfile.TemporaryDirectory(prefix="shardcache-demo-") as folder:
        outcome = asyncio.run(run(Path(folder), _silent if as_json else console.print))
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


def _show(console: Console, outcome: Outcome) -> None:
    from shardcache.cli.output import make_table
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
    once = "[green]once[/green]" if outcome.checks["fetched_once"] else "[red]not once[/red]"
    fetched, whole = outcome.origin_bytes, dataset.size_bytes
    console.print(f"\nfrom the origin: {size(fetched)}, {fetched / whole:.2f} × the dataset's {size(whole)}: {once}")
    console.print(f"read by the jobs: {size(len(outcome.epochs) * whole)}, from the node's disk")


def _verdict(problem: str) -> str:
    return f"[red]no: {problem}[/red]" if problem else "[green]yes[/green]"
