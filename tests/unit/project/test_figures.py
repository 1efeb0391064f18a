"""Figures of benchmarks: every row is kept, commits are compared over rounds, and a page's tables are made of them."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.measure import Figure, Row, Target

HEAD = {"commit": "a" * 12, "date": "2026-11-26T22:00:00+00:00", "machine": {"cores": 2}, "scale": 1.0}
HALF = [float(number) for number in range(50, 54)]


def lines(*rows: Row, **head: str) -> list[figures.Line]:
    return [{**HEAD, **head, "part": "warm", **row.to_json()} for row in rows]


def test_a_part_that_fails_keeps_the_rows_before_it_and_stops_no_other(tmp_path: Path) -> None:
    row = Row("MB/s", "read", Figure([3.0, 1.0, 2.0]), "webdataset", Figure([1.0] * 3), Target("≥", 1.0))

    def dies() -> Iterator[Row]:
        yield row
        raise RuntimeError("the store has gone")

    path = tmp_path / "build" / "figures.jsonl"
    (_, first), (part, error), last = figures.recorded({"dies": dies, "lives": lambda: [row]}, path, **HEAD)
    assert (first, part, str(error), last) == (row, "dies", "the store has gone", ("lives", row))
    kept = figures.read("aaaa", path)
    assert [line["part"] for line in kept] == ["dies", "lives"]
    assert (kept[0]["rounds"], kept[0]["ours"], kept[0]["ratio"]) == ([3.0, 1.0, 2.0], 2.0, 2.0)
    with pytest.raises(ValueError, match="neither a file of figures nor a commit"):
        figures.read("bbbb", path)


def test_the_rank_test_gives_the_share_of_all_divisions_that_differ_as_much() -> None:
    """Every division of the ranks is counted, by another way than the test's own, with and without ties."""
    for seed in range(20):
        values = random.Random(seed).choices(range(8), k=9)
        before, after = values[:4], values[4:]
        ranks = [sum(other < value for other in values) + sum(other <= value for other in values) for value in values]
        off = [abs(sum(some) - sum(ranks) * 4 / 9) for some in itertools.combinations(ranks, 4)]
        assert figures.rank_test(before, after) == sum(each >= off[0] for each in off) / len(off)


@pytest.mark.parametrize(
    ("unit", "before", "after", "verdict"),
    [
        ("MB/s", HALF, [each * 1.2 for each in HALF], "better"),
        ("s", HALF, [each * 1.2 for each in HALF], "worse"),
        ("CPU-s/GB", HALF, [each / 1.2 for each in HALF], "better"),
        ("MB/s", HALF, [51.5, 52.5, 50.5, 53.5], "noise"),
        ("MB/s", HALF[:3], [each * 2 for each in HALF[:3]], "too few rounds"),
    ],
)
def test_a_change_is_told_from_noise(unit: str, before: list[float], after: list[float], verdict: str) -> None:
    (change,) = figures.compare(lines(Row(unit, "read", Figure(before))), lines(Row(unit, "read", Figure(after))))
    assert change.verdict == verdict


def test_a_slower_machine_slows_the_peer_in_the_same_round() -> None:
    """Rows with a peer are compared by their ratio; two runs of a commit count as twice the rounds."""
    fast, slow = (Row("MB/s", "read", Figure([m, 2 * m]), "s5cmd", Figure([m, 2 * m])) for m in (9.0, 5.0))
    (change,) = figures.compare(lines(fast, fast), lines(slow, slow))
    assert (change.before, change.after, change.p, change.verdict) == (1.0, 1.0, 1.0, "noise")


def test_a_page_keeps_its_words_and_the_tables_of_parts_that_were_not_measured() -> None:
    page = "Before.\n\n<!--figures:{}-->\n\nold\n\n<!--end-->\n\nAfter.\n"
    rows = Row("MB/s", "read", 7.0), Row("MB/s", "read", 1234.0, "s5cmd", 617.0)
    new = figures.page(page.format("warm"), lines(*rows))
    before, _, table, _, after = new.split("\n\n")
    assert (before, after) == ("Before.", "After.\n")
    assert table.splitlines()[2:] == ["|MB/s, read|7.00|||", "|||s5cmd: 617|2.00|"]
    assert figures.page(new, lines(*rows)) == new
    assert figures.page(page.format("cold"), lines(*rows)) == page.format("cold")
    assert "at commit aaaaaaaaaaaa" in figures.page(page.format("machine"), lines(*rows))
