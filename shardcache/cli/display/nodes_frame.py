"""One frame of `shardcache top --nodes`: a line per node, their totals, and what is wrong with any of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardcache.cli.display import cells
from shardcache.cli.display.output import count, make_table, one_line
from shardcache.cli.nodes import NodeState
from shardcache.units import size

_NUMBERS = ("cache", "origin", "hits", "jobs", "readers", "waiting")
# Headline, heading and totals.
_FIXED_LINES = 3
_STYLES = {"up": "green", "down": "red", "asking": "dim"}


def nodes_frame(states: Sequence[NodeState], height: int | None = None) -> RenderableType:
    """Return the rendered frame, at most `height` lines of it if given."""
    troubles = [line for state in states for line in _troubles(state)]
    tier = _tier(states)
    room = len(states) + len(troubles) if height is None else max(2, height - _FIXED_LINES - len(tier))
    for_troubles = min(len(troubles), max(room // 3, room - len(states)))
    shown = states if len(states) <= room - for_troubles else states[: room - for_troubles - 1]
    table = make_table("node", "state", *_NUMBERS, numbers=_NUMBERS)
    for state in shown:
        table.add_row(Text(state.node.name), *_row(state))
    if len(shown) < len(states):
        table.add_row(Text(f"… and {len(states) - len(shown):,} more", "dim"))
    if len(states) > 1:
        table.add_row("all", f"{sum(state.is_up for state in states)} up", *_figures(states), style="bold")
    head = Text(f"{count(len(states), 'node')}", "bold")
    return Group(head, table, *tier, *troubles[:for_troubles])


def _tier(states: Sequence[NodeState]) -> list[Text]:
    """Return a line about the cluster's tier, if any node uses one."""
    tiered = [state for state in states if state.is_up and state.page is not None and state.page.get("tiers")]
    if not tiered:
        return []
    rate = cells.speed(sum(state.rates.tier_bytes_per_s for state in tiered if state.rates is not None))
    failing = [state.node.name for state in tiered if any(tier["failing"] for tier in (state.page or {})["tiers"])]
    return [
        one_line(f"tier: {rate} on {count(len(tiered), 'node')}"),
        *([one_line(f"tier failing, bypassed on {', '.join(failing)}", "red")] if failing else []),
    ]


def _row(state: NodeState) -> list[RenderableType]:
    word = _word(state)
    return [Text(word, _STYLES.get(word, "yellow")), *(_figures([state]) if state.is_up else ())]


def _word(state: NodeState) -> str:
    if state.page is None or state.error is not None:
        return "asking" if state.error is None else "down"
    if state.page.get("draining"):
        return "stopping"
    return "degraded" if cells.disk(state.page) else "up"


def _figures(states: Sequence[NodeState]) -> list[str]:
    """Return the columns after the state, summed over the nodes that are up."""
    pages = [state.page for state in states if state.is_up and state.page is not None]
    if not pages:
        return []
    rates = [state.rates for state in states if state.rates is not None]
    used, capacity = _sum(pages, "cache", "used_bytes"), _sum(pages, "cache", "capacity_bytes")
    hits, misses = _sum(pages, "counters", "hits"), _sum(pages, "counters", "misses")
    jobs = [job for page in pages for job in page["jobs"] if job["sessions"]]
    return [
        f"{used / capacity:.0%} of {size(capacity)}" if capacity else "",
        cells.speed(sum(rate.origin_bytes_per_s for rate in rates)) if rates else "",
        f"{hits / (hits + misses):.0%}" if hits + misses else "",
        f"{len({(job['name'], job['uid']) for job in jobs}):,}",
        f"{sum(job['sessions'] for job in jobs):,}",
        f"{sum(job.get('waiting', 0) for job in jobs):,}",
    ]


def _sum(pages: Sequence[dict[str, Any]], part: str, key: str) -> int:
    return sum(page[part][key] for page in pages)


def _troubles(state: NodeState) -> list[Text]:
    """Return a line with what is wrong with a node, if anything is."""
    if state.error is not None:
        return [one_line(f"{state.node.name}: {state.error.message}", "red")]
    trouble = None if state.page is None else cells.disk(state.page)
    return [] if trouble is None else [one_line(f"{state.node.name}: {trouble}", "yellow")]


def nodes_json(states: Sequence[NodeState]) -> dict[str, Any]:
    """Return the JSON that `--nodes --json` prints."""
    pages = [state.page for state in states if state.is_up and state.page is not None]
    return {
        "nodes": [state.to_json() for state in states],
        "totals": {
            "up": len(pages),
            "used_bytes": _sum(pages, "cache", "used_bytes"),
            "capacity_bytes": _sum(pages, "cache", "capacity_bytes"),
            "hits": _sum(pages, "counters", "hits"),
            "misses": _sum(pages, "counters", "misses"),
            "readers": sum(job["sessions"] for page in pages for job in page["jobs"]),
            "waiting": sum(job.get("waiting", 0) for page in pages for job in page["jobs"]),
        },
    }
