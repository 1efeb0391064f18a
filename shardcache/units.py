"""Human-readable sizes and durations."""

from __future__ import annotations

import humanize


def size(value_bytes: float) -> str:
    """Return a size in human-readable form: `1.2 GB`."""
    return humanize.naturalsize(value_bytes)


def duration(value_s: float) -> str:
    """Return a duration in human-readable form: `850 ms`, `3.2 s`, `5 minutes`, `2 hours`."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"
    return humanize.naturaldelta(value_s)
