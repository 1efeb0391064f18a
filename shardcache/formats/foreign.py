"""Files that are named as tars but have another format: the format's name, and a remedy for each.

`tar` asks `explained` when a file turns out not to be a tar.
"""

from typing import NamedTuple

from shardcache.errors import NotATarError
from shardcache.tarindex.members import Read

_BEGIN_BYTES = 64
_WRITER = "write its samples as tars by `shardcache_client`'s ShardWriter"


class _Foreign(NamedTuple):
    """A format that is recognised by its first bytes.

    Attributes:
        what: the format's name in messages.
        magic: the bytes by which the format is recognised.
        remedy: the remedy for a file of this format.
        at: offset of the magic in the file.
    """

    what: str
    magic: bytes
    remedy: str
    at: int = 0


def _rename_to(suffix: str) -> str:
    """Return the remedy for a shard whose name does not state its format."""
    return f"if it is one, rename it to end in {suffix}: then it is read as it is"


_FOREIGN = (
    _Foreign("a zip", b"PK\3\4", _rename_to(".zip")),
    _Foreign("a parquet file", b"PAR1", _rename_to(".parquet")),
    _Foreign(
        "an Arrow file",
        b"ARROW1",
        "write its rows as parquet, which is read as it is; if `save_to_disk` of Hugging Face's "
        "datasets wrote it: `shardcache write FOLDER`",
    ),
    _Foreign("an HDF5 file", b"\x89HDF\r\n\x1a\n", _WRITER),
    _Foreign("a SQLite database", b"SQLite format 3\0", _WRITER),
    _Foreign("an LMDB database", b"\xde\xc0\xef\xbe", _WRITER, at=16),
    _Foreign("a RecordIO file of MXNet", b"\x0a\x23\xd7\xce", _WRITER),
    _Foreign("a NumPy file", b"\x93NUMPY", _WRITER),
    _Foreign("a web page", b"<!DOCTYPE", "check the url: it leads to a page, not to the file"),
    _Foreign("a web page", b"<html", "check the url: it leads to a page, not to the file"),
    _Foreign("a pointer of Git LFS", b"version https://git-lfs", "upload the file itself"),
)


def explained(exn: NotATarError, read: Read) -> NotATarError:
    """Return the error for a file that is not a tar; it names the file's format if that is known.

    Args:
        exn: the error, returned as it is for an unknown format.
        read: reads bytes of the file.
    """
    # Reading waits for no bytes (a minimum of 0), since the file may be still arriving.
    begin = read(0, 0, _BEGIN_BYTES)
    for foreign in _FOREIGN:
        if begin.startswith(foreign.magic, foreign.at):
            return NotATarError(f"not a tar but {foreign.what}", url=exn.url, remedy=foreign.remedy)
    return exn
