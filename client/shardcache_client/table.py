"""`Table`: rows of a file that join the samples of shards by key, and the stages that add them.

A `Joined` dataset calls `row_stages` for its tables. Each table becomes a stage of the pipeline,
which adds to a sample the columns of the row with the sample's key.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardcache.shared.exceptions import ConfigError, MetadataError
from shardcache.shared.urls.local_urls import absolute_urls
from shardcache_client.arguments import values as arguments
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.daemon.session import resolve
from shardcache_client.files.cached_file import CachedFile, session_of
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.samples.decoders import Spec
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.decode import Missing
from shardcache_client.stages.rows import Rows
from shardcache_client.tables import node_tables, row_files
from shardcache_client.tables.node_tables import NodeTable

# Version of the form in which a table's rows are stored. It is part of the table's identity: tables
# of other versions are not used.
_LAYOUT = "2"

# Maximum age of a listing of the files that the daemon may answer with. It is short, so that a run
# sees files that were replaced before the run began. It is long enough for one listing to serve all
# ranks, which ask at nearly the same time.
_MAX_AGE_S = 2.0

Decoding = Callable[[Sample], Any] | Mapping[str, Spec] | str | None


@dataclass(frozen=True, slots=True)
class TableAccess:
    """Access to a table's files.

    Attributes:
        choice: the daemon that reads the files.
        job: name of the job, under which the daemon lists the reader.
        timeout_s: time limit for a wait for a file, and for a lost daemon to come back.
    """

    choice: DaemonChoice
    job: str
    timeout_s: float


class Table:
    """Rows that give samples further members, found by the samples' keys. A source of `Joined`.

    Such as a manifest, captions, labels, or scores of another model::

        audio = ShardDataset("s3://bucket/audio-{000..999}.tar", shuffle=True)
        manifest = Table("s3://bucket/manifest.jsonl", key="audio_filepath", pattern=r"(.*)\\.wav")
        dataset = Joined({"": audio, "row": manifest})  # "wav", "row.text", "row.duration"

    A sample gets a member for each column of its row, named by prefix, dot and column. The member's
    value is as in the file: text, number, list, or dict; from CSV, text. Values may change from one
    run to the next: samples and states stay valid.

    The files are read through the cache when the first `Joined` is made with them. Their rows are
    kept as a table, by key, for all of this user's processes on the node, in a folder below
    `TMPDIR`. The table takes 8 bytes per row and the rows themselves, and is mapped into memory.
    The first process makes it while the others wait: 13 to 19 s per million rows.

    Args:
        urls: urls of the files, as for `ShardDataset`: JSON lines (`.jsonl`, `.ndjson`, `.json`),
            CSV and TSV with a header, parquet (needs pyarrow); compressed or not (`.gz`, `.bz2`,
            `.xz`, `.zst`).
        key: name of the column with the key (`__key__`) of the sample that a row belongs to.
        columns: names of the columns that samples get; None for all except the column of keys.
        pattern: regular expression, if that column holds more than the key. It must match the whole
            value, and its first group is the sample's key.
        key_of: returns the key of a sample's row, given the sample's `__key__`; None if both are
            equal.

    Raises ConfigError if an argument is invalid.
    """

    @arguments.checked(
        urls=arguments.URLS,
        key=arguments.TEXT,
        columns=arguments.NAMES.or_none("None for all"),
        pattern=arguments.instance("a regular expression with a group", str, re.Pattern).or_none(),
        key_of=arguments.FUNCTION.or_none(),
    )
    def __init__(
        self,
        urls: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        key: str,
        *,
        columns: Sequence[str] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        key_of: Callable[[str], str] | None = None,
    ) -> None:
        self.urls = absolute_urls(urls)
        self.key = key
        self.columns = None if columns is None else tuple(columns)
        self.pattern = None if pattern is None else _compiled(pattern)
        self.key_of = key_of

    def __repr__(self) -> str:
        return f"Table({self.urls!r}, key={self.key!r})"

    def open(self, access: TableAccess) -> NodeTable:
        """Return the rows, reading them unless a process of this user on this node has done so.

        Raises any error of resolving and reading the files, and of `row_files.rows_of`.
        """
        reader = ReaderIdentity(access.job)
        manifest = resolve(
            access.choice,
            reader,
            self.urls,
            access.timeout_s,
            wanted="files",
            max_age_s=_MAX_AGE_S,
        )
        pattern = ""
        if self.pattern is not None:
            pattern = f"{self.pattern.flags}:{self.pattern.pattern}"
        # Everything that the rows depend on; a table with the same identity is shared.
        identity = (_LAYOUT, manifest.fingerprint, self.key, repr(self.columns), pattern)

        def rows() -> Iterator[tuple[str, str]]:
            """Read the rows; called only if the table does not exist on this node yet."""
            return self._all_rows(manifest, access)

        return node_tables.shared_table(identity, rows, self.urls[0])

    def _all_rows(self, manifest: Manifest, access: TableAccess) -> Iterator[tuple[str, str]]:
        """Yield the rows of all files, each as its key and its line in the table."""
        reader = ReaderIdentity(access.job)
        patience = Patience(access.timeout_s)
        wanted = None if self.columns is None else (self.key, *self.columns)
        with session_of(access.choice, reader, manifest, "files", patience) as session:
            for number, ref in enumerate(manifest):
                with closing(CachedFile(session, number)) as file:
                    for row in row_files.rows_of(ref.url, file.wait_whole(), wanted):
                        key = self._key_in(row, ref.url)
                        columns = self._columns_for_samples(row)
                        yield key, row_files.line_of(key, columns, ref.url)

    def _key_in(self, row: dict[str, Any], url: str) -> str:
        """Return the key of the sample that a row belongs to. Raises MetadataError."""
        value = row.get(self.key)
        if value is None:
            columns = ", ".join(map(repr, row)) or "no column"
            raise MetadataError(
                f"a row of the table has no {self.key!r}; it has {columns}",
                url=url,
                remedy="name the column with the samples' keys: Table(urls, key=...)",
            )
        text = str(value)
        if self.pattern is None:
            return text
        match = self.pattern.fullmatch(text)
        if match is None or match[1] is None:
            raise MetadataError(
                f"the pattern {self.pattern.pattern!r} does not match the row's {self.key!r}, "
                f"{text!r}",
                url=url,
                remedy="give Table a pattern that matches all of them",
            )
        return str(match[1])

    def _columns_for_samples(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that samples get."""
        if self.columns is None:
            return {name: value for name, value in row.items() if name != self.key}
        return {name: row[name] for name in self.columns if name in row}


def _compiled(pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    """Return a compiled regular expression.

    Raises ConfigError unless the expression is valid, is for text, and has a group.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as exn:
        raise ConfigError(f"pattern={pattern!r} is not a regular expression ({exn})") from exn
    if not isinstance(compiled.pattern, str) or not compiled.groups:
        raise ConfigError(
            f"pattern={pattern!r} has no group, which is the sample's key",
            remedy=r'write the part that is the key in parentheses: pattern=r"(.*)\.wav"',
        )
    return compiled


def row_stages(
    tables: Mapping[str, Table],
    decode: Decoding,
    members: Iterable[str] | None,
    missing: Missing,
    access: TableAccess,
) -> tuple[tuple[Rows, ...], Iterable[str] | None, Missing]:
    """Return a stage for each table, and `members` and `missing` without columns of tables.

    Args:
        tables: the tables by the prefix of their members, with the dot.
        decode: the argument of the `Joined`.
        members: the argument of the `Joined`; a table is not read if it names none of the table's
            columns.
        missing: the argument of the `Joined`.
        access: access to the tables' files.

    Raises ConfigError if an argument does not fit, and any error of reading the tables.
    """
    if not tables:
        return (), members, missing
    if isinstance(decode, Mapping):
        _check_decode(tables, decode)
    prefixes = tuple(tables)
    names = None if members is None else tuple(members)
    _check_alternatives(names or (), prefixes)
    if isinstance(missing, Mapping):
        _check_defaults(missing, names or (), prefixes)
    stages = []
    for prefix, table in tables.items():
        required = tuple(name for name in names or () if name.startswith(prefix))
        if names is not None and not required:
            continue
        node_table = table.open(access)
        stages.append(Rows(node_table, prefix, table.urls[0], required, missing, table.key_of))

    if names is not None:
        names = tuple(name for name in names if not name.startswith(prefixes))
        if not names:
            raise ConfigError(
                "members names only columns of tables", remedy="name a member of the shards, too"
            )
    if isinstance(missing, Mapping):
        defaults = {name: value for name, value in missing.items() if not name.startswith(prefixes)}
        # Without a default value, a sample that lacks a member of the shards is an error.
        missing = defaults or "error"
    return tuple(stages), names, missing


def _check_alternatives(members: Sequence[str], prefixes: tuple[str, ...]) -> None:
    """Raise ConfigError if an entry of `members` names a column of a table as an alternative."""
    for entry in members:
        alternatives = entry.split(";")
        names_column = any(name.startswith(prefixes) for name in alternatives)
        if names_column and len(alternatives) > 1:
            raise ConfigError(
                f"members names {entry!r}, but a table's columns cannot be alternatives",
                remedy="name each column alone, with a default value in missing if rows may lack "
                "it; .map(function) can choose among them",
            )


def _check_defaults(
    missing: Mapping[str, Any], members: Sequence[str], prefixes: tuple[str, ...]
) -> None:
    """Raise ConfigError for a default value of a table's column that `members` does not name."""
    for name in missing:
        if name.startswith(prefixes) and name not in members:
            raise ConfigError(
                f"missing has a value for {name!r}, which members does not name",
                remedy="name it in members, too",
            )


def _check_decode(tables: Mapping[str, Table], decode: Mapping[str, Spec]) -> None:
    """Raise ConfigError if values of a table are to be decoded."""
    for name in decode:
        if name.startswith(tuple(tables)):
            raise ConfigError(
                f"decode names {name!r}, a column of a table, whose values are decoded already",
                remedy="leave it out; .map(function) makes other values of them",
            )
