"""Samples of lines, decoded at once if their fields are small, with the same values."""

import json
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import CorruptShardError, DecodeError, SampleError
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.formats.jsonl import JSON_LINES
from shardcache.shared.tarindex import tables
from shardcache_client.reading.leased.shards import MappedShard, ShardPlace
from shardcache_client.samples.sample_view import WHOLE, View

URL = "s3://bucket/train.jsonl"
LARGE = "large \\ é" * 300
TEXTS = st.text(max_size=5)

NAMES = st.sampled_from(["a", "b", 'c"{', "é", "", "__url__", "A"])
VALUES = (
    st.none() | st.booleans() | st.integers() | TEXTS | st.just(LARGE) | st.lists(TEXTS, max_size=3)
)
LINES = st.lists(st.lists(st.tuples(NAMES, VALUES), max_size=6), min_size=1, max_size=5)


def line_of(pairs: list[tuple[str, Any]], key: str) -> str:
    """Return an object of pairs, of which several may have the same name; the key is among them."""
    named = [*pairs[:2], ("__key__", key), *pairs[2:]]
    fields = [
        f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value)}" for name, value in named
    ]
    return "{" + ", ".join(fields) + "}"


def mapped(
    path: Path,
    lines: list[str],
    view: View = WHOLE,
    forge: Callable[[tables.Samples], object] = lambda samples: None,
) -> MappedShard:
    """Map a shard of lines; `forge` changes its index before it is written."""
    path.write_text("".join(line + "\n" for line in lines))
    samples = JSON_LINES.index(path, URL, IndexOptions())
    forge(samples)
    header = {
        "size_bytes": path.stat().st_size,
        "samples": len(samples),
        "content": JSON_LINES.name,
        "encodings": samples.encodings,
    }
    sidecar = path.with_suffix(".idx")
    tables.write(sidecar, header, samples)
    return MappedShard(ShardPlace(path, sidecar), URL, view=view)


@given(LINES)
def test_values_are_those_of_json(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[str, Any]]]
) -> None:
    """Small, large and repeated fields agree, in order and by number, in each sample."""
    lines = [line_of(pairs, f"key {number}") for number, pairs in enumerate(rows)]
    expected = [json.loads(line) | {"__url__": URL} for line in lines]
    with closing(mapped(tmp_path_factory.mktemp("rows") / "a.jsonl", lines)) as shard:
        assert list(shard.samples()) == expected
        cut = shard.cutter()
        assert [cut(number) for number in reversed(range(len(rows)))] == expected[::-1]
        assert all(list(sample)[:2] == ["__key__", "__url__"] for sample in shard.samples())


ORDERS = {
    '{"a": 1, "b": 2, "a": 3}': "ab",
    '{"a": 1, "b": 2, "a": 3, "c": 4, "b": 5}': "abc",
    '{"b": 1, "a": 2, "__url__": 3, "b": 4, "__url__": 5}': "ba",
    '{"a": 1, "a": 2}': "a",
}


@pytest.mark.parametrize("large", [0, len(LARGE)])
def test_field_that_comes_twice_keeps_its_first_place(tmp_path: Path, large: int) -> None:
    """Repeated fields act as with `json.loads`, in order, by number, and for large lines."""
    lines = [line.replace("2", json.dumps("x" * large)) for line in ORDERS for _ in range(3)]
    values = [json.loads(line) for line in lines]
    orders = [["__key__", "__url__", *order] for order in ORDERS.values() for _ in range(3)]
    with closing(mapped(tmp_path / "a.jsonl", lines)) as shard:
        cut = shard.cutter()
        for samples in (list(shard.samples()), list(map(cut, range(len(lines))))):
            assert list(map(list, samples)) == orders
            assert [sample["a"] for sample in samples] == [value["a"] for value in values]
        alone = [next(shard.samples(number)) for number in range(len(lines))]
        assert list(map(list, alone)) == orders


def test_choice_of_fields_holds_for_small_ones(tmp_path: Path) -> None:
    """Fields unread or wanted as bytes are as they are for large ones."""
    lines = ['{"a": 1, "b": "2"}', '{"a": 3, "b": "%s"}' % ("x" * 2000)]
    with closing(
        mapped(tmp_path / "a.jsonl", lines, View(reads=lambda name: name == "a"))
    ) as shard:
        assert [sorted(sample) for sample in shard.samples()] == [["__key__", "__url__", "a"]] * 2
    with closing(
        mapped(tmp_path / "b.jsonl", lines, View(decodes=lambda name: name == "b"))
    ) as shard:
        assert [sample["b"][:3] for sample in shard.samples()] == [b'"2"', b'"xx']
    with closing(mapped(tmp_path / "c.jsonl", lines, View(prefix="text."))) as shard:
        assert [sample["text.a"] for sample in shard.samples()] == [1, 3]


def test_bad_line_is_the_error_of_its_sample(tmp_path: Path) -> None:
    """Those after it are read, as from any shard."""
    with closing(mapped(tmp_path / "a.jsonl", ['{"a": 1}', "no JSON", '{"a": 3}'])) as shard:
        samples = shard.samples()
        assert next(samples)["a"] == 1
        with pytest.raises(SampleError, match="not a JSON object"):
            next(samples)
        assert next(shard.samples(2))["a"] == 3


def test_damaged_value_names_its_field(tmp_path: Path) -> None:
    """Also where the fields of the sample are decoded together."""
    path = tmp_path / "a.jsonl"
    with closing(mapped(path, ['{"a": 1, "b": 2, "c": 3}'])) as shard:
        with path.open("r+b") as file:
            file.write(b'{"a": 1, "b": x, "c": 3}')
        with pytest.raises(DecodeError, match="the column 'b' could not be decoded"):
            list(shard.samples())


def test_odd_lines_among_others_are_what_json_gives(tmp_path: Path) -> None:
    """Lines decoded together may be empty, blank, escaped, large or faulty."""
    odd = [
        "",
        " ",
        "{}",
        ' {"a": 1}',
        '{"a": 1} \r',
        '{"b": "\\n{", "c": "é"}',
        json.dumps({"a": LARGE}),
    ]
    lines = [f'{{"n": {number}}}' for number in range(150)]
    for number, line in enumerate(odd):
        lines.insert(20 * number, line)
    expected = [json.loads(line) for line in lines if line.strip()]
    with closing(mapped(tmp_path / "a.jsonl", lines)) as shard:
        found = list(shard.samples())
    assert [sample.pop("__key__") for sample in found] == [
        f"{number:09d}" for number in range(len(expected))
    ]
    assert {sample.pop("__url__") for sample in found} == {URL}
    assert found == expected


@pytest.mark.parametrize("damage", [b"}]}]", b"x", b"1}\n{", b"\xff"])
def test_damaged_line_among_others_is_the_error_of_its_sample(
    tmp_path: Path, damage: bytes
) -> None:
    """Those before it, decoded together with it, are read."""
    path = tmp_path / "a.jsonl"
    with closing(mapped(path, ['{"a": 11111111, "b": 2}'] * 20)) as shard:
        data = path.read_bytes()
        at = data.index(b"11111111", 10 * data.index(b"{", 1))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(damage)
        samples = shard.samples()
        read = 0
        with pytest.raises(DecodeError, match="the column 'a' could not be decoded"):
            for sample in samples:
                assert sample["a"] == 11111111
                read += 1
        assert read == 10


@pytest.mark.parametrize(
    ("table", "at", "value"),
    [
        pytest.param("ends", 59, 1 << 40, id="end beyond the shard"),
        pytest.param("starts", 0, 1 << 40, id="start beyond the shard"),
        pytest.param("starts", 0, (1 << 64) - 1, id="start without a place in any file"),
        pytest.param("extension_ids", 0, 3, id="unknown field"),
    ],
)
@pytest.mark.parametrize("text", ["small", LARGE])
def test_forged_places_of_fields_are_damage(
    tmp_path: Path, table: str, at: int, value: int, text: str
) -> None:
    """Forged places lead nobody outside the shard, and are checked only when needed."""

    def forge(samples: tables.Samples) -> None:
        numbers: array[int] = getattr(samples, table)
        numbers[at] = value

    lines = [json.dumps({"a": number, "b": text, "c": None}) for number in range(20)]
    path = tmp_path / "a.jsonl"
    with closing(mapped(path, lines, forge=forge)) as shard:
        with pytest.raises(CorruptShardError, match="contradict"):
            list(shard.samples())
        with pytest.raises(CorruptShardError, match="contradict"):
            for number in range(20):
                shard.cutter()(number)
        with pytest.raises(CorruptShardError, match="contradict"):
            shard.column_spans(range(20))
    with pytest.raises(CorruptShardError, match="contradict"):
        mapped(path, lines, View(reads=lambda name: name == "a"), forge)
