"""Samples of a shard joined with their partners, the samples with the same keys in other shards.

A `Joined` dataset has a first source, and a column for each further source. A joined sample has the
members of a sample of the first source, and the members of its partner in each column. The names of
a column's members begin with the column's prefix.

`LeasedShard` calls this module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from shardcache.shared import exceptions
from shardcache.shared.tarindex.tables import keys_of
from shardcache_client.daemon.lease import LeaseRequest
from shardcache_client.reading.leased.shards import MappedShard
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.slicing import Adder, ColumnSpans, Sample, joined_cutter

_NO_PARTNER_REMEDY = (
    "rewrite the shards so that each sample has one partner, or give Joined missing='skip', "
    "or default values of the members"
)

_SHOWN_KEYS = 3  # number of example keys in an error's text


class LeftOutError(exceptions.UnmatchedKeyError):
    """A sample without a partner that is to be left out, as the dataset has missing="skip"."""


def find_partners(keys: Sequence[bytes], others: Sequence[bytes]) -> list[int | None]:
    """Return the index in `others` of each of `keys`.

    The index is None for a key that `others` lacks, and for a key that either list repeats.
    """
    indices = dict(zip(others, range(len(others)), strict=True))
    repeated: list[bytes] = []
    if len(indices) < len(others):
        repeated += _repeated(others)
    if len(set(keys)) < len(keys):
        repeated += _repeated(keys)
    for key in repeated:
        indices.pop(key, None)
    return list(map(indices.get, keys))


def _repeated(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys that occur more than once, each once."""
    return [key for key, times in Counter(keys).items() if times > 1]


@dataclass(frozen=True, slots=True)
class JoinFacts:
    """Facts about the join of a shard, from tables of samples, which list the shards' keys.

    Attributes:
        repeated_keys: keys that another shard of the same source has as well. Samples with these
            keys have no partner.
        columns_by_key: prefixes of the columns whose shards were chosen because they have keys of
            this shard. The shards of other columns were chosen by their order alone.
    """

    repeated_keys: frozenset[bytes] = frozenset()
    columns_by_key: frozenset[str] = frozenset()


class SampleJoin:
    """Joins the samples of a shard with their partners, one column of shards after another.

    Args:
        own: the shard whose samples get partners.
        lease: the lease on that shard, which counts the samples without a partner.
        facts: facts about the join of that shard.
    """

    def __init__(self, own: MappedShard, lease: LeaseRequest, facts: JoinFacts) -> None:
        self._own = own
        self._lease = lease
        self._facts = facts
        self._keys = keys_of(own.index)
        # There are two ways to add members; see `_add`. Spans are the places of members' values in
        # their file.
        self._spans: list[ColumnSpans] = []
        self._adders: list[Adder] = []
        self._names: set[str] = set()  # names of the members so far

    def add_own(self, view: View) -> None:
        """Give the samples their own members."""
        self._add(view, [self._own], range(len(self._keys)))

    def add(self, view: View, shards: Sequence[MappedShard]) -> None:
        """Give the samples the members of their partners in other shards."""
        self._add(view, shards, self._partner_numbers(shards))

    def cutter(self) -> Callable[[int], Sample]:
        """Return a function that returns any joined sample by its number."""
        return joined_cutter(self._keys, self._own.url, self._spans, self._adders)

    def _add(
        self,
        view: View,
        shards: Sequence[MappedShard],
        numbers: Sequence[int | None],
    ) -> None:
        """Give each sample the members of one sample of `shards`.

        Args:
            view: the form in which the members are read.
            shards: shards that have the members.
            numbers: for each sample that is joined, the number of the sample whose members it gets,
                counted through all `shards`; None for no members.
        """
        names = {view.prefix + name for shard in shards for name in shard.index.extensions}
        are_names_new = self._names.isdisjoint(names)
        spans = None
        # Spans refer to one file, and cannot check for names that a sample has already.
        if len(shards) == 1 and are_names_new:
            # The result is None unless members with the same names exist for all samples.
            spans = shards[0].column_spans(numbers)
        if spans is not None:
            # 1. Values are cut by their spans. This is the fast way, as no function is called for
            # each sample.
            self._spans += spans
        else:
            # 2. A function adds the members to each sample, because the members come from several
            # shards, differ from sample to sample, or may have names that the sample has already.
            policy = self._unmatched_policy(view, shards, numbers)
            self._adders.append(_adder(shards, numbers, self._own.url, policy))
        self._names |= names

    def _partner_numbers(self, shards: Sequence[MappedShard]) -> Sequence[int | None]:
        """Return the number of each sample's partner, counted through all `shards`.

        The number is None for a sample without a partner.
        """
        keys = self._keys
        # The common case needs no lookup: equal keys in equal order, each of which occurs once.
        has_same_keys = len(shards) == 1 and _packed_keys(shards[0]) == _packed_keys(self._own)
        if has_same_keys and not self._facts.repeated_keys and len(set(keys)) == len(keys):
            return range(len(keys))

        others = [*chain.from_iterable(keys_of(shard.index) for shard in shards)]
        numbers = find_partners(keys, others)
        for own_number, key in enumerate(keys):
            if key in self._facts.repeated_keys:
                numbers[own_number] = None
        return numbers

    def _unmatched_policy(
        self,
        view: View,
        shards: Sequence[MappedShard],
        numbers: Sequence[int | None],
    ) -> _UnmatchedPolicy:
        """Return the treatment of the samples that have None in `numbers`.

        Its error counts all of these samples, and names the keys of a few.
        """
        keys = self._keys
        unmatched_keys = [
            key.decode(errors="replace")
            for key, number in zip(keys, numbers, strict=True)
            if number is None
        ]
        where = ", ".join(shard.url for shard in shards) or f"any shard of {view.prefix!r}"
        examples = ", ".join(map(repr, unmatched_keys[:_SHOWN_KEYS]))
        count = len(unmatched_keys)
        fault = f"{count} of {len(keys)} keys have no partner in {where}, or several: {examples}"
        if self._facts.repeated_keys:
            example = min(self._facts.repeated_keys).decode(errors="replace")
            fault += f"; {example!r} comes again in another shard of the first source"

        # The remedy of the error's class is to write tables of samples. That is no help if tables
        # have found these shards.
        remedy = _NO_PARTNER_REMEDY if view.prefix in self._facts.columns_by_key else None
        return _UnmatchedPolicy(view, self._lease, fault, self._own.url, remedy)


def _packed_keys(shard: MappedShard) -> tuple[bytes, bytes]:
    """Return a shard's keys as its index stores them, to compare two shards' keys and order."""
    return shard.index.keys.tobytes(), shard.index.key_ends.tobytes()


@dataclass(frozen=True, slots=True)
class _UnmatchedPolicy:
    """Treatment of samples without a partner in a column.

    Attributes:
        view: the column's view, which says whether to skip, to fill or to fail.
        lease: counts the samples without a partner.
        fault: the reason that they have no partner, for the error's text.
        url: url of the samples' shard.
        remedy: remedy for the error; None for the remedy of the error's class.
    """

    view: View
    lease: LeaseRequest
    fault: str
    url: str
    remedy: str | None

    def apply(self, sample: Sample) -> None:
        """Count a sample without a partner.

        Raises UnmatchedKeyError unless the view fills in default values later; LeftOutError if the
        sample is to be skipped.
        """
        self.lease.unmatched += 1
        if self.view.unmatched == "fill":
            return
        is_skipped = self.view.unmatched == "skip"
        error_class = LeftOutError if is_skipped else exceptions.UnmatchedKeyError
        raise error_class(
            f"the sample {sample['__key__']!r} cannot be joined: {self.fault}",
            url=self.url,
            remedy=self.remedy,
        )


def _adder(
    shards: Sequence[MappedShard],
    numbers: Sequence[int | None],
    url: str,
    policy: _UnmatchedPolicy,
) -> Adder:
    """Return a function that adds the members of a sample's partner to it.

    Args:
        numbers: for each sample, the number of its partner, counted through all `shards`; None for
            no partner.
        url: url of the samples' own shard.
        policy: treatment of samples without a partner.
    """
    # For each sample of all `shards`: the function that cuts samples out of its shard, and its
    # number in that shard.
    cuts = []
    for shard in shards:
        cut_sample = shard.cutter()
        cuts.extend([(cut_sample, number) for number in range(len(shard))])

    def add(own_number: int, sample: Sample) -> None:
        """Add the members of the partner to `sample`, which has this number in its own shard."""
        partner_number = numbers[own_number]
        if partner_number is None:
            policy.apply(sample)
            return
        cut, number_there = cuts[partner_number]
        # Cut into an empty dict, the members come alone, without "__key__" and "__url__".
        added = cut(number_there, {})
        shared = added.keys() & sample
        if shared:
            raise exceptions.SampleError(
                f"the sample {sample['__key__']!r} has two members {min(shared)!r}, of shards that "
                "are joined",
                url=url,
                remedy="give the source of one of them another prefix, or leave one out by "
                "members=",
            )
        sample |= added

    return add
