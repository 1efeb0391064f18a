"""The progress of a job in its epochs, as numbers of batches: the state in which checkpoints hold it. Pure.

All ranks take their batches in step, so that a few numbers say what each of them has read: an epoch, and for each group
of ranks that has read a part of it, how many batches of which size each of these ranks has taken.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order import rounds
from shardcache_client.order.deal import ElasticDeal, SpanDeal
from shardcache_client.order.rounds import Partition, Topology

_MARK = "shardcache"
_FORMAT = 3
_MAX_RANKS = 1 << 20
_MAX_COUNT = 1 << 62
_DIGITS = re.compile(r"[0-9a-f]{16}")


class BatchPhase(NamedTuple):
    """A part of an epoch that the same ranks have read."""

    ranks: int
    batch_size: int  # of each rank
    batches: int  # that each rank has taken

    @property
    def samples(self) -> int:
        """Number of places that each rank has passed, if its share had as many."""
        return self.batch_size * self.batches


@dataclass(frozen=True, slots=True)
class Progress:
    """An epoch, and the phases in which it has been read so far."""

    epoch: int = 0
    phases: tuple[BatchPhase, ...] = ()

    def after(self, ranks: int, batch_size: int, batches: int) -> Self:
        """Return the progress after each of so many ranks has taken further batches.

        A phase of the same ranks is continued, so that the number of phases is that of changes of ranks.
        """
        if not batches:
            return self
        phase = BatchPhase(ranks, batch_size, batches)
        if not self.phases or self.phases[-1].ranks != ranks:
            return replace(self, phases=(*self.phases, phase))
        return replace(self, phases=(*self.phases[:-1], _continued(self.phases[-1], phase)))

    def start_of(self, deal: SpanDeal, topology: Topology) -> "Start":
        """Return where a rank resumes, among ranks that may be others than those so far."""
        if isinstance(deal, ElasticDeal):
            size = deal.cut(topology).batch_size
            return Start((), self.global_batches(deal) * size)
        phases = self.phases
        passed = 0
        if phases and phases[-1].ranks == topology.world_size:
            passed = phases[-1].samples
            phases = phases[:-1]
        return Start(tuple(_divided(phase, deal.even) for phase in phases), passed)

    def is_over(self, deal: SpanDeal, topology: Topology) -> bool:
        """Return True if no rank has anything left of the epoch."""
        if isinstance(deal, ElasticDeal):
            return self.global_batches(deal) >= deal.batches
        start = self.start_of(deal, topology)
        ranks = (replace(topology, rank=rank) for rank in range(topology.world_size))
        return all((deal.share(self.epoch, 0, each, start.phases).samples or 0) <= start.passed for each in ranks)

    def global_batches(self, deal: ElasticDeal) -> int:
        """Return the number of global batches taken."""
        return sum(phase.ranks * phase.samples for phase in self.phases) // deal.global_batch_size

    def to_json(self, dataset: str) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads: below 300 bytes, unless the ranks have changed ten times.

        Args:
            dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends on.
        """
        return {_MARK: _FORMAT, "dataset": dataset, "epoch": self.epoch, "phases": [list(each) for each in self.phases]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> tuple[Self, str]:
        """Return the progress and the dataset's identifier. Raises ConfigError for what `to_json` has not made."""
        mark = data.get(_MARK)
        if mark != _FORMAT:
            raise ConfigError(
                f"the state has format {mark!r}; this version reads {_FORMAT}",
                remedy="begin at the start of an epoch: set_epoch(n), without a state",
            )
        try:
            dataset = data["dataset"]
            if not _DIGITS.fullmatch(dataset):
                raise ValueError("the dataset is not 16 hexadecimal digits")
            phases = tuple(_phase(*numbers) for numbers in data["phases"])
            return cls(_whole(data["epoch"], 0, _MAX_COUNT), phases), dataset
        except (KeyError, TypeError, ValueError) as exn:
            raise ConfigError(
                f"the state is invalid: {str(exn)[:200]}", remedy="load what state_dict() has returned"
            ) from exn


class Start(NamedTuple):
    """Place at which a rank resumes an epoch."""

    phases: tuple[rounds.Phase, ...]  # whose rest is divided among the ranks
    passed: int  # number of places of its share that the rank has passed


def _continued(phase: BatchPhase, further: BatchPhase) -> BatchPhase:
    if phase.batch_size == further.batch_size:
        return phase._replace(batches=phase.batches + further.batches)
    return BatchPhase(phase.ranks, 1, phase.samples + further.samples)


def _divided(phase: BatchPhase, even: rounds.Even) -> rounds.Phase:
    return rounds.Phase(Partition(phase.ranks, 1, even), (phase.samples,))


# States come from files that anyone may have written, and their values are used without any check but these.


def _phase(ranks: object, batch_size: object, batches: object) -> BatchPhase:
    return BatchPhase(_whole(ranks, 1, _MAX_RANKS), _whole(batch_size, 1, _MAX_COUNT), _whole(batches, 1, _MAX_COUNT))


def _whole(value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r} is not an integer from {least} to {most}")
    return value
