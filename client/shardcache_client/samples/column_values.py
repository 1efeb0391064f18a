"""Decoders of columns whose values a shard's format stores encoded.

In a tar, a member is a file, and its value is the file's bytes. Formats such as Parquet store
values of several types: an encoding is the name of the form in which a column's values are stored.
The encoding of a column of plain bytes is "". A sidecar is the index file that the cache keeps next
to a shard. Its header lists the encodings, and has the name of the format as "content".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from shardcache.shared.exceptions import (
    ConfigError,
    CorruptShardError,
    ShardcacheError,
    UnsupportedShardError,
)
from shardcache.shared.formats.cells import RESERVED
from shardcache.shared.formats.format import Decoder, Format, RowsDecoder, RunDecoder
from shardcache.shared.formats.format_table import format_named
from shardcache.shared.formats.tar import TAR
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import SlicedColumn, Slices


def decoders_of(
    header: Mapping[str, Any],
    extensions: Sequence[str],
    view: View,
    url: str,
) -> list[Decoder | None]:
    """Return the decoder of each column of a shard that is cached whole.

    The decoder is None for columns of bytes, and for columns that are not read. For a shard that is
    still arriving, and so has no sidecar yet, see `column_decoders`.

    Args:
        header: header of the shard's sidecar.
        extensions: names of the columns.
        view: chooses the columns that are read, and the columns whose bytes are wanted.
        url: url of the shard, for errors.

    Raises CorruptShardError or UnsupportedShardError for values that cannot be decoded, and
    ConfigError for a missing library.
    """
    # The index of a tar has no encodings, since all of its values are plain bytes.
    encodings = header.get("encodings") or [""] * len(extensions)
    if not any(encodings):
        return [None] * len(extensions)
    format_ = _format_of(header)
    if format_ is None:
        raise UnsupportedShardError(
            f"the format {header.get('content')!r} of this shard is unknown to this release",
            url=url,
            remedy="update shardcache in the training process, too",
        )
    if len(encodings) != len(extensions):
        raise CorruptShardError(
            f"the index has {len(encodings)} encodings of {len(extensions)} columns", url=url
        )
    return column_decoders(format_, extensions, encodings, view, url)


def rows_decoder_of(
    header: Mapping[str, Any],
    extensions: Sequence[str],
    view: View,
) -> RowsDecoder | None:
    """Return the decoder of whole samples of a shard that is cached whole.

    For the arguments, see `decoders_of`. Returns None if the format cannot decode whole samples, or
    if the format's samples are not those of `view`, which may omit columns, rename them, or have
    other decoders.
    """
    format_ = _format_of(header)
    if format_ is None or view.prefix:
        return None
    # A column with a reserved name, such as `__key__`, never becomes a member of samples.
    for name in set(extensions) - RESERVED:
        if not view.includes(name) or view.takes_bytes(name):
            return None
    return format_.rows_decoder(extensions)


def run_decoders_of(
    header: Mapping[str, Any], decoders: Sequence[Decoder | None]
) -> list[RunDecoder | None]:
    """Return, for each column of a shard that is cached whole, the decoder of many values at once.

    The decoder is None for a column whose values can only be decoded one by one, and for a column
    without a decoder.

    Args:
        header: header of the shard's sidecar.
        decoders: result of `decoders_of`.
    """
    format_ = _format_of(header)
    if format_ is None or not any(decoders):
        return [None] * len(decoders)
    run_decoders: list[RunDecoder | None] = []
    for decode, encoding in zip(decoders, header["encodings"], strict=True):
        if decode is None:
            run_decoders.append(None)
        else:
            run_decoders.append(format_.run_decoder(encoding))
    return run_decoders


def _format_of(header: Mapping[str, Any]) -> Format | None:
    """Return the format of a shard, given its sidecar's header; None for an unknown format."""
    return format_named(header.get("content", TAR.name))


def column_decoders(
    format_: Format,
    extensions: Sequence[str],
    encodings: Sequence[str],
    view: View,
    url: str,
) -> list[Decoder | None]:
    """Return the decoder of each column.

    Args:
        format_: format of the shard.
        extensions: names of the columns.
        encodings: encoding of each column.
        view: chooses the columns that are read, and the columns whose bytes are wanted.
        url: url of the shard, for errors.

    Raises UnsupportedShardError or ConfigError; see `decoders_of`.
    """
    decoders: list[Decoder | None] = []
    for extension, encoding in zip(extensions, encodings, strict=True):
        name = view.prefix + extension
        is_read = view.includes(name)
        is_bytes = not encoding or view.takes_bytes(name, format_.has_image_files(encoding))
        if not is_read or is_bytes:
            decoders.append(None)
            continue
        try:
            decoders.append(format_.decoder(encoding))
        except (UnsupportedShardError, ConfigError) as exn:
            raise _error_of_column(exn, extension, url) from None
    return decoders


def _error_of_column(exn: ShardcacheError, column: str, url: str) -> ShardcacheError:
    """Return the error of a decoder, with the name of the column in its message and its remedy.

    A format does not know the column's name: its remedies have NAME in its place.
    """
    message = f"the column {column!r} cannot be decoded: {exn.message}"
    remedy = exn.remedy.replace("NAME", column)
    return type(exn)(message, url=url, remedy=remedy)


def with_decoders(
    columns: Sequence[SlicedColumn],
    decoders: Sequence[Decoder | None],
    data: Slices,
) -> list[SlicedColumn]:
    """Return the columns with their decoders.

    Args:
        columns: the columns, without decoders. Their values may be sliced from a `Buffer`.
        decoders: the decoder of each column; None to leave the column as it is.
        data: slices of `bytes`, which decoders need, for the columns with a decoder.
    """
    decoded: list[SlicedColumn] = []
    for column, decode in zip(columns, decoders, strict=True):
        if decode is None:
            decoded.append(column)
        else:
            name, _, _ = column
            decoded.append((name, data, decode))
    return decoded
