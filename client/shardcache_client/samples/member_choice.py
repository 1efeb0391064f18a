"""The choice of a sample's members, by extension.

Users give the choice by a dataset's argument `members` and by the keys of its `decode`. An entry
such as "jpg;png" has alternatives: a sample gets the first of these members that it has. An entry
such as "*.jpg" is a pattern. In samples, a member has the name of the first alternative.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardcache.errors import ConfigError, SampleError
from shardcache_client.samples.slicing import Sample

_ANY = "*."
# Maximum number of extensions in `Members.unread`. Where keys have dots, each sample may have
# extensions of its own.
_MAX_UNREAD = 1000


def common_name(alternatives: str) -> str:
    """Return the name of all alternatives in samples: "jpg" for "jpg", "jpg;png" and "*.jpg"."""
    first, _, _ = alternatives.lower().partition(";")
    return first.removeprefix(_ANY)


class _Choice(NamedTuple):
    """One of the alternatives for a member.

    Attributes:
        name: name that the member has in samples.
        rank: number of the alternative among the alternatives for the name, from 0. A sample gets
            the member with the lowest rank that it has.
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
            errors.
    """

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        """Choose members.

        Args:
            names: extensions or patterns of the members, with alternatives after a ";".
            others: True to read all other members as well.
        """
        self.unread: set[str] = set()
        self.names: tuple[str, ...] = ()
        self._others = others
        self._exact: dict[str, _Choice] = {}
        self._endings: dict[str, _Choice] = {}  # by the part of the pattern after "*."
        for alternatives in names:
            self._add(alternatives)
        if not self.names:
            raise ConfigError("members is empty", remedy="omit it to get all members")
        # Without alternatives and patterns, each member has the name of its extension, and samples
        # need no renaming.
        self._are_plain: bool = not self._endings and len(self._exact) == len(self.names)

    def _add(self, alternatives: str) -> None:
        """Add a name with its alternatives. Raises ConfigError."""
        name = common_name(alternatives)
        if name in self.names:
            raise ConfigError(f"the member {name!r} is named twice")
        for rank, alternative in enumerate(alternatives.lower().split(";")):
            extension = alternative.removeprefix(_ANY)
            _check_extension(extension, alternatives)
            choices = self._exact if extension == alternative else self._endings
            if extension in choices:
                raise ConfigError(f"the member {alternative!r} is named twice")
            choices[extension] = _Choice(name, rank)
        self.names = (*self.names, name)

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read. Upper and lower case are the same.

        An extension that is not read is added to `unread`.
        """
        reads = self._others or self._choice(extension) is not None
        if not reads and len(self.unread) < _MAX_UNREAD:
            self.unread.add(extension)
        return reads

    def name_of(self, extension: str) -> str:
        """Return the name that a member with this extension has in samples."""
        # A member whose name differs only by capital letters keeps them.
        choice = self._choice(extension)
        if choice is None or choice.name == extension.lower():
            return extension
        return choice.name

    def _choice(self, extension: str) -> _Choice | None:
        """Return the choice that an extension fits; None if it fits none."""
        lowered = extension.lower()  # Columns of some formats have capital letters.
        return self._exact.get(lowered) or self._by_ending(lowered)

    def _by_ending(self, extension: str) -> _Choice | None:
        """Return the choice of the longest ending that fits."""
        # For "a.b.jpg", the endings are "a.b.jpg", "b.jpg" and "jpg", the longest first.
        ending = extension if self._endings else ""
        while ending:
            if ending in self._endings:
                return self._endings[ending]
            _, _, ending = ending.partition(".")
        return None

    def choose(self, sample: Sample) -> tuple[Sample, Mapping[str, str]]:
        """Return a sample with only the first of its alternatives, under their common name.

        Members keep the tar's order. The second result has the members that were renamed: their
        extensions in the tar, by their names in the sample. Raises SampleError if one pattern fits
        two members.
        """
        if self._are_plain:
            return sample, {}
        by_name: dict[str, list[_Candidate]] = {}
        for extension in sample:
            choice = self._choice(extension)
            if choice is not None:
                candidates = by_name.setdefault(choice.name, [])
                candidates.append(_Candidate(choice.rank, extension))

        # The first candidate for a name takes it; the others are dropped.
        names: dict[str, str] = {}  # by extension in the tar
        dropped: set[str] = set()
        for candidates in by_name.values():
            first = _first(candidates, sample)
            names[first] = self.name_of(first)
            dropped |= {each.extension for each in candidates if each.extension != first}

        chosen: Sample = {}
        for extension, value in sample.items():
            if extension not in dropped:
                chosen[names.get(extension, extension)] = value
        renamed = {name: extension for extension, name in names.items() if name != extension}
        return chosen, renamed


class _Candidate(NamedTuple):
    """A member of a sample that is one of the alternatives for a name.

    Attributes:
        rank: rank of the alternative; see `_Choice`.
        extension: extension of the member in the tar.
    """

    rank: int
    extension: str


def _first(candidates: Sequence[_Candidate], sample: Sample) -> str:
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


def _check_extension(extension: str, alternatives: str) -> None:
    """Raise ConfigError for an extension that no member can have."""
    if not extension or extension.startswith((".", "__")):
        raise ConfigError(
            f"{alternatives!r} names no member",
            remedy='write extensions without a dot, as "jpg"',
        )
    if "*" in extension:
        raise ConfigError(
            f"{alternatives!r} is not a pattern for members",
            remedy='write "*.jpg" for the members whose names end in ".jpg"',
        )
