"""Draws the pictures of the documentation: `python docs/drawings [FOLDER]`, by default into docs/pictures."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from canvas import Canvas
from fetching import daemons, parts, tier
from measured import measured
from passing import deaths, life, next_fetch, node
from plots import PLOTS, plot
from reading import epoch, look, window
from sharing import saved, workers

PICTURES = Path(__file__).parents[1] / "pictures"
DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "daemons": daemons,
    "deaths": deaths,
    "epochs": epoch,
    "look": look,
    "measured": measured,
    "next": next_fetch,
    "node": node,
    "parts": parts,
    "saved": saved,
    "shard": life,
    "tier": tier,
    "window": window,
    "workers": workers,
    **{name: partial(plot, which) for name, which in PLOTS.items()},
}


def main() -> None:
    """Draw all of them."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else PICTURES
    for name, draw in DRAWINGS.items():
        draw().save(folder / f"{name}.svg")


if __name__ == "__main__":
    main()
