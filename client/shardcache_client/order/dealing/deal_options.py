"""Options of a dataset that say how its samples are dealt, and the deal that they make. Pure.

A deal divides the samples of each epoch among the readers, which are ranks or their workers. The
dataset makes the options from its arguments. Once the shards are known, the options make the deal,
and the identifiers by which a state is recognized as one of the same dataset.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import Deal, SampleDeal, ShardDeal, SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal, batch_size_of_rank
from shardcache_client.order.sequences.partition import Even
from shardcache_client.order.sequences.permutations import Shuffle
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.order.sources.changes import Change
from shardcache_client.order.topology import Topology


@dataclass(frozen=True, slots=True)
class DealOptions:
    """Options of a dataset for its deal.

    Attributes:
        shuffle: None to read in the order of the shards.
        even: policy for a number of samples that the ranks do not divide.
        batch_size: number of samples in a batch of each rank.
        samples_per_epoch: number of samples of an epoch over all ranks; None for as many as the
            dataset has.
        global_batch_size: number of samples in a batch of all ranks together; None if each rank
            reads a span of its own instead.
        spans: number of spans of the epoch, each of which gives an equal part to every global
            batch; unused without global batches.
        unit: description of the samples if they are not the tars' own, such as blocks of tokens;
            empty if they are.
    """

    shuffle: Shuffle | None = None
    even: Even = "pad"
    batch_size: int = 1
    samples_per_epoch: int | None = None
    global_batch_size: int | None = None
    spans: int = 1
    unit: str = ""

    def reseeded(self, seeds: Mapping[str, int]) -> Self:
        """Return these options with other seeds.

        Args:
            seeds: the seeds by name of the source. A dataset that is not a mixture has its seed
                under "". A source that is missing keeps its seed.
        """
        if self.shuffle is None:
            return self
        seed = seeds.get("", self.shuffle.seed)
        return replace(self, shuffle=replace(self.shuffle, seed=seed))

    def common_options(self) -> dict[str, object]:
        """Return the options that must be the same on all ranks, by the names of the arguments."""
        return {
            "shuffle, shuffle_window, seed or canonical_nodes": self.shuffle,
            "even": self.even,
            "samples_per_epoch": self.samples_per_epoch,
            "global_batch_size": self.global_batch_size,
        }

    def common_batch_options(self) -> dict[str, object]:
        """Return further options that must be the same on ranks that train together.

        If these agree, all ranks end an epoch after the same number of batches.
        """
        if self.even is None:
            # Ranks may end an epoch after different numbers of batches.
            return {}
        if self.batch_size <= 1:
            # This is the default, with which a DataLoader may make batches of any size.
            return {}
        return {"batch_size": self.batch_size}

    @property
    def has_source_batches(self) -> bool:
        """True if each batch of a mixture is of one source. `MixtureOptions` overrides this."""
        return False

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources. A dataset that is not a mixture has a single source, named ""."""
        return ("",)

    @property
    def change(self) -> Change | None:
        """The latest change of a mixture's sources or weights; None if there was no change."""
        return None

    def after(self, change: Change | None) -> Self:
        """Return these options after a change of a mixture. `MixtureOptions` overrides this.

        Args:
            change: the change that a state has recorded; None if it has recorded none.
        """
        return self

    @property
    def fixes_batch_size(self) -> bool:
        """True if the batch size determines which samples come together in a batch.

        A loader must then use this dataset's batch size and no other.
        """
        return self.global_batch_size is not None

    @property
    def needs_counts(self) -> bool:
        """True if all samples must be counted before several ranks can read.

        Without the counts, ranks cannot be given equal numbers of samples.
        """
        if self.global_batch_size is not None or self.is_global:
            return True
        return self.even is not None and self.samples_per_epoch is None

    @property
    def is_global(self) -> bool:
        """True if all samples of the dataset are permuted, and not only samples of a window."""
        return self.shuffle is not None and self.shuffle.is_global

    def batch_size_of(self, world_size: int) -> int:
        """Return the number of samples in a batch of each rank. Raises ConfigError."""
        if self.global_batch_size is None:
            return self.batch_size
        return batch_size_of_rank(self.global_batch_size, world_size)

    def deal(self, manifest: Manifest, *, counted: bool | None = None) -> Deal:
        """Return the deal of a manifest's samples or shards. Raises ConfigError.

        Args:
            manifest: the shards of the dataset.
            counted: True to deal samples, False to deal whole shards. None deals samples if all
                shards are counted, and whole shards otherwise.
        """
        if counted is None:
            counted = manifest.counts is not None
        if not counted or manifest.counts is None:
            self._check_without_counts(manifest)

        if not counted:
            return ShardDeal(
                len(manifest),
                shuffle=self.shuffle,
                even=self.even,
                batch_size=self.batch_size,
                samples_per_epoch=self.samples_per_epoch,
            )
        if manifest.counts is None:
            # `counted` is True only for a state that was saved while all shards were counted.
            raise ConfigError(
                "cannot resume this epoch: the sample counts of "
                f"{manifest.uncounted} shards are no longer known",
                remedy="count them: shardcache index URL... -o FILE",
            )
        if not manifest.samples:
            raise ConfigError("the shards contain no samples")
        deal = SampleDeal(
            manifest.counts,
            shuffle=self.shuffle,
            even=self.even,
            batch_size=self.batch_size,
            samples_per_epoch=self.samples_per_epoch,
        )
        return self._in_global_batches(deal)

    def _check_without_counts(self, manifest: Manifest) -> None:
        """Raise ConfigError if these options need the samples to be counted."""
        if self.global_batch_size is not None:
            raise manifest.uncounted_error("global_batch_size needs the number of samples")
        if self.is_global:
            raise ConfigError(
                'shuffle="global" permutes all samples, and those of '
                f"{manifest.uncounted} of {len(manifest)} shards were never counted",
                remedy="count them once with `shardcache index URL... -o index.json --samples`, "
                "and use index.json as the url",
            )

    def _in_global_batches(self, deal: SpanDeal) -> SpanDeal:
        """Return a deal of global batches made from `deal`, or `deal` itself without such batches.

        The samples of each span come in the order of `deal`.
        """
        if self.global_batch_size is None:
            return deal
        return ElasticDeal(deal, self.global_batch_size, span_count=self.spans)

    @property
    def _identity(self) -> list[object]:
        """Further facts in which datasets must agree for one to read the other's states."""
        facts: list[object] = []
        if self.global_batch_size is not None:
            facts += [self.global_batch_size, self.spans, self.even]
        if self.unit:
            facts.append(self.unit)
        return facts

    def identities(self, manifest: Manifest) -> dict[bool, str]:
        """Return identifiers that are equal for datasets that can read each other's states.

        Each identifier has 16 hexadecimal digits. The identifier under False is for states of dealt
        shards. The identifier under True is for states of dealt samples, and is left out if samples
        are not counted. A selection of samples has only the latter.
        """
        facts: list[object] = [
            manifest.objects,
            repr(self.shuffle),
            self.samples_per_epoch,
            *self._identity,
        ]
        selection = manifest.selection
        if selection:
            return {True: digest([*facts, manifest.counts, selection])}
        digests = {False: digest(facts)}
        if manifest.counts is not None:
            digests[True] = digest([*facts, manifest.counts])
        return digests


def digest(facts: object) -> str:
    """Return 16 hexadecimal digits that identify a JSON value."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def check_even(deal: Deal, topology: Topology) -> None:
    """Check that all ranks get the same number of samples, and at least one sample.

    Raises ConfigError if they do not. Nothing is checked for a deal with `even=None`, which may
    give the ranks different numbers.

    Args:
        deal: division of the epochs.
        topology: any rank of the job.
    """
    if deal.even is None:
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
    drops_all = deal.even == "drop" and size == 0
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
