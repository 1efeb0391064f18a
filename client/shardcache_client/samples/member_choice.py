"""The choice of a sample's members, by extension.

Users give the choice by a dataset's argument `members` and by the keys of its `decode`. An entry
such as "jpg;png" has alternatives: a sample gets the first of these members that it has. An entry
such as "*.jpg" is a pattern. In samples, a member has the name of the first alternative.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardcache.shared.exceptions import ConfigError, SampleError
from shardcache_client.samples.slicing import Sample

_ANY_PREFIX = "*."  # the beginning of a pattern
# Maximum number of extensions in `Members.unread`. Where keys have dots, each sample may have
# extensions of its own.
_MAX_UNREAD = 1000


def common_name(entry: str) -> str:
    """Return the name that an entry's member has: "jpg" for "jpg", "jpg;png" and "*.jpg"."""
    first, _, _ = entry.lower().partition(";")
    return first.removeprefix(_ANY_PREFIX)


class _Alternative(NamedTuple):
    """One of the alternatives of an entry.

    Attributes:
        name: name that the member has in samples.
        rank: number of the alternative in its entry, from 0. A sample gets the member with the
            lowest rank that it has.
    """

    name: str
    rank: int


class Members:
    """A choice of members by extension.

    "jpg;png" chooses the first of these members that a sample has, and names it "jpg". "*.jpg"
    chooses the member with the extension "jpg", or an extension that ends in ".jpg", and names it
    "jpg".

    Attributes:
        names: names that the members have in samples.
        unread: extensions of members that shards have and that are not read, up to a limit; for
            messages of errors.
    """

    def __init__(self, entries: Iterable[str], *, reads_others: bool = False) -> None:
        """Choose members.

        Args:
            entries: extensions or patterns of the members, with alternatives after a ";".
            reads_others: True to read all other members as well.
        """
        self.unread: set[str] = set()
        self.names: tuple[str, ...] = ()
        self._reads_others = reads_others
        self._exact: dict[str, _Alternative] = {}  # by extension
        self._endings: dict[str, _Alternative] = {}  # by the part of a pattern after "*."
        for entry in entries:
            self._add(entry)
        if not self.names:
            raise ConfigError("members is empty", remedy="omit it to get all members")
        # Without alternatives and patterns, each member has the name of its extension: nothing is
        # dropped or renamed.
        self._are_plain: bool = not self._endings and len(self._exact) == len(self.names)

    def _add(self, entry: str) -> None:
        """Add an entry with its alternatives. Raises ConfigError."""
        name = common_name(entry)
        if name in self.names:
            raise ConfigError(f"the member {name!r} is named twice")
        for rank, member in enumerate(entry.lower().split(";")):
            extension = member.removeprefix(_ANY_PREFIX)
            _check_extension(extension, entry)
            is_pattern = extension != member
            alternatives = self._endings if is_pattern else self._exact
            if extension in alternatives:
                raise ConfigError(f"the member {member!r} is named twice")
            alternatives[extension] = _Alternative(name, rank)
        self.names = (*self.names, name)

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read. Upper and lower case are the same.

        An extension that is not read is added to `unread`.
        """
        if self._reads_others or self._alternative(extension) is not None:
            return True
        if len(self.unread) < _MAX_UNREAD:
            self.unread.add(extension)
        return False

    def name_of(self, extension: str) -> str:
        """Return the name that a member with this extension has in samples."""
        alternative = self._alternative(extension)
        # An extension that differs from the name only by capital letters keeps them.
        if alternative is None or alternative.name == extension.lower():
            return extension
        return alternative.name

    def _alternative(self, extension: str) -> _Alternative | None:
        """Return the alternative that an extension fits; None if it fits none."""
        lowered = extension.lower()  # Columns of some formats have capital letters.
        if lowered in self._exact:
            return self._exact[lowered]
        if not self._endings:
            return None
        return self._alternative_by_ending(lowered)

    def _alternative_by_ending(self, extension: str) -> _Alternative | None:
        """Return the alternative with the longest ending that fits; None if no ending fits."""
        # For "a.b.jpg", the endings are "a.b.jpg", "b.jpg" and "jpg", the longest first.
        ending = extension
        while ending:
            if ending in self._endings:
                return self._endings[ending]
            _, _, ending = ending.partition(".")
        return None

    def choose(self, sample: Sample) -> tuple[Sample, Mapping[str, str]]:
        """Return a sample with only one member of each entry, under the entry's name.

        Raises SampleError if one pattern fits two members.

        Args:
            sample: a sample with all members that are read, by extension.

        Returns:
            The sample, whose members keep their order; and for each member that was renamed, its
            extension in the tar, by its name in the sample.
        """
        if self._are_plain:
            return sample, {}
        candidates_by_name: dict[str, list[_Candidate]] = {}
        for extension in sample:
            alternative = self._alternative(extension)
            if alternative is not None:
                candidates = candidates_by_name.setdefault(alternative.name, [])
                candidates.append(_Candidate(alternative.rank, extension))

        # The first candidate for a name takes it; the others are dropped.
        names: dict[str, str] = {}  # by extension in the tar
        dropped: set[str] = set()
        for candidates in candidates_by_name.values():
            dropped.update(each.extension for each in candidates)
            first = _first_candidate(candidates, sample)
            dropped.remove(first)
            names[first] = self.name_of(first)

        chosen: Sample = {}
        for extension, value in sample.items():
            if extension not in dropped:
                chosen[names.get(extension, extension)] = value
        renamed = {name: extension for extension, name in names.items() if name != extension}
        return chosen, renamed


class _Candidate(NamedTuple):
    """A member of a sample that fits one of an entry's alternatives.

    Attributes:
        rank: rank of the alternative; see `_Alternative`.
        extension: extension of the member in the tar.
    """

    rank: int
    extension: str


def _first_candidate(candidates: Sequence[_Candidate], sample: Sample) -> str:
    """Return the extension of the candidate that gets the name.

    Raises SampleError if two candidates have the lowest rank.
    """
    if len(candidates) == 1:
        return candidates[0].extension
    lowest = min(each.rank for each in candidates)
    first, *others = (each.extension for each in candidates if each.rank == lowest)
    if others:
        raise SampleError(
            f"the sample {sample.get('__key__')!r} has the members {first!r} and {others[0]!r}, "
            "which one pattern fits",
            url=sample.get("__url__"),
            remedy=f'name the one to read: members=("{first}",)',
        )
    return first


def _check_extension(extension: str, entry: str) -> None:
    """Raise ConfigError for an extension that no member can have. Messages quote the entry."""
    if not extension or extension.startswith((".", "__")):
        raise ConfigError(
            f"{entry!r} names no member",
            remedy='write extensions without a dot, as "jpg"',
        )
    if "*" in extension:
        raise ConfigError(
            f"{entry!r} is not a pattern for members",
            remedy='write "*.jpg" for the members whose names end in ".jpg"',
        )
