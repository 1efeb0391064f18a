"""Samples to be written: their keys, and their members as bytes. Pure."""

from __future__ import annotations

import io
import json
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.errors import SampleError
from shardcache.tarindex.grouping import split_name

_METADATA = re.compile(r"__[^/]*__($|/)")
_SHOWN_CHARS = 200
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "id", "index", "inx"})  # as webdataset writes them


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its key, and the extension and content of each member, in the order in which they are written.

    Attributes:
        count: number of samples that readers will find in it: more than one in lines (`tarindex.grouping`).
    """

    key: str
    members: tuple[tuple[str, bytes], ...]
    count: int = 1


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
        raise SampleError(f"the sample {_shown(key)} has no members, so readers would not see it")
    if _METADATA.match(key):
        raise SampleError(f"readers skip keys such as {_shown(key)}, which mark metadata", remedy="rename the sample")
    for extension, _ in sample.members:
        if not extension or split_name(member_name(key, extension)) != (_bytes(key), _bytes(extension)):
            raise SampleError(
                f"readers would not find key {_shown(key)} and extension {_shown(extension)} in a member's name",
                remedy="use keys without a dot in their last component, and extensions without a slash",
            )
        if extension.lower() in seen:
            raise SampleError(f"the sample {_shown(key)} has two members with the extension {_shown(extension)}")
        seen.add(extension.lower())
    return sample


def member_name(key: str, extension: str) -> bytes:
    """Return a member's name in the tar."""
    return _bytes(f"{key}.{extension}")


def encoded(key: str, extension: str, value: object) -> bytes:
    """Return a member's content. Raises SampleError for a value that the extension cannot encode."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    kind = extension.rpartition(".")[2].lower()
    encode = "json" if kind == "json" else "text" if isinstance(value, str) else kind
    encode = "number" if encode in _NUMBERS else encode
    try:
        return _ENCODERS[encode](value)
    except (KeyError, TypeError, ValueError) as exn:
        reason = "" if isinstance(exn, KeyError) else f" ({exn})"
        raise SampleError(
            f"the sample {_shown(key)} has a value of type {type(value).__name__} for {_shown(extension)}{reason}",
            remedy="pass bytes; or text, a number for `cls`, an array for `npy`, anything else as `json`",
        ) from None


def as_json(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8, with dates and NumPy's scalars as their text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).encode("utf-8", "surrogateescape")


def _as_npy(value: object) -> bytes:
    import numpy  # only users of arrays need it

    buffer = io.BytesIO()
    numpy.save(buffer, numpy.asarray(value), allow_pickle=False)
    return buffer.getvalue()


def _strict_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


_ENCODERS: Mapping[str, Callable[[Any], bytes]] = {
    "json": _strict_json,
    "npy": _as_npy,
    "number": lambda value: b"%d" % operator.index(value),
    "text": lambda value: value.encode("utf-8", "surrogateescape"),
}


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shown(text: str) -> str:
    return repr(text[:_SHOWN_CHARS])


class Succession:
    """The keys of successive samples, two of which must differ: readers would take the samples for one."""

    def __init__(self) -> None:
        self._last: str | None = None

    def check(self, sample: Sample) -> None:
        """Note the next sample. Raises SampleError if it has the key of the one before."""
        if sample.key == self._last:
            raise SampleError(
                f"two samples in succession have the key {_shown(sample.key)}; readers would take them for one",
                remedy="give each sample its own key",
            )
        self._last = sample.key
