"""The stage of a `Table`: adds the columns of its row to each sample.

A table has rows of columns. A sample's row is the row that has the sample's key, or the key that
the user's `key_of` makes of it.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardcache.shared.exceptions import ConfigError, MissingMemberError, UnmatchedKeyError
from shardcache_client.samples.slicing import Sample
from shardcache_client.stages.decode import Missing
from shardcache_client.stages.item_stage import Dropped
from shardcache_client.tables.node_tables import NodeTable

_SHOWN_KEYS = 3  # number of example keys in an error's text


@dataclass(frozen=True, slots=True)
class Rows:
    """Adds to each sample the columns of the row with the sample's key; see `ItemStage`.

    Attributes:
        table: the rows.
        prefix: beginning of the names that the columns get as members of a sample, with the dot.
        url: url of the table, for messages.
        required: members of this table that each sample must get; empty for all columns of a row.
        missing: treatment of a sample that has no row, or whose row lacks a required column: raise,
            skip the sample, or take values from this mapping.
        key_of: returns the key of a sample's row, given the sample's key; None if both are equal.
    """

    table: NodeTable = field(compare=False)
    prefix: str
    url: str
    required: tuple[str, ...] = ()
    missing: Missing = "error"
    key_of: Callable[[str], str] | None = None

    # A pipeline asks its stages whether they leave out samples. This stage does with
    # `missing="skip"`, but the pipeline's `Decode` has the same `missing`, and reports it.
    leaves_out: ClassVar[bool] = False

    def apply(self, sample: Sample) -> Sample | Dropped:
        """Return a sample with its row's columns, or a `Dropped` if it is left out.

        Raises UnmatchedKeyError for a sample without a row, or with several rows;
        MissingMemberError for a row that lacks a required column.
        """
        row = self.row(sample["__key__"])
        defaults = self.missing if isinstance(self.missing, Mapping) else {}
        # Values are copied, since the user's functions may change them.
        copied_defaults = {
            name: deepcopy(defaults[name]) for name in self.required if name in defaults
        }
        if row is None:
            if self.missing == "skip":
                return Dropped.INCOMPLETE
            # Default values can replace a missing row as well. If a required member has no default
            # value, the error below names that member.
            if not copied_defaults:
                raise self._unmatched(sample)
            row = {}

        columns = copied_defaults | {self.prefix + name: value for name, value in row.items()}
        if self.required:
            absent = [name for name in self.required if name not in columns]
            if absent and self.missing == "skip":
                return Dropped.INCOMPLETE
            if absent:
                raise MissingMemberError.of(absent[0], sample | columns)
            columns = {name: columns[name] for name in self.required}
        return sample | columns

    def row(self, key: str) -> Mapping[str, Any] | None:
        """Return the row of the sample with a key; None if there is no row, or several."""
        rows = self.table.index.rows(self._row_key(key))
        if len(rows) != 1:
            return None
        return rows[0]

    def _row_key(self, key: str) -> str:
        """Return the key of a sample's row. Raises ConfigError if `key_of` returns no text."""
        if self.key_of is None:
            return key
        row_key = self.key_of(key)
        if not isinstance(row_key, str):
            raise ConfigError(
                f"key_of({key!r}) is {row_key!r}, which is not text",
                url=self.url,
                remedy="return the value that the table has in its column of keys, as text",
            )
        return row_key

    def _unmatched(self, sample: Sample) -> UnmatchedKeyError:
        """Return the error for a sample that has no row, or several."""
        key = sample["__key__"]
        row_key = self._row_key(key)
        row_count = len(self.table.index.rows(row_key))
        examples = ", ".join(map(repr, self.table.index.some_keys(_SHOWN_KEYS)))
        if row_count:
            reason = f"{row_count} rows have its key"
        elif examples:
            reason = f"no row has its key; some keys of the table are {examples}"
        else:
            reason = "it has no rows"
        looked_up = ""
        if row_key != key:
            looked_up = f", looked up as {row_key!r},"
        return UnmatchedKeyError(
            f"the sample {key!r}{looked_up} cannot be joined with the table {self.url}: {reason}",
            url=sample["__url__"],
            remedy="if the table's keys are written differently, give Table a pattern or "
            "key_of; else give Joined missing='skip', or default values of the "
            "members",
        )
