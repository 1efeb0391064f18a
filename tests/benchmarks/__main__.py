"""`python -m benchmarks`: run parts and print a table of ratios, or compare and show kept ones."""

import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

import click

from benchmarks import figures
from benchmarks.caching import jobs
from benchmarks.downloads import cluster, cold, download, start
from benchmarks.measure import Row, render
from benchmarks.node import dashboard, decisions, endpoint, restart, scale
from benchmarks.reading import (
    decoded,
    formats,
    indexed,
    joined,
    loaders,
    packing,
    permuted,
    shuffle,
    tables,
    tokens,
    warm,
)
from benchmarks.workplace import Workplace
from support.programs.cli import chosen, console

PARTS = {
    "download": download.measure,
    "warm": warm.measure,
    "formats": formats.measure,
    "batches": loaders.batches,
    "decoded": decoded.measure,
    "tokens": tokens.measure,
    "packing": packing.measure,
    "joined": joined.measure,
    "tables": tables.measure,
    "indexed": indexed.measure,
    "handover": loaders.handover,
    "cold": cold.measure,
    "start": start.measure,
    "half": jobs.half,
    "decisions": decisions.measure,
    "shuffle": shuffle.measure,
    "global": permuted.measure,
    "sharing": jobs.sharing,
    "cluster": cluster.measure,
    "restart": restart.measure,
    "scale": scale.measure,
    "dashboard": dashboard.measure,
    "endpoint": endpoint.measure,
}

FIGURES = "build/figures.jsonl"


@click.command()
@click.option(
    "--only",
    metavar="PARTS",
    default=",".join(PARTS),
    show_default=True,
    help="Parts, with commas.",
)
@click.option(
    "--scale", default=1.0, show_default=True, help="Share of the data, for a quick look."
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=4,
    show_default=True,
    help="Interleaved measurements of each contender.",
)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="Folder on the disk to be measured.  [default: temporary]",
)
@click.option(
    "--figures",
    "path",
    metavar="FILE",
    default=FIGURES,
    show_default=True,
    help="File of all figures.",
)
@click.option(
    "--compare",
    "ends",
    nargs=2,
    metavar="A B",
    help="Only compare two files, or two commits in FILE.",
)
@click.option(
    "--page", type=click.Path(path_type=Path), help="Only write the tables of a page from FILE."
)
def main(
    only: str,
    scale: float,
    rounds: int,
    root: Path | None,
    path: str,
    ends: tuple[str, str] | None,
    page: Path | None,
) -> None:
    """Compare shardcache with today's common tools, on this machine against a local S3 server."""
    try:
        if page is not None:
            page.write_text(figures.page(page.read_text(), figures.read(path, Path(path))))
        elif ends:
            before, after = (figures.read(end, Path(path)) for end in ends)
            console().print(figures.render(figures.compare(before, after)))
        else:
            _measure(chosen(only, PARTS), scale, rounds, root, Path(path))
    except (RuntimeError, ValueError, FileNotFoundError) as exn:
        raise click.ClickException(str(exn)) from exn


def _measure(parts: list[str], scale: float, rounds: int, root: Path | None, path: Path) -> None:
    # Whoever stops it by a signal gets the same tidying as with Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    head = {**figures.origin(Path(__file__).parent), "scale": scale}
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, Row]] = []
    failed: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-bench-", dir=root) as name,
        Workplace(Path(name), scale, rounds, console(stderr=True)) as place,
    ):
        place.check_space()
        for part, found in figures.recorded(
            {part: partial(PARTS[part], place) for part in parts}, path, **head
        ):
            if isinstance(found, Row):
                rows.append((part, found))
            else:
                place.say(f"[bold]{part}[/] failed: {found}")
                failed.append(part)
    machine = head["machine"]
    where = f"{machine['cores']} cores, Python {machine['python']}"
    title = f"{where}, {scale:.0%} of the data; appended to {path}"
    console().print(render(rows, title))
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; their rows before that are in {path}")


if __name__ == "__main__":
    main()
