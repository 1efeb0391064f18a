"""From a sample's bytes to what the dataset yields: its choice of members, its decoders and functions, in order."""

from asyncio import CancelledError
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from shardcache.errors import ConfigError, DecodeError, MissingMemberError
from shardcache_client.decoders import Decoder, DecoderOf, Spec, by_extension, by_table
from shardcache_client.files import Sample, TokenBlocks, View

Decode = Callable[[Sample], Any] | Mapping[str, Spec] | str
Missing = Literal["error", "skip"] | Mapping[str, Any]


class Members:
    """A choice of members by extension; of "jpg;png", the first that a sample has, under the name of the first."""

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        self.unread: set[str] = set()  # extensions seen in shards, of which no members are read
        self._others = others  # True to read other members, too
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

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read."""
        reads = self._others or extension in self._names
        if not reads:
            self.unread.add(extension)
        return reads

    def choose(self, sample: Sample) -> tuple[Sample, Mapping[str, str]]:
        """Return a sample with the first of its alternatives only, under their common name, in the tar's order.

        With it, the extension in the tar of each member that has got another name.
        """
        if not self._alternatives:
            return sample, {}
        lost: set[str] = set()
        for group in self._alternatives:
            lost.update([extension for extension in group if extension in sample][1:])
        names = {extension: self._names.get(extension, extension) for extension in sample if extension not in lost}
        chosen = {name: sample[extension] for extension, name in names.items()}
        return chosen, {name: extension for extension, name in names.items() if name != extension}


ENDS = (StopIteration, GeneratorExit, CancelledError)
"""Exceptions that would silently end whatever runs a user's function: the epoch, or a DataLoader's worker."""


class Dropped(Enum):
    """Results of a pipeline that are not yielded."""

    FILTERED = "filter() rejected the sample"
    INCOMPLETE = "a member is missing, and missing='skip'"


@dataclass(frozen=True)
class Pipeline:
    """From a sample's bytes to what the dataset yields. Can be pickled if its functions can."""

    required: tuple[str, ...] = ()  # members that each sample must have
    missing: Missing = "error"  # for those that one lacks: raise, skip the sample, or take the value from this mapping
    decoder_of: DecoderOf | None = None  # None to leave all members as they are
    decode: Callable[[Sample], Any] | None = None
    stages: tuple[tuple[bool, Callable[[Any], Any]], ...] = ()  # further functions; True for a filter
    members: Members | None = None  # the members to read; None for all
    blocks: TokenBlocks | None = None  # the blocks of tokens that are samples; None for the samples of the tars
    prefix: str = ""  # of the extensions of members, but for those that are joined
    url_of: Callable[[str, str], str] | None = field(default=None, compare=False)  # see `Manifest.url_of`

    @classmethod
    def of(
        cls, decode: Decode | None, members: Iterable[str] | None, missing: Missing, blocks: TokenBlocks | None = None
    ) -> "Pipeline":
        """Build from the arguments of a dataset. Raises ConfigError if they are invalid."""
        is_named = isinstance(decode, str | Mapping)
        if blocks is not None and (is_named or members is not None or missing != "error"):
            remedy = "omit members and missing; pass a function as decode"
            raise ConfigError("blocks of tokens have no members to choose or decode by name", remedy=remedy)
        chosen = None if members is None else Members([members] if isinstance(members, str) else members)
        required = () if chosen is None else chosen.names
        decoder_of: DecoderOf | None = None
        if isinstance(decode, str):
            decoder_of = by_extension(decode)
        elif isinstance(decode, Mapping):
            named = Members(decode, others=True)
            decoder_of = by_table(decode)
            if chosen is not None and (left_out := set(named.names) - set(required)):
                raise ConfigError(f"decode names the member {min(left_out)!r}, which members leaves out")
            required = required or named.names
            chosen = chosen or named
        if isinstance(missing, Mapping) and (unknown := set(missing) - set(required)):
            raise ConfigError(
                f"missing has a value for {min(unknown)!r}, which neither members nor decode names",
                remedy="name it in members, too",
            )
        function = None if isinstance(decode, str | Mapping) else decode
        return cls(required, missing, decoder_of, function, members=chosen, blocks=blocks)

    def __bool__(self) -> bool:
        """Return True if samples have to go through this pipeline."""
        return bool(self.required or self.decoder_of or self.decode or self.stages)

    @property
    def filters(self) -> bool:
        """True if samples may be filtered out."""
        return any(is_filter for is_filter, _ in self.stages)

    @property
    def leaves_out(self) -> bool:
        """True if samples may be left out without an error: filtered out, or skipped for want of a member."""
        return self.filters or self.missing == "skip"

    @property
    def named_sources(self) -> tuple[Sequence[str], Sequence[int]]:
        """The names of a mixture's sources, and the number in the manifest of each one's first shard."""
        return (), ()

    def view(self, shard: int, column: str | None = None) -> View:
        """Return the form in which samples of a shard, or of those beside it in a column, are read."""
        prefix, missing = self.prefix if column is None else column, self.missing
        filled = not isinstance(missing, str) and any(name.startswith(prefix) for name in missing)
        unmatched = missing if isinstance(missing, str) else "fill" if filled else "error"
        return View(None if self.members is None else self.members.reads, self.blocks, prefix, unmatched)

    def then(self, function: Callable[[Any], Any], *, is_filter: bool = False) -> "Pipeline":
        """Return this pipeline with one more stage."""
        return replace(self, stages=(*self.stages, (is_filter, function)))

    def __call__(self, sample: Sample) -> Any:
        """Return what becomes of a sample, or a `Dropped`. Raises MissingMemberError, DecodeError."""
        extensions: Mapping[str, str] = {}
        if self.members is not None:
            sample, extensions = self.members.choose(sample)
        absent = [name for name in self.required if name not in sample]
        if absent and self.missing == "skip":
            return Dropped.INCOMPLETE
        defaults = self.missing if isinstance(self.missing, Mapping) else {}
        for name in absent:
            if name not in defaults:
                raise MissingMemberError.of(name, sample, self.members.unread if self.members else ())
        if self.decoder_of is not None:
            for name in sample:
                if name.startswith("__"):
                    continue
                decoder = self.decoder_of(name, extensions.get(name, name))
                if decoder is not None:
                    self._decode(sample, name, decoder)
        if absent:
            sample |= {name: deepcopy(defaults[name]) for name in absent}
        return self._staged(sample, sample.get("__key__"), sample.get("__url__"))

    def _decode(self, sample: Sample, extension: str, decoder: Decoder) -> None:
        try:
            sample[extension] = decoder(sample[extension])
        except (Exception, *ENDS) as exn:
            what = f"member {extension!r} of the sample {sample.get('__key__')!r}"
            url = self.url_of(sample["__url__"], extension) if self.url_of else sample.get("__url__")
            raise _undecodable(what, f"{type(exn).__name__}: {exn}", url, "member or its decoder") from exn

    def _staged(self, item: Any, key: object, url: str | None) -> Any:
        """Return what decode and the stages make of the sample with this key."""
        try:
            if self.decode is not None:
                item = self.decode(item)
            for is_filter, function in self.stages:
                if not is_filter:
                    item = function(item)
                elif not function(item):
                    return Dropped.FILTERED
        except (Exception, *ENDS) as exn:  # it is the user's code, and may raise anything
            fault = f"{type(exn).__name__}: {exn}{_line(exn)}{_has(exn, item)}"
            raise _undecodable(f"sample {key!r}", fault, url, "sample or the function") from exn
        return item


@dataclass(frozen=True)
class PipelineBySource(Pipeline):
    """The pipelines of several sources; a sample's `__source__` chooses its own. Otherwise has only stages."""

    sources: Mapping[str, Pipeline] = field(default_factory=dict)  # by name, in the order of the manifest
    firsts: tuple[int, ...] = ()  # number in the manifest of each source's first shard

    def __bool__(self) -> bool:
        """Return True if samples have to go through these pipelines."""
        return bool(self.stages) or any(self.sources.values())

    @property
    def filters(self) -> bool:
        """True if samples may be filtered out."""
        return super().filters or any(source.filters for source in self.sources.values())

    @property
    def leaves_out(self) -> bool:
        """True if samples of any source may be left out without an error."""
        return super().leaves_out or any(source.leaves_out for source in self.sources.values())

    @property
    def named_sources(self) -> tuple[Sequence[str], Sequence[int]]:
        """The names of the sources, and the number in the manifest of each one's first shard."""
        return tuple(self.sources), self.firsts

    def view(self, shard: int, column: str | None = None) -> View:
        """Return the form in which samples of a shard are read; see `Pipeline`."""
        return [*self.sources.values()][bisect_right(self.firsts, shard) - 1].view(shard, column)

    def __call__(self, sample: Sample) -> Any:
        """Return what becomes of a sample, or a `Dropped`. Raises what the pipelines raise."""
        key, url = sample.get("__key__"), sample.get("__url__")
        item = self.sources[sample["__source__"]](sample)
        return item if item.__class__ is Dropped else self._staged(item, key, url)


def _undecodable(what: str, fault: str, url: str | None, culprit: str) -> DecodeError:
    return DecodeError(f"the {what} could not be decoded ({fault})", url=url, remedy=f"fix the {culprit}")


def _has(exn: BaseException, item: object) -> str:
    """Return the members of a sample of which the user's function wanted another."""
    if not isinstance(exn, KeyError) or not isinstance(item, dict) or "__key__" not in item:
        return ""
    return f"; it has: {', '.join(name for name in item if not name.startswith('__'))}"


def _line(exn: BaseException) -> str:
    """Return the line of the user's function that raised it, as a DataLoader does not show the original traceback."""
    trace = exn.__traceback__ and exn.__traceback__.tb_next
    return f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
