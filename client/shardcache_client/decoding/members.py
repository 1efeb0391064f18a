"""The members that a dataset reads of each sample. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shardcache.errors import ConfigError
from shardcache_client.files.slicing import Sample


class Members:
    """A choice of members by extension; of "jpg;png", the first that a sample has, under the name of the first.

    Args:
        names: extensions without a dot.
        others: True to read other members, too.

    Attributes:
        names: the names that samples get, in order.
        unread: extensions seen in shards, of which no members are read.
    """

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        self.unread: set[str] = set()
        self._others = others
        self._names: dict[str, str] = {}  # from each extension to the first of its alternatives
        self._alternatives: list[list[str]] = []
        for alternatives in names:
            first, *rest = group = alternatives.lower().split(";")
            self._alternatives += [group] if rest else []
            for extension in group:
                if not extension or extension.startswith((".", "__")):
                    raise ConfigError(f"{alternatives!r} names no member", remedy='write extensions as "jpg", no dot')
                if extension in self._names:
                    raise ConfigError(f"the member {extension!r} is named twice")
                self._names[extension] = first
        if not self._names:
            raise ConfigError("members is empty", remedy="omit it to get all members")
        self.names = tuple(dict.fromkeys(self._names.values()))

    def __repr__(self) -> str:
        return f"Members({self._names!r})"

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read."""
        if reads := self._others or extension in self._names:
            return reads
        self.unread.add(extension)
        return False

    def choose(self, sample: Sample) -> Sample:
        """Return a sample with the first of its alternatives only, under their common name, in the tar's order."""
        if not self._alternatives:
            return sample
        lost: set[str] = set()
        for group in self._alternatives:
            lost.update([extension for extension in group if extension in sample][1:])
        return {self._names.get(name, name): value for name, value in sample.items() if name not in lost}
