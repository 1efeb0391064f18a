"""Spans of samples in tars: what a table's row says, and the samples read by it alone."""

import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardcache.shared.tarindex.contents import rows_of
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.spans import RowSpans, blocks_of, key_hash, samples_in
from shardcache.shared.tarindex.tables import Tables, key_of
from support.shards.tars import make_tar, pack, random_samples, special

URL = "s3://bucket/train-000000.tar"
LONG = "folder/" * 20 + "000001"


def described(tables: Tables, number: int, begin: int = 0) -> list[Any]:
    """Return key, extension, start and end of each member of a sample."""
    first = tables.member_ends[number - 1] if number else 0
    return [
        (
            key_of(tables, number),
            tables.extensions[tables.extension_ids[member]],
            tables.starts[member] - begin,
            tables.ends[member] - begin,
        )
        for member in range(first, tables.member_ends[number])
    ]


def table_of(
    tmp_path: Path, tar: bytes, max_samples: int = 50_000
) -> tuple[Tables, list[dict[str, Any]]]:
    """Return the index of a tar, and the rows of its table, as they are read."""
    (tmp_path / "a.tar").write_bytes(tar)
    tables = index_tar(tmp_path / "a.tar", URL)
    rows = rows_of(tables, max_samples=max_samples, blocks=blocks_of(tables, tar))
    return tables, json.loads(json.dumps(list(rows)))


def spans_in(
    rows: Sequence[dict[str, Any]], reads: Callable[[str], bool] | None = None
) -> list[Any]:
    """Return the span of each sample."""
    return [
        spans.span(place)
        for spans in (RowSpans.of(row, reads) for row in rows)
        for place in range(len(spans))
    ]


def with_global_header() -> bytes:
    """Return a tar that begins with a global header and a folder, as `git archive` writes them."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}
    ) as tar:
        tar.addfile(special("folder", tarfile.DIRTYPE))
        for name in ("folder/1.jpg", "folder/1.txt", "folder/2.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 700
            tar.addfile(info, io.BytesIO(bytes(700)))
    return buffer.getvalue()


TARS = {
    "plain": make_tar(random_samples(25, {"jpg": 1000, "json": 0, "cls": 512})),
    "other orders": pack(
        [("1.jpg", b"a"), ("1.txt", b"b"), ("2.txt", b"c"), ("2.jpg", b"d"), ("3.txt", b"e")]
    ),
    "long names": pack(
        [(f"{LONG}.jpg", b"a" * 600), (f"{LONG}.txt", b"b"), ("2.jpg", b"")],
        format=tarfile.GNU_FORMAT,
    ),
    "PAX": pack(
        [(f"{LONG}é.jpg", b"a" * 600), (f"{LONG}é.txt", b"b"), ("2.jpg", b"")],
        format=tarfile.PAX_FORMAT,
    ),
    "global header": with_global_header(),
    "what is skipped": pack(
        [("__meta__/a.json", b"1"), ("1.jpg", b"2"), ("._1.txt", b"3"), ("2.JPG", b"4")]
    ),
}


@pytest.mark.parametrize("tar", TARS.values(), ids=TARS)
def test_each_sample_is_read_by_its_span_alone(tmp_path: Path, tar: bytes) -> None:
    """Key and members are those of the tar; also in rows of some samples each."""
    tables, rows = table_of(tmp_path, tar, max_samples=10)
    for number, (start, stop) in enumerate(spans_in(rows)):
        found = samples_in(tar[start:stop], URL)
        assert len(found) == 1
        assert described(found, 0) == described(tables, number, start)
    hashes = [hashed for row in rows for hashed in RowSpans.of(row).key_hashes]
    assert hashes == [key_hash(key_of(tables, number)) for number in range(len(tables))]


@pytest.mark.parametrize("tar", TARS.values(), ids=TARS)
def test_members_alone_are_read_by_their_spans(tmp_path: Path, tar: bytes) -> None:
    """Others may be before or after them; a sample without them has its whole span."""
    tables, rows = table_of(tmp_path, tar)
    whole = spans_in(rows)
    for number, (start, stop) in enumerate(spans_in(rows, {"txt", "json"}.__contains__)):
        assert whole[number][0] <= start < stop <= whole[number][1]
        found = described(samples_in(tar[start:stop], URL), 0)
        members = [
            (key, name) for key, name, _, _ in described(tables, number) if name in ("txt", "json")
        ]
        assert set(members) <= {(key, name) for key, name, _, _ in found}


def test_small_member_of_large_samples_is_some_blocks(tmp_path: Path) -> None:
    """Its header and its content, of samples a hundred times as large."""
    _, rows = table_of(
        tmp_path, make_tar(random_samples(5, {"jpg": 100_000, "json": 600, "cls": 1}))
    )
    assert [stop - start for start, stop in spans_in(rows, {"json"}.__contains__)] == [
        512 + 1024
    ] * 5


LINK = (special("2.jpg", tarfile.LNKTYPE, "1.jpg"), b"")
LAST = [("8.jpg", b"8"), ("9.jpg", b"9")]


@pytest.mark.parametrize(
    ("members", "alone"),
    [
        ([("1.jpg", b"a"), LINK], [True, False, False, True]),
        ([("__lines__/0.txt", b"a\nb\nc\n")], [False, False, False, True, True]),
        ([("1.jpg", b"a"), ("1.jpg", b"b")], [False, False, True]),
        ([("1.jpg", b"a"), ("__meta__/all", bytes(100_000))], [True, False, True]),
    ],
    ids=["a hard link", "lines", "two members of one extension", "much between them"],
)
def test_sample_that_is_more_than_its_blocks_has_no_span(
    tmp_path: Path, members: list[Any], alone: list[bool]
) -> None:
    """It is read with its shard, as may be the one after it; the others have their spans."""
    tar = pack([*members, *LAST])
    _, rows = table_of(tmp_path, tar)
    spans = spans_in(rows)
    assert [span is not None for span in spans] == alone
    start, stop = spans[-1]
    assert key_of(samples_in(tar[start:stop], URL), 0) == "9"


def test_places_take_few_bytes_in_a_table(tmp_path: Path) -> None:
    """At most twelve for each sample, also if none is as plain as could be."""
    for names in ("{:06d}", LONG + "{:06d}"):
        tar = pack(
            [(names.format(number) + ".jpg", bytes(100_000)) for number in range(500)],
            format=tarfile.GNU_FORMAT,
        )
        _, (row,) = table_of(tmp_path, tar)
        fields = {name: row[name] for name in ("first_block", "blocks", "irregular")}
        assert len(json.dumps(fields, separators=(",", ":"))) < 500 * 12


def test_earlier_tables_say_no_places(tmp_path: Path) -> None:
    """Their samples are there, and without a span."""
    (tmp_path / "a.tar").write_bytes(TARS["plain"])
    rows = list(rows_of(index_tar(tmp_path / "a.tar", URL)))
    assert spans_in(rows) == [None] * 25


@pytest.mark.parametrize(
    "fields",
    [
        {"blocks": [1]},
        {"blocks": [2**40, 1]},
        {"blocks": "12"},
        {"keys": [1, 2]},
        {"sizes": {"jpg": [], "txt": []}},
    ],
    ids=str,
)
def test_invalid_row_raises(fields: dict[str, Any]) -> None:
    """Texts that a table may hold if it is not one."""
    row = {
        "keys": ["1", "2"],
        "first_block": 0,
        "blocks": [2, 2],
        "sizes": {"jpg": [1, 1], "txt": [0, 0]},
        **fields,
    }
    with pytest.raises(
        (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
    ):
        RowSpans.of(row, {"jpg"}.__contains__)
