"""Samples, their bytes in a tar, and the cuts and names by which a dataset becomes shards. Pure."""

import io
import json
import operator
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from shardcache.errors import ConfigError, SampleError
from shardcache.tarindex.contents import Row
from shardcache.tarindex.grouping import is_of_macos, split_name
from shardcache.tarindex.members import BLOCK_BYTES, ZERO_BLOCK, padded
from shardcache.url_names import is_shard

END = 2 * ZERO_BLOCK
"""The end of an archive."""

SHARD_NAMES = "shard-%06d.tar"
JOURNAL = ".shardcache-write.json"
"""Name of the journal in the destination."""

FORMAT = 1
"""Number of the layout of written shards: another release's may differ, and must not be mixed with this one's."""

_METADATA = re.compile(r"__[^/]*__($|/)")
_SHOWN_CHARS = 200
_INTEGERS = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})  # as webdataset writes them
_NAME_BYTES = 100
_MAX_OCTAL_BYTES = 8 * 1024**3
_NUMBER = re.compile(r"%0?\d*d")


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its key, and the extension and content of each member, in the order in which they are written."""

    key: str
    members: tuple[tuple[str, bytes], ...]
    count: int = 1  # of samples that readers will find in it: more than one in lines (`tarindex.grouping`)

    @property
    def size_bytes(self) -> int:
        """Space that the sample takes in a tar."""
        return tar_bytes(self.key, ((extension, len(data)) for extension, data in self.members))

    def tar(self) -> Iterator[bytes]:
        """Yield the pieces of the sample's members in a tar; `END` is to follow the last sample's."""
        for extension, data in self.members:
            yield header(utf8(f"{self.key}.{extension}"), len(data))
            yield data
            if surplus := len(data) % BLOCK_BYTES:
                yield ZERO_BLOCK[surplus:]


def as_table(number: int, version: str | None, rows: Iterable[Row]) -> Iterator[bytes]:
    """Yield the part of a sample table about one shard, the one with this number in the index; `END` is to follow."""
    for row in rows:
        content = json.dumps({"shard": number, "version": version, **row}, separators=(",", ":")).encode()
        yield from Sample(f"{number:08d}-{row['first']:08d}", (("json", content),)).tar()


def sample_of(fields: Mapping[str, Any]) -> Sample:
    """Return the sample of a mapping from `__key__` and extensions to values, as webdataset's writers take it.

    `bytes` are written as they are, `str` in UTF-8, and other values by the last part of their extension: `json` as
    JSON, `npy` as a NumPy array, `cls`, `id`, `index` and their like as a decimal number. Other extensions that begin
    with `__`, such as `__url__`, are left out.

    Raises SampleError for a sample without key or members, a value that its extension cannot encode, and a name that
    readers would take apart differently.
    """
    key = fields.get("__key__")
    if not isinstance(key, str):
        raise SampleError("a sample has no __key__", remedy='give each a text that no other has: {"__key__": "000017"}')
    members = ((name, encoded(key, name, fields[name])) for name in fields if not name.startswith("__"))
    return checked(Sample(key, tuple(members)))


def checked(sample: Sample) -> Sample:
    """Return the sample if readers will find the same key and extensions in it; raise SampleError otherwise."""
    key, seen = sample.key, set()
    if not sample.members:
        raise SampleError(f"the sample {shown(key)} has no members, so readers would not see it")
    if _METADATA.match(key):
        raise SampleError(f"readers skip keys such as {shown(key)}, which mark metadata", remedy="rename the sample")
    for extension, _ in sample.members:
        if "\0" in f"{key}{extension}":
            raise SampleError(
                f"readers would take NUL for the end of the name of key {shown(key)}, extension {shown(extension)}",
                remedy="use keys and extensions without NUL",
            )
        if is_of_macos(utf8(f"{key}.{extension}")):
            name = shown(f"{key}.{extension}")
            raise SampleError(f"readers skip members such as {name}, which macOS adds", remedy="rename the sample")
        if not extension or split_name(utf8(f"{key}.{extension}")) != (utf8(key), utf8(extension)):
            raise SampleError(
                f"readers would not find key {shown(key)} and extension {shown(extension)} in a member's name",
                remedy="use keys without a dot in their last component, and extensions without a slash",
            )
        if extension.lower() in seen:
            raise SampleError(f"the sample {shown(key)} has two members with the extension {shown(extension)}")
        seen.add(extension.lower())
    return sample


def encoded(key: str, extension: str, value: object) -> bytes:
    """Return a member's content. Raises SampleError for a value that the extension cannot encode."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    kind = extension.rpartition(".")[2].lower()
    encode = "json" if kind == "json" else "text" if isinstance(value, str) else kind
    try:
        return _ENCODERS["integer" if encode in _INTEGERS else encode](value)
    except (KeyError, TypeError, ValueError) as exn:
        reason = "" if isinstance(exn, KeyError) else f" ({exn})"
        raise SampleError(
            f"the sample {shown(key)} has a value of type {type(value).__name__} for {shown(extension)}{reason}",
            remedy="pass bytes; or text, a number for `cls`, an array for `npy`, anything else as `json`",
        ) from None


def as_json(value: object, default: Callable[[Any], object] | None = str) -> bytes:
    """Return a value as compact JSON in UTF-8; what JSON lacks, such as dates and NumPy's scalars, as its text."""
    return utf8(json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=default))


def as_npy(value: object, dtype: str | None = None) -> bytes:
    """Return an array as the bytes of an `.npy` file. Raises TypeError, ValueError."""
    import numpy  # only users of arrays need it

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(value, dtype), allow_pickle=False)
    return buffer.getvalue()


def utf8(text: str) -> bytes:
    """Return a text's bytes; those of file names that are not UTF-8 come out as they are."""
    return text.encode("utf-8", "surrogateescape")


_ENCODERS: Mapping[str, Callable[[Any], bytes]] = {
    "json": partial(as_json, default=None),
    "npy": as_npy,
    "integer": lambda value: b"%d" % operator.index(value),
    "text": utf8,
}


def shown(text: str) -> str:
    """Return a text as it appears in an error."""
    return repr(text[:_SHOWN_CHARS])


def tar_bytes(key: str, sizes: Iterable[tuple[str, int]]) -> int:
    """Return the space that a sample takes in a tar, given extension and size of each member."""
    return sum(member_bytes(len(utf8(f"{key}.{extension}")), size_bytes) for extension, size_bytes in sizes)


def member_bytes(name_bytes: int, size_bytes: int) -> int:
    """Return the space that a member takes in a tar, given the length of its name and its own."""
    extended = 0 if name_bytes <= _NAME_BYTES else BLOCK_BYTES + padded(name_bytes + 1)
    return extended + BLOCK_BYTES + padded(size_bytes)


def header(name: bytes, size_bytes: int) -> bytes:
    """Return the header of a regular file, as tarfile's GNU format; in a tenth of its time for usual names."""
    if len(name) > _NAME_BYTES or size_bytes >= _MAX_OCTAL_BYTES:
        return _tarfile_header(name, size_bytes)
    size = b"%011o\0" % size_bytes
    checksum = b"%06o\0 " % (_FIXED_SUM + sum(name) + sum(size))
    return b"".join((name.ljust(_NAME_BYTES, b"\0"), _BEFORE_SIZE, size, _BEFORE_SUM, checksum, _AFTER_SUM))


def _tarfile_header(name: bytes, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))  # with its defaults: mode 0644, root's, time 0
    info.size = size_bytes
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


# What is the same in every header: of its fields, only name (0), size (124) and checksum (148) differ.
_PLAIN = _tarfile_header(b"", 0)
_BEFORE_SIZE, _BEFORE_SUM, _AFTER_SUM = _PLAIN[_NAME_BYTES:124], _PLAIN[136:148], _PLAIN[156:]
_FIXED_SUM = sum(_BEFORE_SIZE) + sum(_BEFORE_SUM) + 8 * 0x20 + sum(_AFTER_SUM)


@dataclass(slots=True)
class Cut:
    """The samples of one shard: where the first and the last lie in the input, and their number."""

    first: Any
    last: Any
    samples: int
    size_bytes: int  # in the tar; exact if the input gives exact sizes


def cut(samples: Iterable[tuple[int, Any]], shard_size_bytes: int) -> Iterator[Cut]:
    """Cut samples, given size and position of each, to shards of at most `shard_size_bytes`, as full as they may be.

    A larger sample is a shard by itself.
    """
    shard: Cut | None = None
    for size_bytes, position in samples:
        if shard is None or shard.size_bytes + size_bytes > shard_size_bytes:
            if shard is not None:
                yield shard
            shard = Cut(position, position, 0, len(END))
        shard.last = position
        shard.samples += 1
        shard.size_bytes += size_bytes
    if shard is not None:
        yield shard


@dataclass(frozen=True, slots=True)
class ShardNames:
    """Names of shards by number, from a pattern such as `train-%06d.tar`. Raises ConfigError for any other pattern."""

    pattern: str = SHARD_NAMES

    def __post_init__(self) -> None:
        fixed = _NUMBER.sub("", self.pattern, count=1)
        if fixed == self.pattern or "%" in fixed or "/" in fixed or fixed.startswith(".") or fixed[-4:] != ".tar":
            remedy = "write one number with %, and the suffix .tar: train-%06d.tar"
            raise ConfigError(f"not a pattern for names of shards: {self.pattern!r}", remedy=remedy)

    def name(self, number: int) -> str:
        """Return the name of shard `number`, counted from 0."""
        return self.pattern % number

    def foreign(self, names: Iterable[str]) -> list[str]:
        """Return the names of shards, or of what readers take for one, that the pattern cannot have produced."""
        return sorted(name for name in names if is_shard(name) and not self._is_own(name))

    def _is_own(self, name: str) -> bool:
        head, tail = _NUMBER.split(self.pattern)
        digits = name.removeprefix(head).removesuffix(tail)
        return digits.isdecimal() and self.name(int(digits)) == name


class Stored(NamedTuple):
    """A complete shard in the destination: its size, its version there, and its numbers of samples and tokens."""

    size_bytes: int
    version: str
    samples: int
    tokens: int | None = None
    members: Mapping[str, int] | None = None  # number of samples with each extension


@dataclass(slots=True)
class Journal:
    """The input and settings of a dataset, and its complete shards, by name: kept beside them."""

    settings: dict[str, Any]
    shards: dict[str, Stored] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the journal's text; `resume` reads it."""
        text = {"format": FORMAT, "settings": self.settings, "shards": self.shards}
        return json.dumps(text, ensure_ascii=True, indent=1).encode()


def resume(text: bytes, settings: Mapping[str, Any], url: str) -> Journal:
    """Return the journal of an interrupted run.

    Raises ConfigError if settings, which it names, or the input have changed: new shards must not mix with the old.
    """
    remedy = "empty the destination, or choose another"
    try:
        found = json.loads(text)
        then, shards = found["settings"], {name: Stored(*row) for name, row in found["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exn:
        raise ConfigError(f"{JOURNAL} is damaged ({exn})", url=url, remedy=remedy) from exn
    if found.get("format") != FORMAT:
        raise ConfigError("another release of shardcache began to write this dataset", url=url, remedy=remedy)
    now = dict(settings)
    if changed := sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name)):
        what = "; ".join(f"{name}: {_brief(then.get(name))} then, {_brief(now.get(name))} now" for name in changed)
        raise ConfigError(
            f"the destination holds shards of other input or settings ({what})",
            url=url,
            remedy=f"to resume, restore these; otherwise {remedy}",
        )
    return Journal(now, shards)


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
