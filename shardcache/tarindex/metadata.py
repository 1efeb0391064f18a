"""Metadata of samples: the fields that `select()` sees, from one small JSON member of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from shardcache.errors import ConfigError, MetadataError
from shardcache.tarindex.tables import Tables, TarBytes, key_of, member_spans

Metadata = dict[str, Any]

MOST_BYTES = 16 * 1024
"""Limit for the metadata of one sample, as JSON."""

_MOST_MEMBER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MetadataMember:
    """The member of each sample that holds its metadata.

    Attributes:
        extension: of the member.
        fields: of its JSON object that are metadata; empty for all.
    """

    extension: str
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError for an extension that no member has."""
        if not self.extension or self.extension.startswith("."):
            raise ConfigError(f"{self.extension!r} is not a member extension", remedy='write it as "json", no dot')

    @classmethod
    def parse(cls, text: str) -> Self:
        """Build from `EXTENSION`, or `EXTENSION:FIELD,FIELD`. Raises ConfigError."""
        extension, _, fields = text.partition(":")
        return cls(extension, tuple(filter(None, fields.split(","))))


def read_metadata(tables: Tables, tar: TarBytes, member: MetadataMember, url: str) -> Iterator[Metadata | None]:
    """Yield the metadata of each sample of a shard; None for samples that lack the member.

    Args:
        tar: the bytes of the tar, of which only these members are read.
        url: url for error messages.

    Raises MetadataError for a member that is not a JSON object, or too large.
    """
    for sample, (start, end) in enumerate(member_spans(tables, member.extension)):
        if (start, end) == (0, 0):
            yield None
            continue
        try:
            _check(end - start, _MOST_MEMBER_BYTES)
            found = json.loads(tar[start:end])
            if isinstance(found, dict) and member.fields:
                found = {field: found[field] for field in member.fields if field in found}
            _check(len(json.dumps(found, separators=(",", ":"))), MOST_BYTES)
        except (ValueError, RecursionError) as exn:
            raise _unsuitable(str(exn), key_of(tables, sample), member, url) from exn
        if not isinstance(found, dict):
            raise _unsuitable(f"a {type(found).__name__}, not an object", key_of(tables, sample), member, url)
        yield found


def _check(size_bytes: int, most_bytes: int) -> None:
    """Raise ValueError for more bytes than there may be."""
    if size_bytes > most_bytes:
        raise ValueError(f"{size_bytes:,} bytes, more than {most_bytes:,}")


def _unsuitable(reason: str, key: str, member: MetadataMember, url: str) -> MetadataError:
    message = f"the member {member.extension!r} of the sample {key!r} holds no valid metadata: {reason}"
    return MetadataError(message, url=url)
