"""The progress of a job in an epoch, counted in batches. States in checkpoints contain it. Pure.

A deal divides the samples of an epoch among ranks; a rank's part is its share. An `ElasticDeal`
divides each global batch, which is a batch of all ranks together.

A phase is a part of an epoch that the same ranks have read. Another phase begins if the job resumes
with another number of ranks, among which the rest of the epoch is divided again.

Ranks are in step if all have taken equally many batches, as they usually have. Then three numbers
for each phase tell what each rank has read: `BatchPhase(4, 32, 100)` means that each of 4 ranks has
taken 100 batches of 32 samples.

A place is the number of a sample in a rank's share of a phase. A rank passes the places of the
samples that it takes, and of bad samples that it leaves out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.dealing.elastic_deal import ElasticDeal
from shardcache_client.order.sequences.partition import Even, Partition, Phase
from shardcache_client.order.topology import Topology
from shardcache_client.position.state_values import (
    FORMAT_KEY,
    MAX_READERS,
    checked_count,
    checked_hexadecimal,
    checked_integer,
    invalid_state,
)

_FORMAT = 3  # number of the format of states
_IDENTIFIER = re.compile(r"[0-9a-f]{16}")  # a dataset's identifier


class BatchPhase(NamedTuple):
    """A part of an epoch that the same ranks have read.

    Attributes:
        ranks: number of ranks.
        batch_size: number of samples in a batch of each rank.
        batches: number of batches that each rank has taken; a tuple with a number for each rank if
            they were not in step.
        beyond: for each rank, the places after its batches that it has passed out of order, as bits
            in hexadecimal: bit n stands for place n after the batches. Empty if there are none on
            any rank.
    """

    ranks: int
    batch_size: int
    batches: int | tuple[int, ...]
    beyond: tuple[str, ...] = ()

    def samples(self, rank: int) -> int:
        """Return the number of places in a rank's batches, counting each batch as whole.

        The number exceeds the rank's share if the rank's last batch was short.
        """
        batches = self.batches if isinstance(self.batches, int) else self.batches[rank]
        return self.batch_size * batches


@dataclass(frozen=True, slots=True)
class Progress:
    """An epoch, and the phases in which it has been read so far.

    Attributes:
        epoch: number of the epoch.
        phases: the phases, in order; empty if the epoch was not begun.
    """

    epoch: int = 0
    phases: tuple[BatchPhase, ...] = ()

    def after(self, ranks: int, batch_size: int, batches: int) -> Self:
        """Return the progress after each of `ranks` ranks has taken further batches.

        The batches are added to the last phase if it has the same number of ranks, and no `beyond`.
        Otherwise they begin another phase.

        Args:
            ranks: number of ranks.
            batch_size: number of samples in a batch of each rank.
            batches: number of batches that each rank has taken.
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

        The places are counted in batches of `batch_size`, or in batches of one sample if they do
        not make whole batches.

        Args:
            ranks: number of ranks.
            batch_size: number of samples in a batch of each rank.
            samples: number of places that each rank has passed.
        """
        if samples % batch_size:
            return self.after(ranks, batch_size=1, batches=samples)
        return self.after(ranks, batch_size, samples // batch_size)

    def of_rank(self, rank: int) -> Self:
        """Return the progress of one rank.

        If the ranks are not in step, the last phase has a tuple of numbers, which the rank's own
        number replaces. Otherwise this is the progress itself.
        """
        if not self.phases:
            return self
        *phases, last = self.phases
        if isinstance(last.batches, int):
            return self
        batches = last.batches[rank]
        if batches:
            phases.append(last._replace(batches=batches))
        return replace(self, phases=tuple(phases))

    def start_of(self, deal: SpanDeal, topology: Topology) -> "Start":
        """Return the place at which a rank resumes. The number of ranks may have changed."""
        if isinstance(deal, ElasticDeal):
            # Global batches are the same for any number of ranks, so the epoch is not divided
            # again. All phases together are a number of places that the rank has passed.
            return Start(phases=(), passed=self._passed_of_global_batches(deal, topology))
        phases = self.phases
        passed = 0
        # The same ranks continue the last phase, each after its own batches. If some places after
        # the batches were passed out of order, the rest is divided again, without these places.
        if phases and phases[-1].ranks == topology.world_size and not phases[-1].beyond:
            passed = phases[-1].samples(topology.rank)
            phases = phases[:-1]
        return Start(tuple(past_phase(phase, deal.even) for phase in phases), passed)

    def past(self, even: Even) -> tuple[Phase, ...]:
        """Return all phases as phases that are over, even if the same ranks resume.

        The rest of the epoch is then divided again.

        Args:
            even: policy for a number of samples that is not a multiple of the number of ranks.
        """
        return tuple(past_phase(phase, even) for phase in self.phases)

    def is_over(self, deal: SpanDeal, topology: Topology) -> bool:
        """Return True if none of the topology's ranks has anything left of the epoch."""
        if isinstance(deal, ElasticDeal):
            return self.global_batches(deal) >= deal.batches_in(self.epoch)
        world_size = topology.world_size
        return all(self._has_ended(deal, Topology(rank, world_size)) for rank in range(world_size))

    def global_batches(self, deal: ElasticDeal) -> int:
        """Return the number of global batches taken; a batch that was only begun does not count."""
        size = deal.global_batch_size
        # Ranks take global batches in step, so rank 0 stands for all ranks.
        return sum(phase.ranks * phase.samples(0) // size for phase in self.phases)

    def _has_ended(self, deal: SpanDeal, topology: Topology) -> bool:
        """Return True if a rank has nothing left of the epoch."""
        start = self.start_of(deal, topology)
        share = deal.share(self.epoch, topology, phases=start.phases)
        return share.samples <= start.passed

    def _passed_of_global_batches(self, deal: ElasticDeal, topology: Topology) -> int:
        """Return the number of places that a rank has passed in its parts of global batches.

        If the number of ranks has not changed, the places in a batch that was only begun count as
        well. Otherwise that batch is read again.
        """
        part_size = deal.partition(topology).batch_size
        if not self.phases or self.phases[-1].ranks != topology.world_size:
            return self.global_batches(deal) * part_size
        before = replace(self, phases=self.phases[:-1])
        return before.global_batches(deal) * part_size + self.phases[-1].samples(topology.rank)

    def to_json(self, dataset: str) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads.

        The object has less than 300 bytes, unless the number of ranks has changed ten times.

        Args:
            dataset: 16 hexadecimal digits that identify the dataset and everything on which its
                order depends.
        """
        phases = []
        for phase in self.phases:
            values = list(phase)
            # `beyond` is the last field, and left out if it is empty.
            if not phase.beyond:
                values.pop()
            phases.append(values)
        return {FORMAT_KEY: _FORMAT, "dataset": dataset, "epoch": self.epoch, "phases": phases}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> tuple[Self, str]:
        """Return the progress and the dataset's identifier.

        Raises ConfigError for an object that `to_json` does not return.
        """
        state_format = data.get(FORMAT_KEY)
        if state_format != _FORMAT:
            raise ConfigError(
                f"the state has format {state_format!r}; this version reads {_FORMAT}",
                remedy="begin at the start of an epoch: set_epoch(n), without a state",
            )
        try:
            dataset = data["dataset"]
            if not _IDENTIFIER.fullmatch(dataset):
                raise ValueError("the dataset is not 16 hexadecimal digits")
            if not isinstance(data["phases"], list | tuple):
                raise TypeError("the phases are not a list")
            phases = tuple(phase_of(*numbers) for numbers in data["phases"])
            return cls(checked_count(data["epoch"]), phases), dataset
        except (KeyError, TypeError, ValueError) as exn:
            raise invalid_state(exn) from exn


class Start(NamedTuple):
    """Place at which a rank resumes an epoch.

    Attributes:
        phases: phases that are over. What they have left of the epoch is divided among the ranks.
        passed: number of places that the rank has passed in its share of this rest.
    """

    phases: tuple[Phase, ...]
    passed: int


def _continued(phase: BatchPhase, further: BatchPhase) -> BatchPhase:
    """Return two consecutive phases of the same ranks as a single phase.

    If the batch sizes differ, or the ranks are not in step, it counts each sample as a batch.
    """
    if isinstance(phase.batches, int) and isinstance(further.batches, int):
        if phase.batch_size == further.batch_size:
            return phase._replace(batches=phase.batches + further.batches)
        samples_per_rank = phase.samples(rank=0) + further.samples(rank=0)
        return BatchPhase(phase.ranks, batch_size=1, batches=samples_per_rank)
    samples = tuple(phase.samples(rank) + further.samples(rank) for rank in range(phase.ranks))
    return BatchPhase(phase.ranks, batch_size=1, batches=samples)


def past_phase(phase: BatchPhase, even: Even) -> Phase:
    """Return a phase that is over, counted in samples, as `SpanDeal.share` takes it.

    Args:
        phase: the phase, counted in batches.
        even: policy for a number of samples that is not a multiple of the number of ranks.
    """
    # In a `Phase`, a tuple of a single number stands for all ranks.
    taken: tuple[int, ...]
    if isinstance(phase.batches, int):
        taken = (phase.samples(rank=0),)
    else:
        taken = tuple(phase.samples(rank) for rank in range(phase.ranks))
    return Phase(Partition(phase.ranks, even), taken, phase.beyond)


def phase_of(ranks: object, batch_size: object, batches: object, beyond: object = ()) -> BatchPhase:
    """Return the phase that a state describes; the arguments are the values in the state.

    Raises TypeError or ValueError for values of another form.
    """
    rank_count = checked_integer(ranks, 1, MAX_READERS)
    size = checked_count(batch_size, minimum=1)
    if not isinstance(beyond, list | tuple) or len(beyond) not in (0, rank_count):
        raise ValueError("a phase has bits of places for other ranks than its own")
    bits = tuple(map(checked_hexadecimal, beyond))
    if not isinstance(batches, list | tuple):
        # In the first group of a stage, a reader may have passed only places out of order.
        minimum = 0 if bits else 1
        return BatchPhase(rank_count, size, checked_count(batches, minimum), bits)
    batches_by_rank = tuple(checked_count(number) for number in batches)
    if len(batches_by_rank) != rank_count:
        raise ValueError("a phase has numbers of batches for other ranks than its own")
    return BatchPhase(rank_count, size, batches_by_rank, bits)
