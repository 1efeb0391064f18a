"""The daemon's memory is bounded, whatever a shard, an index, a pattern or a plan asks for."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign import memory
from campaign.harness import QUICK, Row, rows
from shardcache.origin.listing import parse_index
from shardcache.shardlist import read
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession

HALF = 8192  # positions that one reader may plan of a mebibyte


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[memory.Ground]:
    """A daemon with little memory for plans."""
    with memory.ground(tmp_path_factory.mktemp("m"), QUICK) as ground:
        yield ground


@rows(memory.ROWS)
def test_no_input_takes_more_memory_than_it_may(row: Row, small: memory.Ground) -> None:
    """By the peak of a daemon and its processes: hostile inputs end in typed errors, large honest ones in answers."""
    result = row.play(small, QUICK)
    assert not (result.wrong or result.untyped), result.first_failure


def test_plans_are_bounded_for_a_reader_and_for_all(tmp_path: Path) -> None:
    """A reader gets half of --plan-memory and all readers the whole; who is refused may plan less, or wait."""
    url = f"file://{tmp_path}/a.tar"
    with Daemon(tmp_path, "--plan-memory", "1MiB") as daemon, RawSession(daemon) as waiting:
        with RawSession(daemon) as first, RawSession(daemon) as second:
            refused = first.plan([url], [0] * (HALF + 1))["error"]
            assert refused["code"] == "capacity" and "--plan-memory" in refused["remedy"]
            for session in (first, second):
                assert session.plan([url], [0] * (HALF - 16))["type"] == "ok"
                assert session.ask("extend", shards=[], order=[0] * 100)["error"]["code"] == "capacity"
            assert "all plans together" in waiting.plan([url], [0] * 100)["error"]["message"]
        eventually(lambda: waiting.plan([url], [0] * 100)["type"] == "ok")


@pytest.mark.parametrize(("space", "member"), [("", ""), (" " * 600_000, ""), ("", '"' + "x" * 200_000 + '", ')])
def test_an_index_is_read_row_by_row_like_any_json(space: str, member: str) -> None:
    """Spaces, long rows, numbers at the end of a piece and further members are read as `json.loads` reads them."""
    rows = [f'{{"url": "{"d" * length}/a.tar", "nsamples": {length}}}' for length in range(8_000, 8_060)]
    text = f'{{{space}"x": [{member}1], "shardlist": [{space}{",".join(rows)}], "n": 12}} '
    assert [ref.samples for ref in parse_index("s3://b/i.json", text.encode())] == list(range(8_000, 8_060))
    for broken in (text + "x", text.rstrip()[:-1], text.replace("],", "]", 1), text.replace(":", "", 1)):
        with pytest.raises(ValueError, match="character"):
            read(broken.encode())


def test_an_index_has_a_limit() -> None:
    """Of rows, and of what a single value may be."""
    with pytest.raises(ValueError, match="more than 2 shards"):
        read(b'{"shardlist": [{"url": "a"}, {"url": "b"}, {"url": "c"}]}', max_shards=2)
    with pytest.raises(ValueError, match="longer than"):
        read(b'{"x": [' + b"[]," * 200_000 + b'[]], "shardlist": []}')


def test_an_index_of_wide_characters_takes_no_more_memory() -> None:
    """One character that takes four bytes of memory does not make those of the whole file as wide."""
    rows = ",".join(f'{{"url": "{number}{"d" * 8_000}.tar"}}' for number in range(2_000))
    index = f'{{"shardlist": [{{"url": "\N{DROMEDARY CAMEL}.tar"}}, {rows}]}}'.encode()
    tracemalloc.start()
    try:
        read_bytes = sum(len(ref.url) for ref in read(index))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * read_bytes
