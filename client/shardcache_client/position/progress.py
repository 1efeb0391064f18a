"""The progress of a job in its epochs, as numbers of batches: checkpoints hold it. Pure.

All ranks take their batches in step, so that a few numbers say what each of them has read: an
epoch, and for each group of ranks that has read a part of it, how many batches of which size each
of these ranks has taken.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.position.state_values import (
    MARK,
    MAX_READERS,
    count,
    hexadecimal,
    invalid_state,
    whole_number,
)

_FORMAT = 3
_DIGITS = re.compile(r"[0-9a-f]{16}")


class BatchPhase(NamedTuple):
    """A part of an epoch that the same ranks have read.

    Attributes:
        ranks: number of ranks.
        batch_size: of each rank, in samples.
        batches: number of batches that each rank has taken; a tuple with the number of each rank,
            if they were not in step.
        beyond: of each rank, further places that it has passed: bits, in hexadecimal, with bit n
            for place n of those after its batches. Empty if there are none.
    """

    ranks: int
    batch_size: int
    batches: int | tuple[int, ...]
    beyond: tuple[str, ...] = ()

    def samples(self, rank: int) -> int:
        """Return the number of places in a rank's batches; more than its share if one was short."""
        batches = self.batches if isinstance(self.batches, int) else self.batches[rank]
        return self.batch_size * batches


@dataclass(frozen=True, slots=True)
class Progress:
    """An epoch, and the phases in which it has been read so far."""

    epoch: int = 0
    phases: tuple[BatchPhase, ...] = ()

    def after(self, ranks: int, batch_size: int, batches: int) -> Self:
        """Return the progress after each of `ranks` ranks has taken further batches.

        A phase of the same ranks is continued: another one begins only when the ranks change.
        """
        if not batches:
            return self
        phase = BatchPhase(ranks, batch_size, batches)
        if not self.phases:
            return replace(self, phases=(phase,))
        *earlier, last = self.phases
        if last.ranks != ranks or last.beyond:
            return replace(self, phases=(*self.phases, phase))
        return replace(self, phases=(*earlier, _continued(last, phase)))

    def after_samples(self, ranks: int, batch_size: int, samples: int) -> Self:
        """Return the progress after each rank has passed further places.

        It is kept in batches of `batch_size`, or of one sample if the places are not whole batches.
        """
        if samples % batch_size:
            return self.after(ranks, 1, samples)
        return self.after(ranks, batch_size, samples // batch_size)

    def of_rank(self, rank: int) -> Self:
        """Return the progress with the batches of this rank alone in the last phase.

        That is this progress, if ranks were in step.
        """
        if not self.phases:
            return self
        *phases, last = self.phases
        if isinstance(last.batches, int):  # in step
            return self
        batches = last.batches[rank]
        if batches:
            phases.append(last._replace(batches=batches))
        return replace(self, phases=tuple(phases))

    def start_of(self, deal: SpanDeal, topology: Topology) -> "Start":
        """Return the place at which a rank resumes, among the same ranks as so far or others."""
        if isinstance(deal, ElasticDeal):
            return Start((), self._passed_of_global_batches(deal, topology))
        phases = self.phases
        passed = 0
        if phases and phases[-1].ranks == topology.world_size and not phases[-1].beyond:
            passed = phases[-1].samples(topology.rank)
            phases = phases[:-1]
        return Start(tuple(past_phase(phase, deal.even) for phase in phases), passed)

    def past(self, even: Even) -> tuple[Phase, ...]:
        """Return all phases as past ones: none is continued, not even by the same ranks."""
        return tuple(past_phase(phase, even) for phase in self.phases)

    def is_over(self, deal: SpanDeal, topology: Topology) -> bool:
        """Return True if no rank has anything left of the epoch."""
        if isinstance(deal, ElasticDeal):
            return self.global_batches(deal) >= deal.batches_in(self.epoch)
        ranks = (Topology(rank, topology.world_size) for rank in range(topology.world_size))
        return all(self._has_ended(deal, each) for each in ranks)

    def global_batches(self, deal: ElasticDeal) -> int:
        """Return the number of global batches taken; one that was only begun is read again."""
        size = deal.global_batch_size
        # Ranks take global batches in step, so rank 0 stands for all.
        return sum(phase.ranks * phase.samples(0) // size for phase in self.phases)

    def _has_ended(self, deal: SpanDeal, topology: Topology) -> bool:
        start = self.start_of(deal, topology)
        share = deal.share(self.epoch, shift=0, topology=topology, phases=start.phases)
        return (share.samples or 0) <= start.passed

    def _passed_of_global_batches(self, deal: ElasticDeal, topology: Topology) -> int:
        """Return the number of places of global batches that a rank has passed.

        If the ranks are the same as before, those of a batch that was begun count as well.
        """
        size = deal.cut(topology).batch_size
        if not self.phases or self.phases[-1].ranks != topology.world_size:
            return self.global_batches(deal) * size
        before = replace(self, phases=self.phases[:-1])
        return before.global_batches(deal) * size + self.phases[-1].samples(topology.rank)

    def to_json(self, dataset: str) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads.

        It has less than 300 bytes, unless the ranks have changed ten times.

        Args:
            dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends
                on.
        """
        phases = []
        for phase in self.phases:
            values = list(phase)
            if not phase.beyond:  # the last field
                values.pop()
            phases.append(values)
        return {MARK: _FORMAT, "dataset": dataset, "epoch": self.epoch, "phases": phases}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> tuple[Self, str]:
        """Return the progress and the dataset's identifier.

        Raises ConfigError for what `to_json` has not made.
        """
        mark = data.get(MARK)
        if mark != _FORMAT:
            raise ConfigError(
                f"the state has format {mark!r}; this version reads {_FORMAT}",
                remedy="begin at the start of an epoch: set_epoch(n), without a state",
            )
        try:
            dataset = data["dataset"]
            if not _DIGITS.fullmatch(dataset):
                raise ValueError("the dataset is not 16 hexadecimal digits")
            if not isinstance(data["phases"], list | tuple):
                raise TypeError("the phases are not a list")
            phases = tuple(phase_of(*numbers) for numbers in data["phases"])
            return cls(count(data["epoch"]), phases), dataset
        except (KeyError, TypeError, ValueError) as exn:
            raise invalid_state(exn) from exn


class Start(NamedTuple):
    """Place at which a rank resumes an epoch.

    Attributes:
        phases: those that are over; the rest of the epoch is divided among the ranks.
        passed: number of places of its share of that rest that the rank has passed.
    """

    phases: tuple[Phase, ...]
    passed: int


def _continued(phase: BatchPhase, further: BatchPhase) -> BatchPhase:
    """Return a phase and a further one of the same ranks as one."""
    if isinstance(phase.batches, int) and isinstance(further.batches, int):
        if phase.batch_size == further.batch_size:
            return phase._replace(batches=phase.batches + further.batches)
        return BatchPhase(phase.ranks, 1, phase.samples(0) + further.samples(0))
    samples = tuple(phase.samples(rank) + further.samples(rank) for rank in range(phase.ranks))
    return BatchPhase(phase.ranks, 1, samples)


def past_phase(phase: BatchPhase, even: Even) -> Phase:
    """Return a phase that is over: the rest of the epoch is divided among other ranks."""
    taken: tuple[int, ...] = (phase.samples(0),)
    if not isinstance(phase.batches, int):
        taken = tuple(map(phase.samples, range(phase.ranks)))
    return Phase(Partition(phase.ranks, even), taken, phase.beyond)


def phase_of(ranks: object, batch_size: object, batches: object, beyond: object = ()) -> BatchPhase:
    """Return a phase of a state. Raises TypeError or ValueError for anything else."""
    number = whole_number(ranks, 1, MAX_READERS)
    size = count(batch_size, 1)
    if not isinstance(beyond, list | tuple) or len(beyond) not in (0, number):
        raise ValueError("a phase has bits of places for other ranks than its own")
    bits = tuple(map(hexadecimal, beyond))
    if not isinstance(batches, list | tuple):
        return BatchPhase(number, size, count(batches, 1), bits)
    each = tuple(count(taken) for taken in batches)
    if len(each) != number:
        raise ValueError("a phase has numbers of batches for other ranks than its own")
    return BatchPhase(number, size, each, bits)
