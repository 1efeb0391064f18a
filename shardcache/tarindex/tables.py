"""The samples of a tar as flat tables: cheap to build, to write, to read, and to look up samples in."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shardcache.errors import ConfigError

_SHOWN_CHARS = 200


class Fault(enum.IntEnum):
    """A reason why a sample is unusable although its shard is intact."""

    DUPLICATE = 1
    RESERVED = 2
    SPARSE = 3

    def explain(self, key: str, extension: str) -> str:
        """Return one sentence about the sample `key` and the member at fault."""
        key, extension = key[:_SHOWN_CHARS], extension[:_SHOWN_CHARS]
        match self:
            case Fault.DUPLICATE:
                return f"the sample {key!r} has two members with the extension {extension!r}"
            case Fault.RESERVED:
                return f"the sample {key!r} has a member with the reserved extension {extension!r}"
            case Fault.SPARSE:
                return (
                    f"the member {extension!r} of the sample {key!r} is stored as a sparse file, which cannot be mapped"
                )


class TarBytes(Protocol):
    """The bytes of a tar, by range."""

    def __getitem__(self, run: slice, /) -> bytes: ...


class Tables(Protocol):
    """Read access to tables, still under construction (`Samples`) or from a sidecar (`TarIndex`)."""

    @property
    def starts(self) -> Sequence[int]:
        """Start of each member, as an offset in the tar."""

    @property
    def ends(self) -> Sequence[int]:
        """End (exclusive) of each member, as an offset in the tar."""

    @property
    def extension_ids(self) -> Sequence[int]:
        """Index of each member's extension in `extensions`."""

    @property
    def member_ends(self) -> Sequence[int]:
        """End (exclusive) of each complete sample's members."""

    @property
    def keys(self) -> bytearray | memoryview:
        """All keys, concatenated."""

    @property
    def key_ends(self) -> Sequence[int]:
        """End of each sample's key in `keys`."""

    @property
    def extensions(self) -> Sequence[str]:
        """The extensions, as used for the members in samples."""

    @property
    def faults(self) -> Mapping[int, tuple[Fault, int]]:
        """Fault of each unusable sample, with the index of the extension at fault."""


def key_of(tables: Tables, sample: int) -> str:
    """Return the `__key__` of a sample."""
    start = tables.key_ends[sample - 1] if sample else 0
    return str(tables.keys[start : tables.key_ends[sample]], "utf-8", "surrogateescape")


def fault_of(tables: Tables, sample: int) -> str | None:
    """Return the reason why a sample is unusable, or None if it is usable."""
    if sample not in tables.faults:
        return None
    fault, extension = tables.faults[sample]
    return fault.explain(key_of(tables, sample), tables.extensions[extension])


def member_spans(tables: Tables, extension: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each sample's member with an extension; (0, 0) for a sample without one."""
    extension = extension.lower()
    wanted = tables.extensions.index(extension) if extension in tables.extensions else -1
    starts, ends, extension_ids, first = tables.starts, tables.ends, tables.extension_ids, 0
    for last in tables.member_ends:
        for each in range(first, last):
            if extension_ids[each] == wanted:
                yield starts[each], ends[each]
                break
        else:
            yield 0, 0
        first = last


@dataclass(slots=True)
class Samples:
    """The samples of one tar, as flat tables.

    Attributes:
        starts, ends: for each member, the offsets in the tar, in bytes, of its start and end (exclusive).
        extension_ids: for each member, the index of its extension in `extensions`.
        member_ends: for each complete sample, the end (exclusive) of its members.
        keys, key_ends: all keys, concatenated, and the end of each.
        extensions: lower-cased, each once, in order of appearance.
        faults: sample → its fault, and the index of the extension at fault.
    """

    starts: array[int] = field(default_factory=lambda: array("Q"))
    ends: array[int] = field(default_factory=lambda: array("Q"))
    extension_ids: array[int] = field(default_factory=lambda: array("I"))
    member_ends: array[int] = field(default_factory=lambda: array("Q"))
    keys: bytearray = field(default_factory=bytearray)
    key_ends: array[int] = field(default_factory=lambda: array("Q"))
    extensions: list[str] = field(default_factory=list)
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.key_ends)

    def begin(self, key: bytes) -> None:
        """Complete the current sample and begin another."""
        self.end()
        self.keys += key
        self.key_ends.append(len(self.keys))

    def end(self) -> None:
        """Complete the current sample, if there is one."""
        if len(self.member_ends) < len(self.key_ends):
            self.member_ends.append(len(self.starts))


def check_extension(extension: str, example: str) -> None:
    """Raise ConfigError for an extension that no member has."""
    if not extension or extension.startswith("."):
        raise ConfigError(f"{extension!r} is not a member extension", remedy=f'write it as "{example}", no dot')
