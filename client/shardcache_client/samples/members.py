"""The choice of a sample's members, by extension."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardcache.errors import ConfigError, SampleError
from shardcache_client.samples.slicing import Sample

_ANY = "*."
_MAX_UNREAD = 1000  # where keys have dots, each sample may have extensions of its own


def name_of(alternatives: str) -> str:
    """Return the name in samples of "jpg", "jpg;png" or "*.jpg", which is "jpg"."""
    first, _, _ = alternatives.lower().partition(";")
    return first.removeprefix(_ANY)


class _Choice(NamedTuple):
    """One of the forms in which a member was asked for.

    Attributes:
        name: in samples.
        rank: among the alternatives of the name; of those that a sample has, the lowest is taken.
    """

    name: str
    rank: int


class Members:
    """A choice of members by extension.

    Of "jpg;png", the first that a sample has, under the name of the first. Of "*.jpg", the one with
    the extension "jpg", or an extension that ends in ".jpg", as "jpg".

    Attributes:
        names: of the members in samples.
        unread: some extensions seen in shards, of which no members are read.
    """

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        """Choose members.

        Args:
            names: of the members: extensions or patterns, with alternatives after a ";".
            others: True to read other members, too.
        """
        self.unread: set[str] = set()
        self.names: tuple[str, ...] = ()
        self._others = others
        self._exact: dict[str, _Choice] = {}
        self._endings: dict[str, _Choice] = {}  # by what follows "*."
        for alternatives in names:
            self._add(alternatives)
        if not self.names:
            raise ConfigError("members is empty", remedy="omit it to get all members")
        # Without alternatives and patterns, each member has the name of its extension.
        self._are_plain: bool = not self._endings and len(self._exact) == len(self.names)

    def _add(self, alternatives: str) -> None:
        name = name_of(alternatives)
        if name in self.names:
            raise ConfigError(f"the member {name!r} is named twice")
        for rank, alternative in enumerate(alternatives.lower().split(";")):
            extension = alternative.removeprefix(_ANY)
            _check(extension, alternatives)
            known = self._exact if extension == alternative else self._endings
            if extension in known:
                raise ConfigError(f"the member {alternative!r} is named twice")
            known[extension] = _Choice(name, rank)
        self.names = (*self.names, name)

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read, in whatever case it is spelt.

        Others are noted in `unread`.
        """
        reads = self._others or self._choice(extension) is not None
        if not reads and len(self.unread) < _MAX_UNREAD:
            self.unread.add(extension)
        return reads

    def name_of(self, extension: str) -> str:
        """Return the name that a member with this extension has in samples."""
        choice = self._choice(extension)
        if choice is None or choice.name == extension.lower():
            return extension
        return choice.name

    def _choice(self, extension: str) -> _Choice | None:
        """Return what an extension was asked for as; None if it was not."""
        lowered = extension.lower()  # columns of some formats have capital letters
        return self._exact.get(lowered) or self._by_ending(lowered)

    def _by_ending(self, extension: str) -> _Choice | None:
        """Return the choice of the longest ending that fits."""
        ending = extension if self._endings else ""
        while ending:
            if ending in self._endings:
                return self._endings[ending]
            _, _, ending = ending.partition(".")
        return None

    def choose(self, sample: Sample) -> tuple[Sample, Mapping[str, str]]:
        """Return a sample with the first of its alternatives only, under their common name.

        Members keep the tar's order. With it, returns the extension in the tar of each member that
        has got another name. Raises SampleError if one pattern fits two members.
        """
        if self._are_plain:
            return sample, {}
        fitting: dict[str, list[_Fitting]] = {}
        for extension in sample:
            choice = self._choice(extension)
            if choice is not None:
                found = fitting.setdefault(choice.name, [])
                found.append(_Fitting(choice.rank, extension))

        # Of the members that may have a name, the first one takes it, and the others are lost.
        firsts = [_first(found, sample) for found in fitting.values()]
        taken = {extension: self.name_of(extension) for extension in firsts}
        lost = {each.extension for found in fitting.values() for each in found} - taken.keys()
        chosen: Sample = {}
        for extension, value in sample.items():
            if extension not in lost:
                chosen[taken.get(extension, extension)] = value
        renamed = {name: extension for extension, name in taken.items() if name != extension}
        return chosen, renamed


class _Fitting(NamedTuple):
    """A member of a sample that a name may stand for; see `_Choice`."""

    rank: int
    extension: str


def _first(found: Sequence[_Fitting], sample: Sample) -> str:
    """Return which of the extensions of a sample a name stands for."""
    if len(found) == 1:
        return found[0].extension
    lowest = min(each.rank for each in found)
    first, *others = (each.extension for each in found if each.rank == lowest)
    if others:
        raise SampleError(
            f"the sample {sample.get('__key__')!r} has the members {first!r} and {others[0]!r}, "
            "which one pattern fits",
            url=sample.get("__url__"),
            remedy=f'name the one to read: members=("{first}",)',
        )
    return first


def _check(extension: str, alternatives: str) -> None:
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
