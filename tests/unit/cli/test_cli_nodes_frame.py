"""Frames of `shardcache top --nodes`, built from literal status pages."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from shardcache.cli.display.nodes_frame import nodes_frame
from shardcache.cli.nodes import DaemonNode, NodeState
from shardcache.errors import NoDaemonError


def node(number: int, *, waiting: int = 0, short_bytes: int = 0) -> NodeState:
    """Return a node that is up, with a job on it that all nodes have."""
    state = NodeState(DaemonNode.parse(f"gpu-node-{number:04d}"))
    job = {"name": "train", "uid": 0, "sessions": 8, "waiting": waiting}
    state.answered(
        {
            "pid": number,
            "uptime_s": 1.0,
            "cache": {"used_bytes": 10**12, "capacity_bytes": 4 * 10**12},
            "counters": {"hits": 90, "misses": 10},
            "disk": {"error": None, "short_bytes": short_bytes},
            "jobs": [job, {"name": "ended", "uid": 0, "sessions": 0, "waiting": 0}],
        }
    )
    return state


def down(number: int) -> NodeState:
    """Return a node that does not answer."""
    state = NodeState(DaemonNode.parse(f"gpu-node-{number:04d}"))
    state.failed(NoDaemonError("no answer within 5 s"))
    return state


def lines(states: list[NodeState], height: int | None = None) -> list[str]:
    """Return the frame's lines on 80 columns, with single spaces."""
    console = Console(file=io.StringIO(), width=80)
    console.print(nodes_frame(states, height))
    assert isinstance(console.file, io.StringIO)
    rows = console.file.getvalue().splitlines()
    assert all(cell_len(row) <= 80 for row in rows)
    return [" ".join(row.split()) for row in rows]


def test_totals_are_of_the_nodes_that_are_up() -> None:
    """Readers add up; a job that runs on several nodes is one."""
    rows = lines([node(1), node(2, waiting=3), down(3)])
    assert "gpu-node-0001 up 25% of 4.0 TB 90% 1 8 0" in rows
    assert "all 2 up 25% of 8.0 TB 90% 1 16 3" in rows
    assert rows[-1] == "gpu-node-0003: no answer within 5 s"


def test_the_tier_is_a_line_below_the_nodes() -> None:
    """With the nodes on which it fails; a cluster without one has no such line."""
    states = [node(1), node(2), node(3)]
    for number, failing in ((0, False), (1, True)):
        page = states[number].page
        assert page is not None
        states[number].answered(page | {"tiers": [{"address": "127.0.0.1:9080", "failing": failing}]})
    rows = lines(states)
    assert rows[-2:] == ["tier: 0 Bytes/s on 2 nodes", "tier failing, bypassed on gpu-node-0002"]
    assert not any("tier" in row for row in lines([node(1)]))


def test_what_is_wrong_with_a_node_is_shown() -> None:
    """A disk that others fill is a line; a node that was never asked is neither up nor down."""
    rows = lines([node(1, short_bytes=10**9), NodeState(DaemonNode.parse("new"))])
    assert any(row.startswith("gpu-node-0001 degraded ") for row in rows) and "new asking" in rows
    assert rows[-1].startswith("gpu-node-0001: other files on the disk limit the cache to 4.0 TB")


@pytest.mark.parametrize("height", [8, 24, 50])
@pytest.mark.parametrize("broken", [0, 3, 60])
def test_many_nodes_fit_the_screen(height: int, broken: int) -> None:
    """Nodes that do not fit are counted; heading, totals and the first reasons are always there."""
    states = [down(number) if number < broken else node(number) for number in range(100)]
    rows = lines(states, height)
    assert len(rows) <= height
    [hidden] = [int(row.split()[2]) for row in rows if row.startswith("… and")]
    shown = sum(row.startswith("gpu-node-") and ": " not in row for row in rows)
    assert shown + hidden == 100 and any(row.startswith(f"all {100 - broken} up") for row in rows)
    assert sum(": no answer" in row for row in rows) >= min(broken, 1)
