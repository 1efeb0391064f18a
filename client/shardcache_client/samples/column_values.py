"""Values of columns that a shard's format stores encoded, decoded as they are sliced."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardcache.errors import (
    ConfigError,
    CorruptShardError,
    DecodeError,
    ShardcacheError,
    UnsupportedShardError,
)
from shardcache.formats.format import Decoder, Format
from shardcache.formats.table import format_named
from shardcache.formats.tar import TAR
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import SlicedColumn, Slices

# Libraries that decode damaged data may raise anything.
_FAILURES: tuple[type[BaseException], ...] = (Exception,)


@dataclass(frozen=True, slots=True)
class DecodedColumn:
    """The bytes of a shard, sliced into decoded values of one column; see `Slices`."""

    column: str
    data: Slices
    decode: Decoder

    def __getitem__(self, run: slice) -> Any:
        """Return a value. Raises DecodeError, which names no sample yet."""
        try:
            return self.decode(self.data[run])
        except _FAILURES as exn:
            raise DecodeError(
                f"the column {self.column!r} could not be decoded ({type(exn).__name__}: {exn})",
                remedy=f"write the sample again, or take the column's bytes: "
                f'decode={{"{self.column}": "bytes"}}',
            ) from exn


def decoders_of(
    header: Mapping[str, Any],
    extensions: Sequence[str],
    view: View,
    url: str,
) -> list[Decoder | None]:
    """Return the decoder of each column of a whole shard; None for bytes, and those not read.

    Args:
        header: of the shard's sidecar.
        extensions: names of the columns.
        view: chooses those that are read, and those whose bytes are wanted.
        url: of the shard, for errors.

    Raises CorruptShardError, UnsupportedShardError for values that cannot be decoded, ConfigError
    for a missing library.
    """
    encodings = header.get("encodings") or [""] * len(extensions)
    if not any(encodings):
        return [None] * len(extensions)
    content = header.get("content", TAR.name)
    format_ = format_named(content)
    if format_ is None:
        raise UnsupportedShardError(
            f"the format {content!r} of this shard is unknown to this release",
            url=url,
            remedy="update shardcache in the training process, too",
        )
    if len(encodings) != len(extensions):
        raise CorruptShardError(
            f"the index has {len(encodings)} encodings of {len(extensions)} columns", url=url
        )
    return column_decoders(format_, extensions, encodings, view, url)


def column_decoders(
    format_: Format,
    extensions: Sequence[str],
    encodings: Sequence[str],
    view: View,
    url: str,
) -> list[Decoder | None]:
    """Return the decoder of each column; see `decoders_of`."""
    found: list[Decoder | None] = []
    for extension, encoding in zip(extensions, encodings, strict=True):
        name = view.prefix + extension
        is_decoded = (view.reads is None or view.reads(name)) and not view.takes_bytes(name)
        if not encoding or not is_decoded:
            found.append(None)
            continue
        try:
            found.append(format_.decoder(encoding))
        except (UnsupportedShardError, ConfigError) as exn:
            raise _of_column(exn, extension, url) from None
    return found


def _of_column(exn: ShardcacheError, column: str, url: str) -> ShardcacheError:
    message = f"the column {column!r} cannot be decoded: {exn.message}"
    remedy = exn.remedy.replace("NAME", column)
    return type(exn)(message, url=url, remedy=remedy)


def with_decoders(
    columns: Sequence[SlicedColumn],
    decoders: Sequence[Decoder | None],
    data: Slices,
) -> list[SlicedColumn]:
    """Return the columns, those with a decoder over the shard's plain bytes."""
    found: list[SlicedColumn] = []
    for column, decode in zip(columns, decoders, strict=True):
        name, _ = column
        if decode is None:
            found.append(column)
        else:
            found.append((name, DecodedColumn(name, data, decode)))
    return found
