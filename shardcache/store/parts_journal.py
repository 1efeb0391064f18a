"""Journal of a download: the parts of an object that are finished, with their checksums.

A journal begins with a line of JSON, its title, which identifies the object. A record of eight
bytes follows for each finished part: the part's number and its CRC32C. The transport worker that
has written a part appends its record. If the part is removed from the file again, another record
marks it as dropped.

A whole shard that is arriving and the parts of an object that is read by ranges have the same kind
of journal, with the same promise: after a restart, a part that the journal lists is used only if
its bytes have the checksum in the record. Neither is synced to the disk part by part. After kill -9
nothing is lost, as the kernel has what was written. After a power loss, records or bytes of the
last seconds, which the kernel had not written back yet, may be missing: these parts fail the
comparison, or are not listed, and are fetched again. A sync would save only this, and the
comparison would still be needed. A part of 256 KiB takes 0.1 ms to write; its sync would take 2 to
8 ms (measured on ext4), and its request some 30 ms. What is published is synced, once
(`Store.publish`), since its bytes are not compared again.

All functions block, and raise OSError.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from shardcache.origin.objects import RemoteObject
from shardcache.store.disk.file_operations import fsync_path
from shardcache.store.keys import stored_url
from shardcache.transport.between.parts import RECORD

# If this bit of a part's number in a record is set, the part is dropped. The record's checksum has
# no meaning then.
_DROPPED = 1 << 31
_MAX_TITLE_BYTES = 256 * 1024
# A journal is shortened once it is longer than this, and also has more than this number of records
# for each part in the file.
_SHORT_JOURNAL_BYTES = 4096
_MAX_RECORDS_PER_PART = 4
_SHORTENED = ".shortened"  # suffix of the temporary file that replaces a journal


@dataclass(frozen=True, slots=True)
class JournalTitle:
    """First line of a journal.

    Attributes:
        url: the object's url, without secrets.
        version: the object's version.
        size_bytes: size of the object.
        part_bytes: size of each part except the last.
    """

    url: str
    version: str
    size_bytes: int
    part_bytes: int

    @classmethod
    def of(cls, obj: RemoteObject, part_bytes: int) -> Self:
        """Return the title of a journal for an object that is fetched in parts of a size."""
        return cls(stored_url(obj.url), obj.version, obj.size_bytes, part_bytes)

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """Return the title in a line; None if the line is damaged."""
        try:
            title = cls(**json.loads(line))
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return None
        except TypeError:  # not an object, or one with other fields
            return None
        are_texts = type(title.url) is str and type(title.version) is str
        are_sizes = type(title.size_bytes) is int and type(title.part_bytes) is int
        if not (are_texts and are_sizes) or title.part_bytes <= 0:
            return None
        return title

    def to_line(self) -> bytes:
        """Return the line, a JSON object."""
        return json.dumps(asdict(self)).encode() + b"\n"


def create_journal(path: Path, title: JournalTitle) -> None:
    """Write a journal without finished parts."""
    path.write_bytes(title.to_line())


def read_title(path: Path) -> JournalTitle | None:
    """Return the title of a journal; None if it is damaged."""
    with path.open("rb") as file:
        return JournalTitle.parse(file.readline(_MAX_TITLE_BYTES))


def resume_journal(path: Path, part_count: int) -> dict[int, int]:
    """Return the CRC32C of each finished part, by number; make the journal ready for more records.

    Args:
        part_count: number of parts that the object has.
    """
    line, records = _read(path)
    # The last record is incomplete if the daemon was killed while it was written. Records that are
    # appended after it would be misread.
    os.truncate(path, len(line) + _whole_records_bytes(records))
    return _finished_crcs(records, part_count)


def append_dropped(path: Path, part: int) -> None:
    """Record that a finished part is no longer in the file."""
    with path.open("r+b", buffering=0) as journal:
        journal.seek(0, os.SEEK_END)
        journal.write(RECORD.pack(part | _DROPPED, 0))


def shorten_if_outdated(path: Path, part_count: int, kept_count: int) -> None:
    """Replace a journal by one without outdated records, if most of its records are outdated.

    A part that is fetched and dropped again and again would otherwise add two records each time.

    Args:
        part_count: number of parts that the object has.
        kept_count: number of parts that are in the file.
    """
    records_bytes = _MAX_RECORDS_PER_PART * kept_count * RECORD.size
    if path.stat().st_size <= _SHORT_JOURNAL_BYTES + records_bytes:
        return
    # A record that a transport worker appends during the replacement is lost. Its part counts as
    # finished until the journal is read again, at a restart or when the whole object is fetched;
    # then it is fetched again.
    line, records = _read(path)
    crcs = _finished_crcs(records, part_count)
    current_records = [RECORD.pack(part, crc) for part, crc in crcs.items()]
    shortened = path.with_suffix(_SHORTENED)
    shortened.write_bytes(line + b"".join(current_records))
    fsync_path(shortened)
    shortened.replace(path)


def _read(path: Path) -> tuple[bytes, bytes]:
    """Return the first line of a journal, with its line break, and the records after it."""
    line, line_break, records = path.read_bytes().partition(b"\n")
    return line + line_break, records


def _whole_records_bytes(records: bytes) -> int:
    """Return the size of some records without an incomplete one at their end."""
    return len(records) - len(records) % RECORD.size


def _finished_crcs(records: bytes, part_count: int) -> dict[int, int]:
    """Return the CRC32C of each part that is finished after all records, by number."""
    crcs: dict[int, int] = {}
    for part, crc in RECORD.iter_unpack(records[: _whole_records_bytes(records)]):
        if part & _DROPPED:
            crcs.pop(part ^ _DROPPED, None)
        elif part < part_count:
            crcs[part] = crc
    return crcs
