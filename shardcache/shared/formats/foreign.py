"""Errors for files that are named as tars but have another format.

When a file turns out not to be a tar, `tar` calls `explained`, which recognises common formats by
their first bytes. The error then names the format, and says how to read such a file.
"""

from typing import NamedTuple

from shardcache.shared.exceptions import NotATarError
from shardcache.shared.tarindex.members import Read

_BEGIN_BYTES = 64  # number of bytes that are enough to recognise any of the formats
_WRITER_REMEDY = "write its samples as tars by `shardcache.writing.ShardWriter`"
_PAGE_REMEDY = "check the url: it leads to a page, not to the file"


class _ForeignFormat(NamedTuple):
    """A format that is recognised by its first bytes.

    Attributes:
        name: the format's name in messages, with an article.
        magic: the bytes by which the format is recognised.
        remedy: the remedy for a file of this format.
        magic_start: offset of the magic in the file.
    """

    name: str
    magic: bytes
    remedy: str
    magic_start: int = 0


def _rename_to(suffix: str) -> str:
    """Return the remedy for a shard whose name does not state its format."""
    return f"if it is one, rename it to end in {suffix}: then it is read as it is"


_FOREIGN_FORMATS = (
    _ForeignFormat("a zip", b"PK\3\4", _rename_to(".zip")),
    _ForeignFormat("a parquet file", b"PAR1", _rename_to(".parquet")),
    _ForeignFormat(
        "an Arrow file",
        b"ARROW1",
        "write its rows as parquet, which is read as it is; if `save_to_disk` of Hugging Face's "
        "datasets wrote it: `shardcache write FOLDER`",
    ),
    _ForeignFormat("an HDF5 file", b"\x89HDF\r\n\x1a\n", _WRITER_REMEDY),
    _ForeignFormat("a SQLite database", b"SQLite format 3\0", _WRITER_REMEDY),
    _ForeignFormat("an LMDB database", b"\xde\xc0\xef\xbe", _WRITER_REMEDY, magic_start=16),
    _ForeignFormat("a RecordIO file of MXNet", b"\x0a\x23\xd7\xce", _WRITER_REMEDY),
    _ForeignFormat("a NumPy file", b"\x93NUMPY", _WRITER_REMEDY),
    _ForeignFormat("a web page", b"<!DOCTYPE", _PAGE_REMEDY),
    _ForeignFormat("a web page", b"<html", _PAGE_REMEDY),
    _ForeignFormat("a pointer of Git LFS", b"version https://git-lfs", "upload the file itself"),
)


def explained(exn: NotATarError, read: Read) -> NotATarError:
    """Return the error for a file that is not a tar; it names the file's format if that is known.

    Args:
        exn: the error, returned as it is for an unknown format.
        read: reads bytes of the file.
    """
    # A minimum of 0 bytes: the file may still be arriving, and the read must not wait for more.
    begin = read(0, 0, _BEGIN_BYTES)
    for foreign in _FOREIGN_FORMATS:
        if begin.startswith(foreign.magic, foreign.magic_start):
            return NotATarError(f"not a tar but {foreign.name}", url=exn.url, remedy=foreign.remedy)
    return exn
