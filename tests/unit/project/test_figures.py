"""Benchmark figures: rows are kept, commits compared over rounds, and tables made."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.measure import Figure, Row

HEAD = {
    "commit": "a" * 12,
    "date": "2026-11-26T22:00:00+00:00",
    "machine": {"cores": 2},
    "scale": 1.0,
}
FEW = [50.0, 51.0, 52.0, 53.0]


def lines(*rows: Row) -> list[figures.Line]:
    return [{**HEAD, "part": "warm", **row.to_json()} for row in rows]


def test_a_part_that_fails_keeps_the_rows_before_it_and_stops_no_other(tmp_path: Path) -> None:
    row = Row("MB/s", "read", Figure([3.0, 1.0, 2.0]), "webdataset", Figure([1.0] * 3))

    def dies() -> Iterator[Row]:
        yield row
        raise RuntimeError("the store has gone")

    path = tmp_path / "build" / "figures.jsonl"
    first, (_, error), last = figures.recorded({"dies": dies, "lives": lambda: [row]}, path, **HEAD)
    assert first == ("dies", row)
    assert str(error) == "the store has gone"
    assert last == ("lives", row)
    assert [line["part"] for line in figures.read("aaaa", path)] == ["dies", "lives"]
    kept = figures.read(str(path), path)[0]
    assert kept["rounds"] == [3.0, 1.0, 2.0]
    assert kept["ours"] == 2.0
    assert kept["ratio"] == 2.0


@pytest.mark.parametrize("seed", range(20))
def test_the_rank_test_gives_the_share_of_all_divisions_that_differ_as_much(seed: int) -> None:
    values = random.Random(seed).choices(range(8), k=9)  # with ties
    ranks = [
        sum(other < value for other in values) + sum(other <= value for other in values)
        for value in values
    ]
    off = [abs(sum(some) - sum(ranks) * 4 / 9) for some in itertools.combinations(ranks, 4)]
    assert figures.rank_test(values[:4], values[4:]) == sum(each >= off[0] for each in off) / len(
        off
    )


@pytest.mark.parametrize(
    ("unit", "before", "after", "verdict"),
    [
        ("MB/s", FEW, [60.0, 61.0, 62.0, 63.0], "better"),
        ("s", FEW, [60.0, 61.0, 62.0, 63.0], "worse"),
        ("CPU-s/GB", FEW, [40.0, 41.0, 42.0, 43.0], "better"),
        ("MB/s", FEW, [51.5, 52.5, 50.5, 53.5], "noise"),
        ("MB/s", FEW[:3], [100.0] * 3, "too few rounds"),
    ],
)
def test_a_change_is_told_from_noise(
    unit: str, before: list[float], after: list[float], verdict: str
) -> None:
    (change,) = figures.compare(
        *(lines(Row(unit, "read", Figure(rounds))) for rounds in (before, after))
    )
    assert change.verdict == verdict


def test_a_slower_machine_changes_no_ratio_to_the_peer_in_the_same_round() -> None:
    """Two runs of a commit count as twice the rounds."""
    fast, slow = (
        Row("MB/s", "read", Figure([m, 2 * m]), "s5cmd", Figure([m, 2 * m])) for m in (9.0, 5.0)
    )
    (change,) = figures.compare(lines(fast, fast), lines(slow, slow))
    assert change[1:] == (1.0, 1.0, 1.0, "noise")


def test_a_page_keeps_its_words_and_the_tables_of_parts_that_were_not_measured() -> None:
    rows = lines(Row("MB/s", "read", 7.0), Row("MB/s", "read", 1234.0, "s5cmd", 617.0))
    page = "Before.\n\n<!--figures:{}-->\n\nold\n\n<!--end-->\n\nAfter.\n"
    table = (
        "||shardcache|compared with|ratio|\n"
        "|---|---|---|---|\n"
        "|MB/s, read|7.00|||\n"
        "|||s5cmd: 617|2.00|"
    )
    made = figures.page(page.format("warm"), rows)
    assert made == figures.page(made, rows) == page.format("warm").replace("old", table)
    assert figures.page(page.format("cold"), rows) == page.format("cold")
    assert "at commit aaaaaaaaaaaa" in figures.page(page.format("machine"), rows)
