"""Options of a dataset that say how its samples are dealt, and the deal that they make. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import Deal, SampleDeal, ShardDeal, SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal, batch_size_of_rank
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.sequences.rounds import Shuffle, Topology
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.changes import Change


@dataclass(frozen=True, slots=True)
class Assignment:
    """Options of a dataset for its deal.

    Attributes:
        shuffle: None to read in the order of the shards.
        even: policy for a number of samples that the ranks do not divide.
        batch_size: number of samples in a batch of each rank.
        samples_per_epoch: over all ranks; None for those of the dataset.
        global_batch_size: number of samples in a batch of all ranks; None to deal spans to ranks.
        spans: number of spans of the epoch; each gives an equal part to every global batch.
        unit: describes samples that are not those of the tars; empty for those.
    """

    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None
    global_batch_size: int | None = None
    spans: int = 1
    unit: str = ""

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return the same with other seeds, by source; that of a dataset alone is under ""."""
        if self.shuffle is None:
            return self
        seed = seeds.get("", self.shuffle.seed)
        return replace(self, shuffle=replace(self.shuffle, seed=seed))

    def options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks, by the names of arguments."""
        return {
            "shuffle, shuffle_window, seed or canonical_nodes": self.shuffle,
            "even": self.even,
            "samples_per_epoch": self.samples_per_epoch,
            "global_batch_size": self.global_batch_size,
        }

    def batches(self) -> dict[str, object]:
        """Return further options that must be the same on ranks that train together.

        With them, all ranks end an epoch after the same number of batches.
        """
        if self.even is None or self.batch_size <= 1:
            return {}
        return {"batch_size": self.batch_size}

    @property
    def has_source_batches(self) -> bool:
        """True if each batch of a mixture is of one source."""
        return False

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources: "" for that of a dataset alone."""
        return ("",)

    @property
    def change(self) -> Change | None:
        """The latest change of a mixture; None if there was none."""
        return None

    def after(self, change: Change | None) -> Self:
        """Return the same after a change of a mixture, as states have it; None for none."""
        return self

    @property
    def fixes_batch_size(self) -> bool:
        """True if batches of another size than this dataset's would be of other samples."""
        return self.global_batch_size is not None

    @property
    def needs_counts(self) -> bool:
        """True if several ranks get nothing until samples are counted; see `check_even`."""
        if self.global_batch_size is not None or self.is_global:
            return True
        return self.even is not None and self.samples_per_epoch is None

    @property
    def is_global(self) -> bool:
        """True if all samples of a dataset are permuted."""
        return self.shuffle is not None and self.shuffle.is_global

    def batch_size_of(self, world_size: int) -> int:
        """Return the number of samples in a batch of each rank. Raises ConfigError."""
        if self.global_batch_size is None:
            return self.batch_size
        return batch_size_of_rank(self.global_batch_size, world_size)

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal of a manifest's samples or shards. Raises ConfigError.

        Args:
            manifest: of the dataset.
            counted: True to deal samples, False to deal whole shards, None to deal samples if they
                are counted.
        """
        is_counted = manifest.counts is not None
        deals_samples = is_counted if counted is None else counted
        can_number_samples = deals_samples and is_counted
        if self.global_batch_size is not None and not can_number_samples:
            raise manifest.uncounted_error("global_batch_size needs the number of samples")
        if self.is_global and not can_number_samples:
            raise ConfigError(
                'shuffle="global" permutes all samples, and those of '
                f"{manifest.uncounted} of {len(manifest)} shards were never counted",
                remedy="count them once with `shardcache index URL... -o index.json --samples`, "
                "and use index.json as the url",
            )

        if not deals_samples:
            return ShardDeal(
                len(manifest), self.shuffle, self.even, self.batch_size, self.samples_per_epoch
            )
        if manifest.counts is None:
            raise ConfigError(
                "cannot resume this epoch: the sample counts of "
                f"{manifest.uncounted} shards are no longer known",
                remedy="count them: shardcache index URL... -o FILE",
            )
        if not manifest.samples:
            raise ConfigError("the shards contain no samples")
        deal = SampleDeal(
            manifest.counts, self.shuffle, self.even, self.batch_size, self.samples_per_epoch
        )
        return self._in_global_batches(deal)

    def _in_global_batches(self, deal: SpanDeal) -> SpanDeal:
        """Return a deal of global batches, whose spans are those of `deal`, if there are any."""
        if self.global_batch_size is None:
            return deal
        return ElasticDeal(deal, self.global_batch_size, self.spans)

    @property
    def _identity(self) -> list[object]:
        """Further facts that datasets with interchangeable states have in common."""
        facts: list[object] = []
        if self.global_batch_size is not None:
            facts += [self.global_batch_size, self.spans, self.even]
        if self.unit:
            facts.append(self.unit)
        return facts

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return identifiers that are equal for datasets with interchangeable states.

        Each has 16 hexadecimal digits. The one under False identifies states of dealt shards; the
        one under True, if samples are counted, states of dealt samples. A selection always deals
        samples.
        """
        facts: list[object] = [
            manifest.objects,
            repr(self.shuffle),
            self.samples_per_epoch,
            *self._identity,
        ]
        if manifest.choices is not None:
            return {True: digest([*facts, manifest.counts, manifest.selection])}
        digests = {False: digest(facts)}
        if manifest.counts is not None:
            digests[True] = digest([*facts, manifest.counts])
        return digests


def digest(facts: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON value."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def check_even(deal: Deal, topology: Topology, even: Even) -> None:
    """Check that ranks get the same number of samples if they should, and that they get any.

    Raises ConfigError if not.
    """
    if even is None:
        return
    size = deal.rank_size(topology)
    if size is None and topology.world_size > 1:
        raise ConfigError(
            f"{topology.world_size} ranks cannot get the same number of samples: "
            "the shards' samples are not counted",
            remedy="count them once with `shardcache index URL... -o index.json`, and use "
            "index.json as the url; or set samples_per_epoch; or even=None if ranks may differ, "
            "as for inference",
        )
    drops_all = even == "drop" and size == 0
    if not drops_all:
        return
    if isinstance(deal, ElasticDeal):
        raise ConfigError(
            f"global_batch_size={deal.global_batch_size} is larger than an epoch of "
            f"{deal.epoch_samples} samples, so even='drop' drops all of them",
            remedy="use even='pad', or a smaller global_batch_size",
        )
    raise ConfigError(
        f"there are fewer samples than ranks ({topology.world_size}), "
        "so even='drop' drops all of them",
        remedy="use even='pad', or fewer ranks",
    )
