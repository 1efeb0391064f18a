"""Samples sliced from a mapped tar by its index, not by walking over the tar.

The index, `Tables`, has the key of each sample and the begin and end of each member in the tar. The
reader maps the cached tar into memory, and these functions slice the members' bytes out of the map.

A column is the members with one extension in all samples of a shard. A column's value in a sample
is the member's bytes, or the decoded object if the shard's format stores values encoded. Columns
that the dataset does not read are left out of the samples.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, Protocol

from shardcache.errors import DecodeError, SampleError
from shardcache.formats.format import Decoder
from shardcache.tarindex.tables import Tables, fault_of, fault_remedy, key_of

Sample = dict[str, Any]

FAILURES: tuple[type[BaseException], ...] = (Exception,)
"""Errors that decoding may raise: libraries may raise any exception for damaged data."""

# Number of keys that are decoded together.
_KEYS_AT_ONCE = 256


class Slices(Protocol):
    """The bytes of a tar, sliced into values of samples.

    Slices of a map are `bytes`. Slices of a `Buffer` are views of it.
    """

    def __getitem__(self, run: slice, /) -> Any: ...


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


def chosen(
    columns: Iterable[SlicedColumn], reads: Reads | None, prefix: str = ""
) -> list[SlicedColumn | None]:
    """Return the columns with a prefix to their names, and None for columns that are left out.

    Args:
        columns: the columns.
        reads: chooses the columns by their name with the prefix; None for all.
        prefix: prefix of the names in samples; not empty for joined shards.
    """
    read: list[SlicedColumn | None] = []
    for extension, tar, decode in columns:
        name = prefix + extension
        is_read = reads is None or reads(name)
        read.append((name, tar, decode) if is_read else None)
    return read


def as_bytes(extensions: Iterable[str], tar: Slices) -> list[SlicedColumn]:
    """Return columns whose values are slices of `tar` and are not decoded."""
    return [(extension, tar, None) for extension in extensions]


def cut(
    tables: Tables,
    columns: Sequence[SlicedColumn | None],
    url: str,
    start: int,
    stop: int,
) -> Iterator[Sample]:
    """Yield the samples from number `start` to `stop`.

    A sample is `{"__key__": str, "__url__": str, extension: bytes…}`, with values in place of bytes
    where columns are decoded.

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
    # Members are numbered through the whole shard: a sample has the members from `first_member` up
    # to, but without, `end_member`.
    first_member = tables.member_ends[start - 1] if start else 0
    end_of_all = tables.member_ends[stop - 1] if stop else 0
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
                    raise _undecodable(extension, key, url, exn) from exn
            sample[extension] = value
        yield sample
        first_member = end_member


def keys_in_order(tables: Tables, start: int, stop: int) -> Iterator[str]:
    """Yield the keys of the samples from number `start` to `stop`."""
    firsts = range(start, stop, _KEYS_AT_ONCE)
    blocks = (keys_between(tables, first, min(first + _KEYS_AT_ONCE, stop)) for first in firsts)
    return chain.from_iterable(blocks)


def keys_between(tables: Tables, start: int, stop: int) -> list[str]:
    """Return the keys of the samples from number `start` to `stop`. There must be at least one."""
    begin = tables.key_ends[start - 1] if start else 0
    ends = tables.key_ends[start:stop].tolist()
    borders = [begin, *ends]
    text = str(tables.keys[begin : ends[-1]], "utf-8", "surrogateescape")
    # ASCII text has one character per byte, so that byte offsets are also offsets in the text.
    if text.isascii():
        return [text[first - begin : end - begin] for first, end in pairwise(borders)]
    keys = tables.keys
    return [str(keys[first:end], "utf-8", "surrogateescape") for first, end in pairwise(borders)]


def cutter(
    tables: Tables, columns: Sequence[SlicedColumn | None], url: str
) -> Callable[..., Sample]:
    """Return a function that returns any sample by its number, or adds its members to another.

    The function gets the sample's number, and optionally a sample that gets the members. For the
    arguments and the errors, see `cut`.
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
        if number:
            first = member_ends[number - 1]
            key_start = key_ends[number - 1]
        else:
            first = 0
            key_start = 0

        if sample is None:
            sample = {
                "__key__": str(keys[key_start : key_ends[number]], "utf-8", "surrogateescape"),
                "__url__": url,
            }
        for member in range(first, member_ends[number]):
            column = columns[extension_ids[member]]
            if column is None:
                continue
            extension, tar, decode = column
            value = tar[starts[member] : ends[member]]
            if decode is not None:
                try:
                    value = decode(value)
                except FAILURES as exn:
                    raise _undecodable(extension, key_of(tables, number), url, exn) from exn
            sample[extension] = value
        return sample

    return cut_one


def column_spans(
    tables: Tables,
    columns: Sequence[SlicedColumn | None],
    numbers: Sequence[int | None],
) -> list[ColumnSpans] | None:
    """Return the spans of each column's values in some samples.

    Returns None if a sample of the shard is bad, if the samples do not all have the same members in
    the same order, or if `numbers` has a None.

    Args:
        tables: index of the shard.
        columns: see `cut`.
        numbers: numbers of the samples, in the order that the spans are to have. None stands for a
            sample that is missing.
    """
    width = len(columns)
    count = len(tables)
    # The samples are alike if each has one member of each column, in the order of the columns.
    # Comparing bytes is faster than a loop over the samples.
    members_of_each = array("I", range(width)).tobytes()
    is_alike = tables.extension_ids.tobytes() == members_of_each * count
    if tables.faults or not is_alike:
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


def joined(
    keys: Sequence[bytes],
    url: str,
    spans: Sequence[ColumnSpans],
    adders: Sequence[Adder],
) -> Callable[[int], Sample]:
    """Return a function that returns any sample by its number.

    Args:
        keys: keys of the samples, by number.
        url: url of their shard.
        spans: spans of the values of each column of the samples.
        adders: functions that add further members, called one after another.
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
                    raise _undecodable(extension, sample["__key__"], url, exn) from exn
            sample[extension] = value
        for adder in adders:
            adder(number, sample)
        return sample

    return cut_one


def _undecodable(column: str, key: str, url: str, exn: BaseException) -> DecodeError:
    """Return the error for a value that cannot be decoded, with its column and its sample's key."""
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
