"""The members that a dataset reads of each sample. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from shardcache.errors import ConfigError


class Members:
    """A choice of members by extension, in which "jpg;png" means either, under the first name.

    Args:
        names: extensions without a dot.
        others: True to read other members, too.

    Attributes:
        names: the names that samples get, in order.
    """

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        self._others = others
        self._names: dict[str, str] = {}  # from each extension to the first of its alternatives
        for alternatives in names:
            first, *rest = alternatives.lower().split(";")
            for extension in (first, *rest):
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

    def name_of(self, extension: str) -> str | None:
        """Return the name under which a sample gets the member with this extension; None to leave it out."""
        return self._names.get(extension, extension if self._others else None)
