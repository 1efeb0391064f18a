"""TFRecord files: their framing, and Examples compared with Google's own protobuf library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import (
    CorruptShardError,
    ShardError,
    TruncatedShardError,
    UnsupportedShardError,
)
from shardcache.shared.formats import cells
from shardcache.shared.formats.format import IndexOptions
from shardcache.shared.formats.records import tf_example, tfrecord
from shardcache.shared.tarindex.tables import Samples, fault_of, key_of
from shardcache.transport.between.checksums import crc32c
from support.shards.tf_records import NOT_PACKED, PACKED, example, framed

URL = "s3://bucket/train.tfrecord"

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: not name.startswith("__")
)
LISTS = (
    st.tuples(st.just("bytes_list"), st.lists(st.binary(max_size=200), max_size=4))
    | st.tuples(st.just("float_list"), st.lists(st.floats(width=32, allow_nan=False), max_size=4))
    | st.tuples(st.just("int64_list"), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
    | st.tuples(st.just("int64_list"), st.lists(st.integers(0, 200), max_size=4))
)
EXAMPLES = st.dictionaries(TEXTS, LISTS, max_size=4)


def indexed(path: Path, data: bytes) -> Samples:
    path.write_bytes(data)
    return tfrecord.TFRECORD.index(path, URL, IndexOptions(crc32c=crc32c))


def rows_of(samples: Samples, data: bytes) -> list[dict[str, Any] | None]:
    """Return the values of each sample; None for one with a fault."""
    decoders = [tfrecord.TFRECORD.decoder(encoding) for encoding in samples.encodings]
    rows: list[dict[str, Any] | None] = []
    begin = 0
    for number, end in enumerate(samples.member_ends):
        row = {}
        for member in range(begin, end):
            column = samples.extension_ids[member]
            cell = data[samples.starts[member] : samples.ends[member]]
            decode = decoders[column]
            value = cell if decode is None else decode(cell)
            row[samples.extensions[column]] = (
                value.tolist() if isinstance(value, np.ndarray) else value
            )
        rows.append(None if number in samples.faults else row)
        begin = end
    return rows


def plain(features: Mapping[str, tuple[str, list[Any]]]) -> dict[str, Any]:
    return {
        name: values[0] if len(values) == 1 else values for name, (_, values) in features.items()
    }


@given(st.lists(EXAMPLES, min_size=1, max_size=5), st.booleans())
def test_features_are_those_of_protobuf(
    tmp_path_factory: pytest.TempPathFactory,
    examples: list[dict[str, tuple[str, list[Any]]]],
    is_packed: bool,
) -> None:
    """Whatever the features, and whether numbers are packed or not."""
    data = framed(*(example(each, PACKED if is_packed else NOT_PACKED) for each in examples))
    samples = indexed(tmp_path_factory.mktemp("records") / "a.tfrecord", data)
    assert rows_of(samples, data) == [plain(each) for each in examples]


def test_numbers_have_types_of_tensorflow() -> None:
    """As FixedLenFeature gives them: int64 and float32; a list of one is a number."""
    (several,) = tf_example.features_of(example({"a": ("int64_list", [1, 2])}))
    assert several.only_string is None
    data = example({"a": ("int64_list", [-1, 2**40])})
    (integers,) = tf_example.features_of(data)
    value = tf_example.value(data[integers.start : integers.end])
    assert value.dtype == np.int64
    assert value.tolist() == [-1, 2**40]
    data = example({"a": ("float_list", [0.5, 1.5])})
    (floats,) = tf_example.features_of(data)
    assert tf_example.value(data[floats.start : floats.end]).dtype == np.float32


def test_only_strings_of_bytes_are_ranges_of_the_file(tmp_path: Path) -> None:
    """Members like images are read without a copy; mixed columns are decoded."""
    alike = {"image": ("bytes_list", [b"jpeg"]), "names": ("bytes_list", [b"a"])}
    other = {"image": ("bytes_list", [b"png"]), "names": ("bytes_list", [b"a", b"b"])}
    data = framed(example(alike), example(other))
    samples = indexed(tmp_path / "a.tfrecord", data)
    decoders = map(tfrecord.TFRECORD.decoder, samples.encodings)
    assert dict(zip(samples.extensions, decoders, strict=True)) == {
        "image": None,
        "names": tf_example.value,
    }
    assert rows_of(samples, data) == [
        {"image": b"jpeg", "names": b"a"},
        {"image": b"png", "names": [b"a", b"b"]},
    ]


def test_feature_key_is_the_key(tmp_path: Path) -> None:
    """So that records can be joined with the samples of tars; otherwise the number is."""
    named = {
        "__key__": ("bytes_list", [b"n/1"]),
        "__url__": ("bytes_list", [b"a.tar"]),
        "a": ("int64_list", [1]),
    }
    data = framed(example({"a": ("int64_list", [0])}), example(named))
    samples = indexed(tmp_path / "a.tfrecord", data)
    assert [key_of(samples, number) for number in range(2)] == ["000000000", "n/1"]
    assert rows_of(samples, data) == [{"a": 0}, {"a": 1}]


def test_records_that_are_no_examples_are_bytes(tmp_path: Path) -> None:
    """A file that begins with such a record has one column."""
    data = framed(b"\x12\x00", b"", b"any")
    assert rows_of(indexed(tmp_path / "a.tfrecord", data), data) == [
        {"record": b"\x12\x00"},
        {"record": b""},
        {"record": b"any"},
    ]


def test_other_record_among_examples_is_a_fault(tmp_path: Path) -> None:
    """Those before and after it are read."""
    whole = example({"a": ("int64_list", [1])})
    data = framed(whole, b"\x12\x00", whole)
    samples = indexed(tmp_path / "a.tfrecord", data)
    assert rows_of(samples, data) == [{"a": 1}, None, {"a": 1}]
    assert "not a tf.train.Example" in (fault_of(samples, 1) or "")


def test_file_without_records_has_no_samples(tmp_path: Path) -> None:
    """TensorFlow writes an empty file for them."""
    assert not len(indexed(tmp_path / "a.tfrecord", b""))


@pytest.mark.parametrize(
    ("at", "what"), [(3, "the length at byte 0"), (20, "the record at byte 0")]
)
def test_checksums_are_compared(tmp_path: Path, at: int, what: str) -> None:
    """A changed byte is damage, and the error says where."""
    data = bytearray(framed(example({"a": ("bytes_list", [b"x" * 30])})))
    data[at] ^= 1
    with pytest.raises(CorruptShardError, match=what):
        indexed(tmp_path / "a.tfrecord", bytes(data))


@pytest.mark.parametrize("left", [5, 14, -1])
def test_part_of_a_record_is_an_error(tmp_path: Path, left: int) -> None:
    """Wherever the file ends."""
    with pytest.raises(TruncatedShardError, match="inside the record at byte 0"):
        indexed(tmp_path / "a.tfrecord", framed(b"some record")[:left])


@given(st.binary(max_size=60), st.integers(0, 60), st.integers(0, 255))
def test_damaged_messages_are_value_errors(data: bytes, at: int, byte: int) -> None:
    """Whatever the bytes, nothing else is raised, and no offset is out of bounds."""
    encoded = bytearray(example({"a": ("int64_list", [1, 2**60]), "b": ("bytes_list", [b"x"])}))
    encoded[at % len(encoded)] = byte
    for record in (data, bytes(encoded)):
        try:
            features = list(tf_example.features_of(record))
            assert all(0 <= each.start <= each.end <= len(record) for each in features)
            for each in features:
                tf_example.value(record[each.start : each.end])
            tf_example.value(record)
        except ValueError:
            pass


def test_compressed_file_under_a_plain_name_is_an_error(tmp_path: Path) -> None:
    """TensorFlow does not write a suffix: the error says how to name the file."""
    with pytest.raises(ShardError) as caught:
        indexed(tmp_path / "a.tfrecord", b"\x1f\x8b" + bytes(30))
    assert ".tfrecord.gz" in str(caught.value)


def test_record_of_empty_features_is_refused(tmp_path: Path) -> None:
    """Each takes two bytes of the file, and would take a hundred of memory."""
    entries = b"\x0a\0" * (cells.MAX_COLUMNS + 1)
    data = framed(example({}), b"\x0a" + _varint(len(entries)) + entries)
    with pytest.raises(
        UnsupportedShardError, match="the record at byte 30 has more than 65,536 features"
    ):
        indexed(tmp_path / "a.tfrecord", data)


def test_numbers_of_one_field_each_take_linear_time() -> None:
    """Half a million, which were copied for each further one, come at once."""
    data = example({"a": ("float_list", [0.5] * 500_000)}, NOT_PACKED)
    (feature,) = tf_example.features_of(data)
    assert tf_example.value(data[feature.start : feature.end]).sum() == 250_000


def _varint(number: int) -> bytes:
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])
