"""A nameless file that is filled part by part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardcache.direct.scratch import Scratch, ScratchFile
from shardcache.errors import ShardcacheError
from shardcache.store.part_list import PartList
from shardcache.transport.parts import Parts


@dataclass(slots=True)
class ScratchSink(PartList):
    """A `fetch.sink.Sink` without a journal, since nothing of it outlives the process.

    Attributes:
        file: file with space for the whole object.
    """

    scratch: Scratch
    file: ScratchFile

    @property
    def path(self) -> Path:
        """As `Sink.path`."""
        return self.file.path

    def parts(self, first: int, count: int) -> Parts:
        """As `Sink.parts`."""
        return Parts(str(self.file.path_for_others), None, self.part_bytes, *self.span(first, count))

    def disk_error(self, exn: OSError) -> ShardcacheError:
        """As `Sink.disk_error`."""
        return self.scratch.error(exn, self.obj.url)
