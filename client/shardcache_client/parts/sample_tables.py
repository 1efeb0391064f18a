"""The tables of a dataset's samples, which `shardcache index --samples` writes.

A table is a file next to an index file. Each of its rows has the keys and members of consecutive
samples of one shard; a shard may have several rows. Tables are read like a dataset, through the
daemon, to select samples or join datasets without reading the samples themselves.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace

from shardcache.shared.exceptions import ConfigError, NotFoundError
from shardcache.shared.tarindex.contents import SUFFIX, IndexEntry, Row, entries_of
from shardcache.shared.urls.url_names import beside_index, is_index
from shardcache_client.order.dealing.deal_options import DealOptions
from shardcache_client.order.shards.choices import Choices, Marked
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.topology import Topology
from shardcache_client.parts.dataset_parts import DatasetParts, DealtSamples
from shardcache_client.parts.epoch_reader import EpochReader
from shardcache_client.parts.runtime import Runtime
from shardcache_client.parts.shard_source import ShardSource
from shardcache_client.ranks.group import RankGroup
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.pipeline import Pipeline

_REMEDY = "write both files again: shardcache index URL... -o index.json --samples"

# Errors that reading a row raises if it lacks fields or has values of other types.
_INVALID = (KeyError, TypeError, ValueError, IndexError, AttributeError)


def table_rows(parts: DatasetParts) -> Iterator[tuple[str, Row]]:
    """Yield the rows of the tables of a dataset's samples, each with its table's url.

    Raises ConfigError if a table is missing, and the errors of reading the tables.
    """
    if parts.pipeline.decode.blocks is not None:
        raise ConfigError(
            "select() chooses samples of the shards, not blocks of their tokens",
            remedy="leave documents out when the shards are written; subset() and split() choose "
            "among blocks",
        )
    try:
        yield from _reader_of_tables(parts).begin()
    except NotFoundError as exn:
        raise ConfigError(
            "select() needs a table of the samples, which is missing",
            url=exn.url,
            remedy="write it next to the index: shardcache index URL... -o index.json --samples",
        ) from exn


def _reader_of_tables(parts: DatasetParts) -> EpochReader:
    """Return a reader of the tables' rows, by which this process reads all of them."""
    settings = parts.sessions.settings
    source = ShardSource(
        tables_of(parts.urls),
        settings.choice,
        parts.job,
        timeout_s=settings.patience.limit_s,
        partial_reads=settings.partial_reads,
    )
    group = RankGroup(Topology())
    samples = DealtSamples.of(source.manifest(group), DealOptions())
    # All members are read (None), and a row without its member is an error.
    pipeline = Pipeline.of(row_of, members=None, missing="error")
    reader = EpochReader(
        replace(source.parts(samples, group), pipeline=pipeline, epochs=1),
        Runtime(),
    )
    with reader.bookmark.counter.change() as count:
        # This avoids a warning that the samples, which are rows here, are not counted.
        count.is_uncounted_logged = True
    return reader


def tables_of(urls: Sequence[str]) -> list[str]:
    """Return the urls of the sample tables beside index files.

    Raises ConfigError for a url of anything else.
    """
    for url in urls:
        if not is_index(url):
            raise ConfigError(
                "select() needs a table of the samples, next to an index file",
                url=url,
                remedy="write both: shardcache index URL... -o index.json --samples; then use "
                "index.json as the url",
            )
    return [beside_index(url, SUFFIX) for url in urls]


def tables_beside(parts: DatasetParts) -> list[str]:
    """Return the urls of the tables of a dataset's samples, if there may be any.

    There are none if the dataset's urls are not index files, or its samples are blocks of tokens.
    """
    if parts.pipeline.decode.blocks is not None or not all(map(is_index, parts.urls)):
        return []
    return tables_of(parts.urls)


def row_of(sample: Sample) -> tuple[str, Row]:
    """Return the row that a sample of a table contains, with the table's url.

    Raises ValueError or KeyError if the sample is no row.
    """
    return sample["__url__"], json.loads(sample["json"])


def select(
    manifest: Manifest, rows: Iterable[tuple[str, Row]], predicate: Callable[[IndexEntry], object]
) -> Choices:
    """Return the choice of the samples of a manifest for which the predicate is true.

    Raises ConfigError if the tables belong to other shards.

    Args:
        manifest: the shards.
        rows: rows of the tables, each with its table's url.
        predicate: called with the entry of each sample.
    """
    # By shard: a byte for each sample of the tar, 1 if the predicate is true.
    marks: defaultdict[int, bytearray] = defaultdict(bytearray)
    for shard, entries in entries_by_shard(manifest, rows):
        marks[shard] += bytes(bool(predicate(entry)) for entry in entries)
    # The manifest itself may have only some of the tar's samples: the choice is one among these.
    choices = []
    for shard in range(len(manifest)):
        chosen_marks = _marks_of(manifest.chosen(shard), marks[shard])
        choices.append(Marked.of(chosen_marks))
    return tuple(choices)


def _marks_of(chosen: Sequence[int] | None, marks: bytearray) -> Sequence[int]:
    """Return the marks of a tar's samples that were chosen before, or all marks for None."""
    if chosen is None:
        return marks
    return [marks[number] for number in chosen]


def entries_by_shard(
    manifest: Manifest, rows: Iterable[tuple[str, Row]]
) -> Iterator[tuple[int, list[IndexEntry]]]:
    """Yield the samples of each row, with the number of their shard in a manifest.

    Raises ConfigError as `rows_by_shard` does.
    """
    for shard, row, url in rows_by_shard(manifest, rows):
        try:
            entries = list(entries_of(row, manifest[shard].url))
        except _INVALID as exn:
            raise _invalid(exn, url) from exn
        yield shard, entries


def rows_by_shard(
    manifest: Manifest, rows: Iterable[tuple[str, Row]]
) -> Generator[tuple[int, Row, str]]:
    """Yield rows with the number of their shard in a manifest, and their table's url.

    Raises ConfigError if the tables belong to other shards. At the end, it is also raised if the
    rows do not cover all samples of all shards.

    Args:
        manifest: the shards.
        rows: rows of the tables, each with its table's url.
    """
    covered = [0] * len(manifest)  # number of samples of each shard that rows have had so far
    # A row has the number of its shard in the table's own index file ("shard"), and the number of
    # its first sample in the shard ("first"). The shards of all index files follow each other in
    # the manifest, and each has a row: so the first shard of a table comes after the last shard of
    # the table before. The same index file may come more than once.
    first_shard = 0
    shard = -1
    for url, row in rows:
        try:
            is_first_of_table = row["shard"] == 0 and row["first"] == 0
            if is_first_of_table:
                first_shard = shard + 1
            shard = first_shard + row["shard"]
            follows_last_row = row["first"] == covered[shard]
            has_same_count = row["samples"] == manifest[shard].samples
            # A manifest without versions (None) fits any table.
            has_same_version = manifest[shard].version in (None, row["version"])
            covered[shard] += len(row["keys"])
        except _INVALID as exn:
            raise _invalid(exn, url) from exn
        if not (follows_last_row and has_same_count and has_same_version):
            raise ConfigError(
                "the table of samples does not match the index file: "
                f"{manifest[shard].url} differs",
                url=url,
                remedy=_REMEDY,
            )
        yield shard, row, url
    for number, ref in enumerate(manifest):
        if covered[number] != ref.samples:
            raise ConfigError(
                "the table of samples does not cover this shard completely",
                url=ref.url,
                remedy=_REMEDY,
            )


def _invalid(exn: Exception, url: str) -> ConfigError:
    """Return the error for a table with a row that cannot be read."""
    return ConfigError(f"the table of samples is invalid ({exn!r})", url=url, remedy=_REMEDY)
