"""`python -m benchmarks`: run the parts that are asked for and print one table of ratios."""

import json
import os
import platform
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.caching import jobs
from benchmarks.downloads import cluster, cold, download
from benchmarks.measure import Row, render
from benchmarks.node import dashboard, decisions, restart, scale
from benchmarks.reading import decoded, joined, loaders, shuffle, tokens, warm
from benchmarks.workplace import Workplace
from support.programs.cli import chosen, console

PARTS = {
    "download": download.measure,
    "warm": warm.measure,
    "batches": loaders.batches,
    "decoded": decoded.measure,
    "tokens": tokens.measure,
    "joined": joined.measure,
    "handover": loaders.handover,
    "cold": cold.measure,
    "half": jobs.half,
    "decisions": decisions.measure,
    "shuffle": shuffle.measure,
    "sharing": jobs.sharing,
    "cluster": cluster.measure,
    "restart": restart.measure,
    "scale": scale.measure,
    "dashboard": dashboard.measure,
}

# Packages whose versions are told with the results.
PACKAGES = ("shardcache", "awscrt", "litdata", "mosaicml-streaming", "obstore", "s5cmd", "torch", "webdataset")


@click.command()
@click.option("--only", metavar="PARTS", default=",".join(PARTS), show_default=True, help="Parts, with commas.")
@click.option("--scale", default=1.0, show_default=True, help="Share of the data, for a quick look.")
@click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Interleaved measurements of each contender."
)
@click.option(
    "--root", type=click.Path(path_type=Path), help="Folder on the disk to be measured.  [default: temporary]"
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the results there as well.")
def main(only: str, scale: float, rounds: int, root: Path | None, json_path: Path | None) -> None:
    """Compare shardcache with the tools that people use today, on this machine, against a local S3 server."""
    # Whoever stops it by a signal gets the same tidying as with Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parts = chosen(only, PARTS)
    rows: list[Row] = []
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=root) as name,
            Workplace(Path(name), scale, rounds, console(stderr=True)) as place,
        ):
            place.check_space()
            for part in parts:
                place.say(f"[bold]{part}[/]")
                rows += PARTS[part](place)
    except RuntimeError as exn:
        raise click.ClickException(str(exn)) from exn
    machine = _machine()
    console().print(
        render(rows, f"{machine['cpus']} CPUs, Python {machine['python']}, {1e2 * scale:.0f} % of the data")
    )
    if json_path is not None:
        results = {"machine": machine, "scale": scale, "rounds": rounds, "rows": [row.to_json() for row in rows]}
        json_path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def _machine() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    main()
