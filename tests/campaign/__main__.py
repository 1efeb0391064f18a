"""`python -m campaign`: run parts, and print what was broken and what became of it."""

import signal
import sys
import tempfile
import time
from pathlib import Path

import click

from campaign.harness import PARTS, Result, render, run
from support.programs.cli import chosen, console


@click.command()
@click.option(
    "--only",
    metavar="PARTS",
    default=",".join(PARTS),
    show_default=True,
    help="Parts, with commas.",
)
@click.option(
    "--scale", default=1.0, show_default=True, help="Share of the faults, for a quick look."
)
def main(only: str, scale: float) -> None:
    """Break store, disk, daemon and the messages between them; fail if any of it does harm."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results: list[Result] = []
    out = console()
    log = console(stderr=True)
    begun_s = time.monotonic()
    for name in chosen(only, PARTS):
        with tempfile.TemporaryDirectory(prefix=f"shardcache-{name}-") as folder:
            for result in run(name, scale, Path(folder)):
                results.append(result)
                log.print(f"{time.monotonic() - begun_s:7.1f} s  {' · '.join(result.cells())}")
                if result.first_failure:
                    log.print(result.first_failure, markup=False)
    out.print(render(results, f"faults on purpose, {time.monotonic() - begun_s:,.0f} s"))
    if not all(result.passed for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
