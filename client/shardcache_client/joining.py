"""`JoinedReader`: tar shards whose samples have members in other shards, too, joined by key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Self

from shardcache.errors import ConfigError, NotFoundError
from shardcache.tarindex.contents import IndexEntry
from shardcache.url_names import is_index
from shardcache_client import arguments
from shardcache_client.arguments import T_co
from shardcache_client.decoders import Spec
from shardcache_client.decoding import Missing, Pipeline
from shardcache_client.files import Sample
from shardcache_client.indexed import select
from shardcache_client.order.manifest import Column
from shardcache_client.reader import ARGUMENTS, ShardReader, shared_options

_WORDS = arguments.OTHER_WORDS | dict.fromkeys(ARGUMENTS, "give it to the first source: ShardDataset(urls, {}=...)")
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
        columns = [
            Column(prefix, reader.manifest, _pairs(first, reader))
            for prefix, reader in ((f"{each}.", reader) for each, reader in others)
            if members is None or any(each.startswith(prefix) for each in ";".join(members).split(";"))
        ]
        manifest, sessions = replace(first.manifest, columns=tuple(columns)), copy(first._settings.sessions)
        pipeline = Pipeline.of(decode, members, missing)
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
        columns = [(f"{name}.", *_entries(self, reader)) for name, reader in self._others.items()]

        def chosen(entry: IndexEntry) -> object:
            sizes = {self._settings.pipeline.prefix + name: size_bytes for name, size_bytes in entry.sizes.items()}
            for prefix, beside, found in columns:
                some = [found[place] for url in beside[entry.url] if (place := (url, entry.key)) in found]
                sizes |= {prefix + name: size_bytes for name, size_bytes in some[0].items()} if len(some) == 1 else {}
            return predicate(replace(entry, sizes=sizes))

        return super().select(chosen)


def _entries(first: ShardReader[Any], other: ShardReader[Any]) -> tuple[dict[str, list[str]], dict[Any, Any]]:
    """Return the urls beside each shard, and the sizes of their samples' members by url and key, {} if doubled."""
    urls, found = [*other.manifest.shards.urls], dict[tuple[str, str], Mapping[str, int]]()
    pairs = _pairs(first, other) or [(number,) for number in range(len(urls))]

    def note(entry: IndexEntry) -> None:
        found[entry.url, entry.key] = {} if (entry.url, entry.key) in found else entry.sizes

    select(other.manifest, other._rows_of_tables(), note)
    own = first.manifest.shards.urls
    return {url: [urls[number] for number in some] for url, some in zip(own, pairs, strict=False)}, found


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
    if reader is not first and reader.manifest.choices is not None:
        raise ConfigError(f"source {name!r} is a selection", remedy="select among the samples of Joined")


def _pairs(first: ShardReader[Any], other: ShardReader[Any]) -> tuple[tuple[int, ...], ...] | None:
    """Return the shards of another dataset with partners of each shard's samples; None if the nth has those of the nth.

    Raises ConfigError if there are not as many, and the tables of samples, which have the keys, are missing.
    """
    own, others = first.manifest.shards, other.manifest.shards
    counted = all(map(is_index, (*first._urls, *other._urls))) and -1 not in own.samples + others.samples
    if len(own) == len(others) and (not counted or own.samples == others.samples):
        return None
    alone = {url: (number,) for number, url in enumerate(others.urls)}
    where: dict[str, tuple[int, ...]] = {}
    found: dict[str, set[int]] = {url: set() for url in own.urls}

    def note(entry: IndexEntry) -> None:
        where[entry.key] = where[entry.key] + alone[entry.url] if entry.key in where else alone[entry.url]

    try:
        select(other.manifest, other._rows_of_tables(), note)
        select(first.manifest, first._rows_of_tables(), lambda entry: found[entry.url].update(where.get(entry.key, ())))
    except ConfigError as exn:
        if len(own) == len(others) and isinstance(exn.__cause__, NotFoundError):
            return None
        raise ConfigError(
            f"{len(own)} shards are joined with {len(others)} by the tables of their keys: {exn.message}",
            url=exn.url,
            remedy="write them next to both index files: shardcache index URL... -o index.json --samples",
        ) from exn
    return tuple(tuple(sorted(found[url])) for url in own.urls)
