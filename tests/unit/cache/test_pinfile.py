"""pinfile.py: what is pinned is read as it was written, and a damaged line costs no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardcache.cache.pins import Pin, read_pins, write_pins
from shardcache.errors import DiskFullError
from shardcache.store.folder import Layout, shard_key

PINS = [Pin(f"s3://bucket/{name}.tar", shard_key(name, "1"), 5, frozenset({0, 1000})) for name in ("a", 'b "ü"')]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return the paths of a folder in which there is nothing."""
    layout = Layout(tmp_path)
    layout.partial.mkdir()
    return layout


def test_pins_are_read_as_they_were_written(layout: Layout) -> None:
    """None at first; afterwards those of the last write, and nothing else lies about."""
    assert read_pins(layout) == []
    write_pins(layout, PINS)
    write_pins(layout, reversed(PINS))
    assert read_pins(layout) == PINS[::-1]
    assert {path.name for path in layout.root.rglob("*")} == {"partial", "pins"}
    assert layout.pins.stat().st_mode & 0o007 == 0, "urls are nobody else's business"


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[]", b'["u", "no key", 1, [0]]', b'["u", "' + b"0" * 32 + b'", {}, []]']
)
def test_a_damaged_line_costs_no_other(layout: Layout, line: bytes) -> None:
    """The others hold, at the next start as well; the file is kept for a look."""
    write_pins(layout, PINS)
    damaged = layout.pins.read_bytes() + line + b"\n"
    layout.pins.write_bytes(damaged)
    for _ in range(2):
        assert read_pins(layout) == PINS
    assert layout.pins.with_name("pins.damaged").read_bytes() == damaged


def test_a_full_disk_leaves_the_former_pins(layout: Layout) -> None:
    """The error is typed; what was pinned before still is."""
    write_pins(layout, PINS)
    layout.unfinished(layout.pins).symlink_to("/dev/full")
    with pytest.raises(DiskFullError):
        write_pins(layout, PINS[:1])
    assert read_pins(layout) == PINS
