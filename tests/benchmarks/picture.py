"""Curves in small panels side by side, each curve named at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# From the first curve, ours, which stands out, to the last.
_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#c2410c", "linewidth": 2.6, "marker": "o", "markersize": 5, "zorder": 5},
    {"color": "#1f2937", "linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 6},
    {"color": "#2563eb", "linewidth": 1.6, "marker": "s", "markersize": 4},
    {"color": "#0f766e", "linewidth": 1.6, "marker": "^", "markersize": 4},
    {"color": "#7c3aed", "linewidth": 1.6, "marker": "D", "markersize": 3.5},
)
_LABEL_HEIGHT = 5.5  # in per cent of the vertical axis


@dataclass(frozen=True, slots=True)
class Panel:
    """One small plot: for each curve its name and its heights, in per cent."""

    title: str
    curves: Mapping[str, Sequence[float]]


def draw(title: str, caches_percent: Sequence[int], panels: Sequence[Panel], path: Path) -> None:
    """Write the panels as a PNG, two in a row, hit rate over size of the cache."""
    figure = Figure(figsize=(11, 8), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots((len(panels) + 1) // 2, 2, sharex=True, sharey=True, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, caches_percent, panel)
    figure.supxlabel("cache, % of the dataset", fontsize=10)
    figure.supylabel("hits, % of the reads", fontsize=10)
    figure.savefig(path)


def _draw_panel(axis: Axes, sizes: Sequence[int], panel: Panel) -> None:
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    axis.set_xlim(0, 105)
    axis.set_ylim(0, 100)
    axis.set_xticks(sizes)
    axis.tick_params(labelbottom=True, labelleft=True)
    axis.grid(axis="y", color="#e5e7eb")
    axis.spines[["top", "right"]].set_visible(False)
    ends = [heights[-1] for heights in panel.curves.values()]
    labels = zip(panel.curves.items(), _apart(ends), _STYLES, strict=True)
    for (name, heights), label_height, style in labels:
        axis.plot(sizes, heights, **style)
        text = f"{name} {heights[-1]:.0f}"
        axis.text(sizes[-1] + 2, label_height, text, color=style["color"], fontsize=9, va="center")


def _apart(heights: Sequence[float]) -> list[float]:
    """Return a height for each label: those of its curve's end, moved so far that none covers another."""
    order = sorted(range(len(heights)), key=lambda number: (heights[number], -number))
    placed = list(heights)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + _LABEL_HEIGHT)
    return placed
