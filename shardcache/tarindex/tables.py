"""The samples of a tar as flat tables: cheap to make, to write, to read, and to cut samples out of a shard by."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_SHOWN_CHARS = 200


class Fault(enum.IntEnum):
    """Why a sample cannot be given, though its shard is good."""

    DUPLICATE = 1
    RESERVED = 2
    SPARSE = 3

    def explain(self, key: str, extension: str) -> str:
        """Return one sentence about the sample `key` and the member that is to blame."""
        key, extension = key[:_SHOWN_CHARS], extension[:_SHOWN_CHARS]
        match self:
            case Fault.DUPLICATE:
                return f"the sample {key!r} has two members with the extension {extension!r}"
            case Fault.RESERVED:
                return f"the sample {key!r} has a member with the reserved extension {extension!r}"
            case Fault.SPARSE:
                return f"the member {extension!r} of the sample {key!r} is stored sparse, which cannot be mapped"


class Tables(Protocol):
    """Tables to be read, whether they are still being made (`Samples`) or came from a sidecar (`TarIndex`)."""

    @property
    def starts(self) -> Sequence[int]:
        """Return each member's first byte, as an offset in the tar."""

    @property
    def ends(self) -> Sequence[int]:
        """Return the byte behind each member's last."""

    @property
    def extension_ids(self) -> Sequence[int]:
        """Return each member's number in `extensions`."""

    @property
    def member_ends(self) -> Sequence[int]:
        """Return for each whole sample the number of the member behind its last."""

    @property
    def keys(self) -> bytearray | memoryview:
        """Return all keys, joined."""

    @property
    def key_ends(self) -> Sequence[int]:
        """Return where each sample's key ends."""

    @property
    def extensions(self) -> Sequence[str]:
        """Return the extensions, as samples name their members."""

    @property
    def faults(self) -> Mapping[int, tuple[Fault, int]]:
        """Return for each bad sample why it is bad, and the number of the extension to blame."""


def key_of(tables: Tables, sample: int) -> str:
    """Return the `__key__` of a sample."""
    start = tables.key_ends[sample - 1] if sample else 0
    return str(tables.keys[start : tables.key_ends[sample]], "utf-8", "surrogateescape")


def fault_of(tables: Tables, sample: int) -> str | None:
    """Return why a sample cannot be given, or None where it can."""
    if sample not in tables.faults:
        return None
    fault, extension = tables.faults[sample]
    return fault.explain(key_of(tables, sample), tables.extensions[extension])


def _spans() -> array[int]:
    return array("Q")


def _numbers() -> array[int]:
    return array("I")


@dataclass(slots=True)
class Samples:
    """The samples of one tar, as flat tables.

    Attributes:
        starts, ends: offset in the tar, in bytes, of each member's first byte and of the byte behind its last.
        extension_ids: each member's number in `extensions`.
        member_ends: for each sample, the number of the member behind its last.
        keys, key_ends: all keys, joined, and where each ends.
        extensions: lower-cased, each once, in the order of appearance.
        faults: sample → why it is bad, and the number of the extension to blame.
    """

    starts: array[int] = field(default_factory=_spans)
    ends: array[int] = field(default_factory=_spans)
    extension_ids: array[int] = field(default_factory=_numbers)
    member_ends: array[int] = field(default_factory=_spans)
    keys: bytearray = field(default_factory=bytearray)
    key_ends: array[int] = field(default_factory=_spans)
    extensions: list[str] = field(default_factory=list)
    faults: dict[int, tuple[Fault, int]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.key_ends)

    def begin(self, key: bytes) -> None:
        """End the present sample and begin another."""
        self.end()
        self.keys += key
        self.key_ends.append(len(self.keys))

    def end(self) -> None:
        """End the present sample, if there is one."""
        if len(self.member_ends) < len(self.key_ends):
            self.member_ends.append(len(self.starts))
