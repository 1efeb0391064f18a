"""Samples sliced from a mapped tar by its index, not by walking over the tar.

The index, `Tables`, has the key of each sample and the begin and end of each member in the tar. The
reader maps the cached tar into memory, and these functions cut samples out of the map: they slice
the bytes of each member.

A column is the members with one extension in all samples of a shard. A column's value in a sample
is the member's bytes, or the decoded object if the shard's format stores values encoded. Columns
that the dataset does not read are left out of the samples.

Samples are numbered from 0 in their shard, and so are members. A bad sample has a fault in the
index, such as two members with one extension. It cannot be read, but the other samples can.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Protocol

from shardcache.shared.exceptions import DecodeError, SampleError
from shardcache.shared.formats.format import Decoder
from shardcache.shared.tarindex.tables import Tables, fault_of, fault_remedy, key_of

Sample = dict[str, Any]

FAILURES: tuple[type[BaseException], ...] = (Exception,)
"""Errors that decoding may raise: libraries may raise any exception for damaged data."""

# Number of keys that are decoded together.
_KEYS_AT_ONCE = 256


class Slices(Protocol):
    """The bytes of a tar, sliced into values of samples.

    Slices of a map are `bytes`. Slices of a `sharing.buffer.Buffer` are views of it.
    """

    def __getitem__(self, byte_range: slice, /) -> Any: ...


SlicedColumn = tuple[str, Slices, Decoder | None]
"""The name of a column, the bytes from which its values are sliced, and the decoder of the values.

If the decoder is None, the values are the slices themselves.
"""

ColumnSpans = tuple[str, Slices, Decoder | None, Sequence[int], Sequence[int]]
"""A `SlicedColumn`, and for each sample the offsets at which its value begins and ends."""

Adder = Callable[[int, Sample], object]
"""Adds members to a sample, given its number and the sample itself."""

Reads = Callable[[str], bool]
"""Returns True if samples get the members with an extension."""


def choose_columns(
    columns: Iterable[SlicedColumn], reads: Reads | None, prefix: str = ""
) -> list[SlicedColumn | None]:
    """Return the columns with a prefix to their names, and None for columns that are left out.

    Args:
        columns: the columns.
        reads: chooses the columns by their name with the prefix; None for all.
        prefix: prefix of the names in samples; not empty for joined shards.
    """
    chosen: list[SlicedColumn | None] = []
    for extension, tar, decode in columns:
        name = prefix + extension
        if reads is None or reads(name):
            chosen.append((name, tar, decode))
        else:
            chosen.append(None)
    return chosen


def undecoded_columns(extensions: Iterable[str], tar: Slices) -> list[SlicedColumn]:
    """Return columns whose values are slices of `tar`."""
    return [(extension, tar, None) for extension in extensions]


def cut(
    tables: Tables,
    columns: Sequence[SlicedColumn | None],
    url: str,
    start: int,
    stop: int,
) -> Iterator[Sample]:
    """Yield the samples from number `start` to `stop`.

    A sample is `{"__key__": str, "__url__": str, extension: bytes…}`, with decoded values in place
    of bytes for columns that have a decoder.

    Args:
        tables: index of the shard.
        columns: the columns, in the order of the tables' extensions; None for a column to leave
            out.
        url: url of the shard.
        start: number of the first sample.
        stop: number after the last sample.

    Raises SampleError in place of a bad sample, and DecodeError in place of a sample with a value
    that cannot be decoded. Either ends the iterator.
    """
    faults = tables.faults
    first_member, end_of_all = members_between(tables, start, stop)
    # An iterator over the members of all samples, from which each sample takes its own.
    members = zip(
        map(columns.__getitem__, tables.extension_ids[first_member:end_of_all]),
        tables.starts[first_member:end_of_all],
        tables.ends[first_member:end_of_all],
        strict=True,
    )
    end_members = tables.member_ends[start:stop]
    keys = keys_in_order(tables, start, stop)
    for number, (end_member, key) in enumerate(zip(end_members, keys, strict=True), start):
        if number in faults:
            raise _sample_error(tables, number, url)
        sample: Sample = {"__key__": key, "__url__": url}
        for column, first_byte, end_byte in islice(members, end_member - first_member):
            if column is None:
                continue
            extension, tar, decode = column
            value = tar[first_byte:end_byte]
            if decode is not None:
                try:
                    value = decode(value)
                except FAILURES as exn:
                    raise _decode_error(extension, key, url, exn) from exn
            sample[extension] = value
        yield sample
        first_member = end_member


def members_between(tables: Tables, start: int, stop: int) -> tuple[int, int]:
    """Return the numbers of the first member, and after the last one, of samples `start` to `stop`.

    The members of a sample, and those of consecutive samples, have consecutive numbers.
    """
    member_ends = tables.member_ends
    first_member = member_ends[start - 1] if start else 0
    end_member = member_ends[stop - 1] if stop else 0
    return first_member, end_member


def has_bad_sample(tables: Tables, start: int, stop: int) -> bool:
    """Return True if a sample from number `start` to `stop` is bad."""
    if not tables.faults:
        return False
    return not tables.faults.keys().isdisjoint(range(start, stop))


def keys_in_order(tables: Tables, start: int, stop: int) -> Iterator[str]:
    """Return an iterator over the keys of the samples from number `start` to `stop`."""
    firsts = range(start, stop, _KEYS_AT_ONCE)
    lists = (keys_between(tables, first, min(first + _KEYS_AT_ONCE, stop)) for first in firsts)
    return chain.from_iterable(lists)


def keys_between(tables: Tables, start: int, stop: int) -> list[str]:
    """Return the keys of the samples from number `start` to `stop`. There must be at least one."""
    begin = tables.key_ends[start - 1] if start else 0
    ends = tables.key_ends[start:stop].tolist()
    borders = [begin, *ends]
    text = str(tables.keys[begin : ends[-1]], "utf-8", "surrogateescape")
    # ASCII text has one character per byte, so offsets of bytes are also offsets in the text.
    if text.isascii():
        return [text[first - begin : end - begin] for first, end in pairwise(borders)]
    keys = tables.keys
    return [str(keys[first:end], "utf-8", "surrogateescape") for first, end in pairwise(borders)]


def cutter(
    tables: Tables, columns: Sequence[SlicedColumn | None], url: str
) -> Callable[..., Sample]:
    """Return a function `cut_one(number, sample=None)`, which returns any sample by its number.

    Given another sample as well, the function adds the members to that one and returns it. For the
    arguments of `cutter` and the errors of the function, see `cut`.
    """
    # Variables of a closure cost less than attributes, and a shuffled reader calls the function for
    # each sample.
    starts = tables.starts
    ends = tables.ends
    extension_ids = tables.extension_ids
    member_ends = tables.member_ends
    key_ends = tables.key_ends
    keys = tables.keys
    faults = tables.faults

    def cut_one(number: int, sample: Sample | None = None) -> Sample:
        """Return a sample by its number, or add its members to `sample` and return that."""
        if number in faults:
            raise _sample_error(tables, number, url)
        first_member = 0
        key_start = 0
        if number:
            first_member = member_ends[number - 1]
            key_start = key_ends[number - 1]

        if sample is None:
            sample = {
                "__key__": str(keys[key_start : key_ends[number]], "utf-8", "surrogateescape"),
                "__url__": url,
            }
        for member in range(first_member, member_ends[number]):
            column = columns[extension_ids[member]]
            if column is None:
                continue
            extension, tar, decode = column
            value = tar[starts[member] : ends[member]]
            if decode is not None:
                try:
                    value = decode(value)
                except FAILURES as exn:
                    raise _decode_error(extension, key_of(tables, number), url, exn) from exn
            sample[extension] = value
        return sample

    return cut_one


def column_spans(
    tables: Tables,
    columns: Sequence[SlicedColumn | None],
    numbers: Sequence[int | None],
) -> list[ColumnSpans] | None:
    """Return the begins and ends of each column's values in some samples.

    Returns None if a sample of the shard is bad, if the samples do not all have the same members in
    the same order, or if `numbers` has a None.

    Args:
        tables: index of the shard.
        columns: see `cut`.
        numbers: numbers of the samples; the result has the values in this order. None stands for a
            sample that is missing.
    """
    width = len(columns)  # number of members of each sample
    count = len(tables)
    if tables.faults or not has_all_columns(tables, width, 0, count):
        return None
    # If all samples are asked for in their order, the tables' offsets are used as they are. Callers
    # then pass a range: a list of the same numbers is unequal to it, and costs a copy.
    is_in_order = numbers == range(count)
    if not is_in_order and None in numbers:
        return None

    spans: list[ColumnSpans] = []
    for nth, column in enumerate(columns):
        if column is None:
            continue
        starts: Any = tables.starts[nth::width]
        ends: Any = tables.ends[nth::width]
        if not is_in_order:
            starts = array("Q", map(starts.__getitem__, numbers))
            ends = array("Q", map(ends.__getitem__, numbers))
        spans.append((*column, starts, ends))
    return spans


def has_all_columns(tables: Tables, columns: int, start: int, stop: int) -> bool:
    """Return True if each sample has one member of each column, in the order of the columns.

    Args:
        tables: index of the shard.
        columns: number of columns.
        start: number of the first sample.
        stop: number after the last sample.
    """
    first_member, end_member = members_between(tables, start, stop)
    # Comparing bytes is faster than a loop over the samples.
    columns_of_each = array("I", range(columns)).tobytes()
    columns_of_members = tables.extension_ids[first_member:end_member].tobytes()
    return columns_of_members == columns_of_each * (stop - start)


def joined_cutter(
    keys: Sequence[bytes],
    url: str,
    spans: Sequence[ColumnSpans],
    adders: Sequence[Adder],
) -> Callable[[int], Sample]:
    """Return a function that returns any joined sample by its number.

    A joined sample also has members of samples with the same key in other shards.

    Args:
        keys: keys of the samples, by number.
        url: url of the shard whose samples get the members.
        spans: begins and ends of the values of columns that are sliced here.
        adders: functions that add all other members, called one after another.
    """

    def cut_one(number: int) -> Sample:
        """Return a sample by its number."""
        sample: Sample = {
            "__key__": keys[number].decode("utf-8", "surrogateescape"),
            "__url__": url,
        }
        for extension, tar, decode, starts, ends in spans:
            value = tar[starts[number] : ends[number]]
            if decode is not None:
                try:
                    value = decode(value)
                except FAILURES as exn:
                    raise _decode_error(extension, sample["__key__"], url, exn) from exn
            sample[extension] = value
        for adder in adders:
            adder(number, sample)
        return sample

    return cut_one


def _decode_error(column: str, key: str, url: str, exn: BaseException) -> DecodeError:
    """Return the error for a value that cannot be decoded.

    Args:
        column: name of the value's column.
        key: key of the sample.
        url: url of the shard.
        exn: error of the decoder.
    """
    return DecodeError(
        f"the sample {key!r}: the column {column!r} could not be decoded "
        f"({type(exn).__name__}: {exn})",
        url=url,
        remedy="write the sample again, or take the column's bytes: "
        f'decode={{"{column}": "bytes"}}',
    )


def _sample_error(tables: Tables, number: int, url: str) -> SampleError:
    """Return the error for a bad sample."""
    fault = fault_of(tables, number)
    assert fault is not None
    return SampleError(fault, url=url, remedy=fault_remedy(tables, number))
