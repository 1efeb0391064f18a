"""Plots of the tables that docs/benchmarks.md has: bars of shardcache, and of what stands beside it."""

import re
from pathlib import Path
from typing import NamedTuple

from canvas import Canvas

PAGE = Path(__file__).parents[1] / "benchmarks.md"

LEFT = 210
FULL_PX = 380
BAR_PX = 20
ROW_PX = 26
GROUP_PX = 40
TOP_PX = 34

_ROW = re.compile(r"^\|([^|]*)\|([^|]*)\|(?:([^|:]*(?::// ?)?): ([\d,.]+))?\|[^|]*\|$", re.MULTILINE)


class Group(NamedTuple):
    """Bars of one measure.

    Attributes:
        measure: as the table has it.
        title: above the bars.
        unit: behind their numbers.
    """

    measure: str
    title: str
    unit: str


class Plot(NamedTuple):
    """One plot, of some measures."""

    title: str
    groups: tuple[Group, ...]


PLOTS = {
    "plot-reading": Plot(
        "How fast one process reads samples that are on local disk",
        (
            Group("samples/s, 100 KB", "Samples of 100 KB", "/s"),
            Group("samples/s, 2 KB × 3", "Samples of three members of 2 KB", "/s"),
            Group(
                "images/s, JPEGs of 256 × 256 decoded and cropped, batches of 64, 2 workers",
                "JPEGs decoded and cropped, 2 workers",
                "/s",
            ),
            Group(
                "million tokens/CPU-s, shuffled blocks of 2,048, one process",
                "Shuffled blocks of 2,048 tokens",
                "million/CPU s",
            ),
        ),
    ),
    "plot-download": Plot(
        "How fast a node downloads, and what that costs the processor",
        (
            Group("MB/s, in memory, nginx, http", "http", "MB/s"),
            Group("CPU-s/GB, in memory, nginx, http", "http: less is better", "CPU s/GB"),
            Group("MB/s, in memory, nginx, https", "https", "MB/s"),
            Group("CPU-s/GB, in memory, nginx, https", "https: less is better", "CPU s/GB"),
        ),
    ),
    "plot-bytes": Plot(
        "What the object store sends: less is better",
        (
            Group("MB, from the store, 3 LitData jobs", "3 LitData jobs through the S3 endpoint", "MB"),
            Group("MB, from the store, 3 MosaicML jobs", "3 MosaicML jobs through the S3 endpoint", "MB"),
            Group("MB, from the store, 3 jobs × 2 epochs", "3 jobs of 2 epochs", "MB"),
            Group("MB, from the store, 2 jobs × 6 epochs", "2 jobs of 6 epochs, in half of the cache", "MB"),
            Group("copies, of the dataset that the store sends", "A cluster of 3 nodes", "copies"),
        ),
    ),
    "plot-waiting": Plot(
        "How long training waits for a dataset that is on no disk yet: less is better",
        (
            Group("%, of a cold epoch spent waiting, 2 workers", "Of the first epoch", "%"),
            Group("s, to the first batch", "Until the first batch", "s"),
        ),
    ),
}


def bars_of(page: str, measure: str) -> list[tuple[str, float]]:
    """Return shardcache's figure and those beside it, by name. Raises KeyError for a measure that no table has."""
    found: list[tuple[str, float]] = []
    for name, ours, peer, theirs in _ROW.findall(page):
        if name == measure and not found:
            found.append(("shardcache", float(ours.replace(",", ""))))
        elif not found or name:
            if found:
                break
            continue
        if peer:
            found.append((peer.strip(), float(theirs.replace(",", ""))))
    if not found:
        raise KeyError(measure)
    return found


def plot(which: Plot) -> Canvas:
    """Draw one plot; each group has a scale of its own."""
    page = PAGE.read_text()
    groups = [(group, bars_of(page, group.measure)) for group in which.groups]
    rows = sum(len(bars) for _, bars in groups)
    height = TOP_PX + GROUP_PX * len(groups) + ROW_PX * rows
    said = "; ".join(_said(group, bars) for group, bars in groups)
    canvas = Canvas(which.title, f"{said}.", height)
    canvas.text(20, 28, which.title, "name")
    y = TOP_PX + 24
    for group, bars in groups:
        canvas.text(20, y, group.title, "note")
        y += 10
        largest = max(value for _, value in bars)
        for name, value in bars:
            kind = "here" if name == "shardcache" else "box"
            length = max(1.0, FULL_PX * value / largest)
            canvas.text(LEFT - 12, y + 15, name, "end note")
            canvas.box(kind, LEFT, y, length, BAR_PX)
            canvas.text(LEFT + length + 8, y + 15, f"{value:,g} {group.unit}".replace(" /s", "/s"), "note")
            y += ROW_PX
        y += GROUP_PX - 10
    return canvas


def _said(group: Group, bars: list[tuple[str, float]]) -> str:
    return f"{group.title}: " + ", ".join(f"{name} {value:,g} {group.unit}" for name, value in bars)
