"""Sizes and times as people read them."""

from __future__ import annotations

import humanize


def size(value_bytes: float) -> str:
    """Return bytes as people write them: `1.2 GB`."""
    return humanize.naturalsize(value_bytes)


def duration(value_s: float) -> str:
    """Return seconds as `850 ms`, `3.2 s`, `5 minutes` or what comes above that."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"
    return humanize.naturaldelta(value_s)
