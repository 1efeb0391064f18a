"""`JoinedReader`: tar shards whose samples have members in other shards, too, joined by key.

The samples of the first source are joined with their partners: the samples of other sources that
have the same keys. Which shards hold partners is found in tables of samples, which list the keys of
all shards; without tables, the nth shard is paired with the nth. A column stands for another
source's shards. Reading is in `reading.leased`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any, Self

from shardcache.shared.exceptions import (
    AccessDeniedError,
    ConfigError,
    NotAllowedError,
    NotFoundError,
    ShardcacheError,
)
from shardcache.shared.tarindex.contents import IndexEntry
from shardcache.shared.urls.url_names import is_index
from shardcache_client.arguments import values as arguments
from shardcache_client.arguments.other_words import OTHER_WORDS
from shardcache_client.arguments.values import T_co
from shardcache_client.daemon.session_pool import SessionPool
from shardcache_client.order.shards.manifest import JoinedManifest
from shardcache_client.parts.dataset_arguments import ARGUMENTS
from shardcache_client.parts.dataset_parts import DatasetParts
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.parts.runtime import Runtime
from shardcache_client.parts.sample_tables import entries_by_shard, rows_by_shard, table_rows
from shardcache_client.ranks.group import RankGroup
from shardcache_client.reader import ShardReader
from shardcache_client.samples.decoders import Spec
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.decode import Missing
from shardcache_client.stages.pipeline import Pipeline
from shardcache_client.table import Table, TableAccess, row_stages

# Arguments that a join does not have, with the remedy for each; "{}" stands for the argument.
_OTHER_WORDS = OTHER_WORDS | dict.fromkeys(
    ARGUMENTS, "give it to the first source: ShardDataset(urls, {}=...)"
)
# Errors of a missing table. S3 denies access to a missing object, instead of reporting it missing,
# if the user may not list the bucket.
_NO_TABLE = (ConfigError, AccessDeniedError, NotAllowedError)
# Entries of `DatasetParts.shared_options` that must be the same for all sources. The second is the
# one entry for all settings of sessions.
_ALIKE = ("zero_copy", "socket, daemon, fallback, timeout_s or partial_reads")

Source = ShardReader[Any] | Table


def _checked_sources(value: Any) -> dict[str, Source]:
    """Return the sources by name. Raises TypeError for anything else."""
    if not isinstance(value, Mapping) or not value:
        raise TypeError
    for name, source in value.items():
        if not isinstance(name, str) or not isinstance(source, ShardReader | Table):
            raise TypeError
    return dict(value)


class JoinedReader(ShardReader[T_co]):
    """An iterable over the samples of tar shards, joined by key with samples in other shards.

    For training without torch; `Joined` adds support for torch, as `ShardDataset` does to
    `ShardReader`. Samples, order, epochs and states are the same as for `Joined`, which describes
    the arguments.
    """

    @arguments.checked(
        _OTHER_WORDS,
        sources=arguments.Accepts(
            'datasets by prefix, {"": ShardDataset(...), "cap": ShardDataset(...)}, the others of '
            "which may be Tables",
            _checked_sources,
        ),
        **{name: ARGUMENTS[name] for name in ("decode", "members", "missing")},
    )
    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        decode: Callable[[Sample], T_co] | Mapping[str, Spec] | str | None = None,
        members: Iterable[str] | None = None,
        missing: Missing = "error",
    ) -> None:
        _check_first_has_samples(sources)
        _check_prefixes(list(sources))
        tables, readers = _tables_and_readers(sources)
        parts = {name: reader.parts for name, reader in readers.items()}
        (first_name, first), *others = parts.items()
        for name, source in parts.items():
            _check_source(name, source, first)
        _check_order(first)

        # Tables become stages of the pipeline. The shards of other sources become columns of the
        # first source's manifest, unless `members` names nothing of the source.
        timeout_s = first.sessions.timeout_s
        access = TableAccess(first.sessions.settings.choice, first.job, timeout_s)
        table_stages, members, missing = row_stages(tables, decode, members, missing, access)
        pipeline = Pipeline.of(decode, members, missing)
        columns = tuple(
            _column(f"{name}.", first, source, pipeline)
            for name, source in others
            if members is None or _may_name_members(members, f"{name}.")
        )
        manifest = replace(first.manifest, columns=columns)

        own_prefix = f"{first_name}." if first_name else ""
        # A member may come from another source's shard: `url_of` finds the shard for errors.
        decode_stage = replace(pipeline.decode, prefix=own_prefix, url_of=manifest.url_of)

        # All other parts are the first source's parts.
        joined = replace(
            first,
            samples=replace(first.samples, manifest=manifest),
            sessions=SessionPool(*first.sessions.settings),  # the source may be read as well
            pipeline=Pipeline(decode_stage, (*table_stages, *pipeline.stages)),
            group=_rank_group(self._runtime, list(parts.values())),
        )
        self._others = dict(others)
        self._table_stages = table_stages
        self.epoch_reader = EpochReader(joined, self._runtime)
        # Begin with the epoch or state that was set for the first source.
        self.epoch_reader.bookmark.follow(readers[first_name].epoch_reader.bookmark)

    @arguments.checked(predicate=arguments.FUNCTION)
    def select(self, predicate: Callable[[IndexEntry], object]) -> Self:
        """See `ShardReader.select`.

        Entries have the sizes of all sources' members, which need tables of samples. They also have
        the sample's row of each `Table`, under the table's prefix: `entry.rows["row"]["duration"]`.
        """
        partners = {
            f"{name}.": _partner_sizes(self.parts, other) for name, other in self._others.items()
        }
        decode_stage = self.parts.pipeline.decode

        def chosen(entry: IndexEntry) -> object:
            """Return the predicate's answer for an entry with all sources' sizes and rows."""
            sizes = _prefixed(decode_stage.prefix, entry.sizes)
            for prefix, sizes_of in partners.items():
                sizes |= _prefixed(prefix, sizes_of(entry))
            rows = {
                stage.prefix.removesuffix("."): stage.row(entry.key) or {}
                for stage in self._table_stages
            }
            return predicate(replace(entry, sizes=sizes, rows=rows))

        return super().select(chosen)


def _rank_group(runtime: Runtime, sources: Sequence[DatasetParts]) -> RankGroup:
    """Return the group of the ranks that read the sources together."""
    first, *others = sources
    group = runtime.rank_group(first.group.named_ranks, first.urls, first.sessions.timeout_s)
    # If the ranks share rank 0's lists of all sources' shards, they need not compare them.
    group.has_manifest_of_rank_0 = first.group.has_manifest_of_rank_0
    group.may_join_other_shards = not all(each.group.has_manifest_of_rank_0 for each in others)
    return group


def _tables_and_readers(
    sources: Mapping[str, Source],
) -> tuple[dict[str, Table], dict[str, ShardReader[Any]]]:
    """Return the tables by the prefix of their members, and the readers by their names."""
    tables: dict[str, Table] = {}
    readers: dict[str, ShardReader[Any]] = {}
    for name, source in sources.items():
        if isinstance(source, Table):
            tables[f"{name}."] = source
        else:
            readers[name] = source
    return tables, readers


def _may_name_members(members: Iterable[str], prefix: str) -> bool:
    """Return True if `members` may name a member of the source with a prefix.

    A pattern such as "*.txt" may match members of any source.
    """
    named = ";".join(members).split(";")
    return any(member.startswith((prefix, "*.")) for member in named)


def _prefixed(prefix: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes by extension, with a prefix before each extension."""
    return {prefix + name: size_bytes for name, size_bytes in sizes.items()}


def _partner_sizes(
    first: DatasetParts, other: DatasetParts
) -> Callable[[IndexEntry], Mapping[str, int]]:
    """Return a function that returns the sizes of the members of a sample's partner.

    The function returns {} for a sample without a partner.
    """
    # The column only serves to find the shards with partners, so it needs no prefix or pipeline.
    column = _column("", first, other, Pipeline())
    numbers = {url: number for number, url in enumerate(first.manifest.shards.urls)}
    other_urls = list(other.manifest.shards.urls)
    # Sizes of members, by the shard's url and the sample's key.
    sizes_by_place: dict[tuple[str, str], Mapping[str, int]] = {}
    for _, entries in entries_by_shard(other.manifest, table_rows(other)):
        for entry in entries:
            place = (entry.url, entry.key)
            # Samples with the same key in one shard are no partners of any sample.
            is_repeated = place in sizes_by_place
            sizes_by_place[place] = {} if is_repeated else entry.sizes

    def sizes_of(entry: IndexEntry) -> Mapping[str, int]:
        shard = numbers[entry.url]
        if entry.key.encode("utf-8", "surrogateescape") in column.repeated_in(shard):
            return {}
        partner_shards = column.joined_to(shard)
        places = [(other_urls[number], entry.key) for number in partner_shards]
        candidates = [sizes_by_place[place] for place in places if place in sizes_by_place]
        return candidates[0] if len(candidates) == 1 else {}

    return sizes_of


def _check_first_has_samples(sources: Mapping[str, Source]) -> None:
    """Raise ConfigError if the first source is a Table."""
    name, first = next(iter(sources.items()))
    if isinstance(first, Table):
        raise ConfigError(
            f"{name!r}, the first source, is a Table, which has no samples of its own",
            remedy="list the shards first, whose samples get the table's rows",
        )


def _check_prefixes(names: Sequence[str]) -> None:
    """Raise ConfigError if a source's name cannot be the prefix of its members' names."""
    for name in names:
        # Names of members are in lower case, ";" separates alternatives, and names with two
        # underscores are not members.
        if name != name.lower() or ";" in name or name.startswith((".", "__")):
            raise ConfigError(
                f"{name!r} cannot be a prefix of members",
                remedy='name the source as an extension, "cap"',
            )
    if "" in names[1:]:
        raise ConfigError(
            "'' is not the first source: only the first one's members may have names without a "
            "prefix",
            remedy='name it as an extension, "cap"; or list it first, for its samples to be those '
            "that are joined",
        )


def _check_order(first: DatasetParts) -> None:
    """Raise ConfigError if the order of the first source needs its samples one by one."""
    if first.scattered is not None:
        raise ConfigError(
            'shuffle="global" reads samples one by one, and a join reads the shards of all '
            "sources together",
            remedy="give the first source shuffle=True",
        )


def _check_source(name: str, source: DatasetParts, first: DatasetParts) -> None:
    """Raise ConfigError if a source cannot be joined with the first.

    Also raises it for options of the source that would be ignored.
    """
    options = source.shared_options()
    options_of_first = first.shared_options()
    for option in _ALIKE:
        if options[option] != options_of_first[option]:
            reason = f"source {name!r} and the first differ in {option}"
            raise ConfigError(reason, remedy="give the same to all sources")
    if source.pipeline != Pipeline() or source.manifest.columns:
        raise ConfigError(
            f"source {name!r} has decode, members, missing, tokens, map or filter, or consists of "
            "sources itself",
            remedy='write Joined(sources, decode={"cap.txt": "text"}, ...).map(function), which is '
            "for all members",
        )
    if source.stage is not None:
        raise ConfigError(
            f"source {name!r} yields groups of samples",
            remedy="join samples, and pack those of Joined",
        )
    if source is not first and source.manifest.choices is not None:
        raise ConfigError(
            f"source {name!r} is a selection", remedy="select among the samples of Joined"
        )


def _column(
    prefix: str, first: DatasetParts, other: DatasetParts, pipeline: Pipeline
) -> JoinedManifest:
    """Return another source's shards as they are joined with the first source's shards.

    1. With tables of samples, keys decide which shards belong together.
    2. Without tables, the nth shards are paired with each other, if both sources have the same
       number of shards, and if a sample without a partner is an error.
    3. Otherwise, or if the tables belong to other shards: raises ConfigError.

    Args:
        prefix: prefix of the other source's members.
        first: the parts of the first source.
        other: the parts of the other source.
        pipeline: has the treatment of samples without a partner.
    """
    try:
        return _by_tables(prefix, first, other)
    except _NO_TABLE as exn:
        own_shards = len(first.manifest)
        other_shards = len(other.manifest)
        are_pairs = own_shards == other_shards and _has_no_tables(exn, (*first.urls, *other.urls))
        # In a join, the view of members is the same for all shards: 0 stands for any of them.
        is_unmatched_error = pipeline.view(shard=0, joined_prefix=prefix).unmatched == "error"
        if are_pairs and is_unmatched_error:
            # Reading shows whether the nth shards belong together: each key without a partner is an
            # error.
            return JoinedManifest(prefix, other.manifest)
        if are_pairs:
            reason = (
                f"missing={pipeline.decode.missing!r} needs the tables of keys, as partners may be "
                "in any shard"
            )
        else:
            reason = (
                f"{own_shards} shards are joined with {other_shards} by the tables of their keys"
            )
        raise ConfigError(
            f"{reason}: {exn.message}",
            url=exn.url,
            remedy="write them next to both index files: shardcache index URL... -o index.json "
            "--samples",
        ) from exn


def _has_no_tables(exn: ShardcacheError, urls: Iterable[str]) -> bool:
    """Return True if an error of reading tables means that one is missing, not that it is wrong.

    Args:
        exn: one of _NO_TABLE.
        urls: urls of the sources, which have no tables unless they are index files.
    """
    if not all(map(is_index, urls)):
        return True
    # A ConfigError about a missing table has a NotFoundError as its cause. Any other ConfigError is
    # about a table that does not fit its index file.
    return not isinstance(exn, ConfigError) or isinstance(exn.__cause__, NotFoundError)


def _by_tables(prefix: str, first: DatasetParts, other: DatasetParts) -> JoinedManifest:
    """Return another source's shards as the tables of both sources pair them; see `_column`.

    Raises one of _NO_TABLE if a table is missing or does not fit.
    """
    # The usual case, without a table of all keys: the nth shards belong together.
    if len(first.manifest) == len(other.manifest) and _are_paired(first, other):
        return JoinedManifest(prefix, other.manifest)

    # 1. For each key, collect the numbers of the other source's shards that have the key. Most keys
    # are in one shard: all keys of a shard share one tuple, which saves memory. A shard that is
    # listed twice has one number.
    tuple_of = {url: (number,) for number, url in enumerate(other.manifest.shards.urls)}
    shards_of: dict[str, tuple[int, ...]] = {}
    for _, entries in entries_by_shard(other.manifest, table_rows(other)):
        for entry in entries:
            shard = tuple_of[entry.url]
            earlier = shards_of.get(entry.key)
            shards_of[entry.key] = shard if earlier is None else earlier + shard

    # 2. For each shard of the first source, by its url, collect the other source's shards that have
    # partners of its samples, and the keys that another shard of the first source has as well.
    urls = first.manifest.shards.urls
    partner_shards: dict[str, set[int]] = {url: set() for url in urls}
    repeated: dict[str, set[bytes]] = {url: set() for url in urls}
    first_url_of: dict[str, str] = {}  # for each key, the first shard of the first source with it
    for _, entries in entries_by_shard(first.manifest, table_rows(first)):
        for entry in entries:
            if entry.key not in shards_of:
                continue
            partner_shards[entry.url].update(shards_of[entry.key])
            first_url = first_url_of.setdefault(entry.key, entry.url)
            if first_url != entry.url:
                key = entry.key.encode("utf-8", "surrogateescape")
                repeated[first_url].add(key)
                repeated[entry.url].add(key)
    return JoinedManifest(
        prefix,
        other.manifest,
        pairs=tuple(tuple(sorted(partner_shards[url])) for url in urls),
        repeated=tuple(frozenset(repeated[url]) for url in urls),
    )


def _are_paired(first: DatasetParts, other: DatasetParts) -> bool:
    """Return True if the nth shards of both have the same keys in the same order, each key once.

    This check takes a fraction of the time and memory of a table of all keys.
    """
    if first.manifest.counts != other.manifest.counts:
        return False
    hashes = array("q")
    with (
        closing(rows_by_shard(first.manifest, table_rows(first))) as own,
        closing(rows_by_shard(other.manifest, table_rows(other))) as others,
    ):
        for other_placed, own_placed in zip_longest(others, own):
            if own_placed is None or other_placed is None:
                return False
            other_shard, other_row, _table_url = other_placed
            own_shard, own_row, _table_url = own_placed
            if own_shard != other_shard or own_row["keys"] != other_row["keys"]:
                return False
            hashes.extend(map(hash, own_row["keys"]))
    # Keys are unique if their hashes are. Equal hashes are neighbours when the hashes are sorted.
    return all(one != another for one, another in pairwise(sorted(hashes)))
