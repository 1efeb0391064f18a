"""`JoinedReader`: tar shards whose samples have members in other shards, too, joined by key."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from copy import copy
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any, Self

from shardcache.errors import AccessDeniedError, ConfigError, NotAllowedError, NotFoundError
from shardcache.tarindex.contents import IndexEntry
from shardcache.url_names import is_index
from shardcache_client import arguments
from shardcache_client.arguments import T_co
from shardcache_client.decoders import Spec
from shardcache_client.decoding import Missing, Pipeline
from shardcache_client.files import Sample
from shardcache_client.indexed import rows_by_shard, select
from shardcache_client.order.manifest import Column
from shardcache_client.reader import ARGUMENTS, ShardReader, shared_options

_WORDS = arguments.OTHER_WORDS | dict.fromkeys(ARGUMENTS, "give it to the first source: ShardDataset(urls, {}=...)")
_NO_TABLE = (ConfigError, AccessDeniedError, NotAllowedError)  # S3 denies what is missing to those who may not list
_ALIKE = "zero_copy", "socket, daemon, fallback, timeout_s or partial_reads"


def _sources(value: Any) -> dict[str, ShardReader[Any]]:
    named = value.items() if isinstance(value, Mapping) and "" not in [*value][1:] else ()
    if not named or not all(isinstance(each, ShardReader) and isinstance(name, str) for name, each in named):
        raise TypeError
    return dict(value)


class JoinedReader(ShardReader[T_co]):
    """An iterable over the samples of tar shards, joined with those of the same keys in other shards.

    For training without torch; `Joined` adds what torch has, as `ShardDataset` does to `ShardReader`. Samples, order,
    epochs and states are those of `Joined`, which describes the arguments.
    """

    @arguments.checked(
        _WORDS,
        sources=arguments.Accepts('datasets by prefix, {"": ShardDataset(...), "cap": ShardDataset(...)}', _sources),
        **{name: ARGUMENTS[name] for name in ("decode", "members", "missing")},
    )
    def __init__(
        self,
        sources: Mapping[str, ShardReader[Any]],
        *,
        decode: Callable[[Sample], T_co] | Mapping[str, Spec] | str | None = None,
        members: Iterable[str] | None = None,
        missing: Missing = "error",
    ) -> None:
        (name, first), *others = sources.items()
        for each, reader in sources.items():
            _check(each, reader, first)
        pipeline = Pipeline.of(decode, members, missing)
        columns = [
            _column(prefix, first, reader, pipeline)
            for prefix, reader in ((f"{each}.", reader) for each, reader in others)
            if members is None or any(each.startswith(prefix) for each in ";".join(members).split(";"))
        ]
        manifest, sessions = replace(first.manifest, columns=tuple(columns)), copy(first._settings.sessions)
        pipeline = replace(pipeline, prefix=name and f"{name}.", url_of=manifest.url_of)
        self._others = dict(others)
        settings = replace(first._settings, manifest=manifest, sessions=sessions, pipeline=pipeline)
        self._urls = first._urls
        self._group = self._ranks_of(first._group.given, first._urls, sessions.timeout_s)
        self._group.settled = first._group.settled
        self._assemble(settings, first._dealing, first.seed, first._on_error, first._job)
        self._bookmark.follow(first._bookmark)

    @arguments.checked(predicate=arguments.FUNCTION)
    def select(self, predicate: Callable[[IndexEntry], object]) -> Self:
        """See `ShardReader.select`; entries have the sizes of all sources' members, which need tables."""
        partners = {f"{name}.": _sizes(self, reader) for name, reader in self._others.items()}

        def chosen(entry: IndexEntry) -> object:
            sizes = {self._settings.pipeline.prefix + name: size_bytes for name, size_bytes in entry.sizes.items()}
            for prefix, sizes_of in partners.items():
                sizes |= {prefix + name: size_bytes for name, size_bytes in sizes_of(entry).items()}
            return predicate(replace(entry, sizes=sizes))

        return super().select(chosen)


def _sizes(first: ShardReader[Any], other: ShardReader[Any]) -> Callable[[IndexEntry], Mapping[str, int]]:
    """Return a function from a sample to the sizes of its partner's members; {} if it has none."""
    column = _column("", first, other, Pipeline())
    numbers = {url: number for number, url in enumerate(first.manifest.shards.urls)}
    others = [*other.manifest.shards.urls]
    found: dict[tuple[str, str], Mapping[str, int]] = {}

    def note(entry: IndexEntry) -> None:
        place = (entry.url, entry.key)
        found[place] = {} if place in found else entry.sizes

    select(other.manifest, other._rows_of_tables(), note)

    def sizes_of(entry: IndexEntry) -> Mapping[str, int]:
        shard = numbers[entry.url]
        if entry.key.encode("utf-8", "surrogateescape") in column.repeated_in(shard):
            return {}
        places = [(others[number], entry.key) for number in column.beside(shard)]
        some = [found[place] for place in places if place in found]
        return some[0] if len(some) == 1 else {}

    return sizes_of


def _check(name: str, reader: ShardReader[Any], first: ShardReader[Any]) -> None:
    """Raise ConfigError if a source cannot be joined with the first, or has options that would be ignored."""
    if name != name.lower() or ";" in name or name.startswith((".", "__")):
        raise ConfigError(f"{name!r} cannot be a prefix of members", remedy='name the source as an extension, "cap"')
    for option in _ALIKE:
        if shared_options(reader)[option] != shared_options(first)[option]:
            reason = f"source {name!r} and the first differ in {option}"
            raise ConfigError(reason, remedy="give the same to all sources")
    if reader._settings.pipeline != Pipeline() or reader.manifest.columns:
        raise ConfigError(
            f"source {name!r} has decode, members, missing, tokens, map or filter, or consists of sources itself",
            remedy='write Joined(sources, decode={"cap.txt": "text"}, ...).map(function), which is for all members',
        )
    if reader._settings.stage is not None:
        raise ConfigError(f"source {name!r} yields groups of samples", remedy="join samples, and pack those of Joined")
    if reader is not first and reader.manifest.choices is not None:
        raise ConfigError(f"source {name!r} is a selection", remedy="select among the samples of Joined")


def _column(prefix: str, first: ShardReader[Any], other: ShardReader[Any], pipeline: Pipeline) -> Column:
    """Return another source's shards as they are read beside the first's: by the keys in the tables of both.

    Without tables, the nth shards are paired if there are as many, as long as a sample without a partner raises there.
    Raises ConfigError if the tables are needed and missing, or are those of other shards.
    """
    try:
        return _by_tables(prefix, first, other)
    except _NO_TABLE as exn:
        own, others = len(first.manifest), len(other.manifest)
        is_missing = not isinstance(exn, ConfigError) or isinstance(exn.__cause__, NotFoundError)
        is_missing = is_missing or not all(map(is_index, (*first._urls, *other._urls)))
        is_silent = pipeline.view(0, prefix).unmatched != "error"
        if is_missing and own == others and not is_silent:
            return Column(prefix, other.manifest)
        reason = f"{own} shards are joined with {others} by the tables of their keys"
        if is_missing and own == others:
            reason = f"missing={pipeline.missing!r} needs the tables of keys, as partners may be in any shard"
        raise ConfigError(
            f"{reason}: {exn.message}",
            url=exn.url,
            remedy="write them next to both index files: shardcache index URL... -o index.json --samples",
        ) from exn


def _by_tables(prefix: str, first: ShardReader[Any], other: ShardReader[Any]) -> Column:
    if len(first.manifest) == len(other.manifest) and _are_paired(first, other):
        return Column(prefix, other.manifest)
    alone = {url: (number,) for number, url in enumerate(other.manifest.shards.urls)}
    shards_of: dict[str, tuple[int, ...]] = {}  # of the other source, with samples of a key

    def note_other(entry: IndexEntry) -> None:
        shard = alone[entry.url]
        earlier = shards_of.get(entry.key)
        shards_of[entry.key] = shard if earlier is None else earlier + shard

    urls = first.manifest.shards.urls
    beside: dict[str, set[int]] = {url: set() for url in urls}
    repeated: dict[str, set[bytes]] = {url: set() for url in urls}
    url_of: dict[str, str] = {}  # of the first source's first shard with a key that has a partner

    def note_own(entry: IndexEntry) -> None:
        shards = shards_of.get(entry.key)
        if shards is None:
            return
        beside[entry.url].update(shards)
        earlier = url_of.setdefault(entry.key, entry.url)
        if earlier != entry.url:
            key = entry.key.encode("utf-8", "surrogateescape")
            repeated[earlier].add(key)
            repeated[entry.url].add(key)

    select(other.manifest, other._rows_of_tables(), note_other)
    select(first.manifest, first._rows_of_tables(), note_own)
    pairs = tuple(tuple(sorted(beside[url])) for url in urls)
    return Column(prefix, other.manifest, pairs, repeated=tuple(frozenset(repeated[url]) for url in urls))


def _are_paired(first: ShardReader[Any], other: ShardReader[Any]) -> bool:
    """Return True if the nth shards of both have the same keys in the same order, and no key comes twice.

    That is the usual case, and takes a fraction of the time and memory of a table of all keys.
    """
    if first.manifest.counts != other.manifest.counts:
        return False
    hashes = array("q")
    with (
        closing(rows_by_shard(first.manifest, first._rows_of_tables())) as own,
        closing(rows_by_shard(other.manifest, other._rows_of_tables())) as others,
    ):
        for theirs, mine in zip_longest(others, own):
            if mine is None or theirs is None:
                return False
            shard, row, _ = mine
            other_shard, other_row, _ = theirs
            if shard != other_shard or row["keys"] != other_row["keys"]:
                return False
            hashes.extend(map(hash, row["keys"]))
    ordered = sorted(hashes)
    return all(one != another for one, another in pairwise(ordered))
