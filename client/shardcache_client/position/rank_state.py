"""The state of a rank in checkpoints. Pure.

Ranks are in step if each has taken the same number of batches: then the state of one rank stands
for all. With `even=None`, ranks have different numbers of samples and may be out of step: then a
state has the progress of its rank alone, and the states of all ranks may be needed to resume.

With a plain DataLoader, a worker takes a state of its own. It has the worker's part: the batches
that this worker has given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.topology import Topology
from shardcache_client.position.mixture_state import Terms, mixture_from_json, mixture_to_json
from shardcache_client.position.progress import BatchPhase, Progress
from shardcache_client.position.state_values import (
    MAX_READERS,
    count,
    flag,
    invalid_state,
    named_numbers,
    not_of_one_moment,
    whole_number,
)


class WorkerPart(NamedTuple):
    """Batches that a worker of a plain DataLoader has given after the state's progress.

    The worker gives every `workers`-th batch of the rank.

    Attributes:
        worker: number of the worker, from 0.
        workers: number of workers of the rank.
        batch_size: number of samples in a whole batch.
        samples: number of samples that the worker has given; its last batch may have been short.
    """

    worker: int
    workers: int
    batch_size: int
    samples: int


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, or of one of its workers in a plain DataLoader.

    Attributes:
        dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends on.
        progress: progress of all ranks, or of this rank alone if they are not in step.
        over: True if no rank has a further batch in the epoch.
        rank: number of the rank that took the state, and number of ranks; None if the state stands
            for all ranks at any time.
        ended: True if this rank has no further batch in the epoch.
        in_step: False near the end of an epoch, if other ranks may have one batch more or less left
            than this rank. In the states of a rank's workers, it is then False for each worker
            without a further batch, so that all of them are False once the rank has none.
        part: part of a worker; None for the whole rank.
        mixture: the mixture in this epoch; None for a dataset that is not a mixture.
        seeds: the seeds that were drawn at random, by name of the source. A dataset that is not a
            mixture has its seed under "".
    """

    dataset: str
    progress: Progress
    over: bool = False
    rank: tuple[int, int] | None = None
    ended: bool = False
    in_step: bool = True
    part: WorkerPart | None = None
    mixture: MixtureState | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)

    counted: ClassVar[bool] = True  # see `StagedState`: samples that have numbers are counted

    @property
    def epoch(self) -> int:
        """The epoch being read."""
        return self.progress.epoch

    @property
    def terms(self) -> Terms:
        """The seeds and the mixture's latest change, of the run that took the state."""
        return Terms.of_state(self.seeds, self.mixture)

    @property
    def moment(self) -> object:
        """The facts that are equal for all states of one moment of a job.

        The phases are left out for ranks that may not be in step, as these have come to different
        places. `progress_of` compares the phases of these ranks.
        """
        phases: tuple[BatchPhase, ...] = ()
        # The phases in a worker's state are those with which all workers began.
        if self.rank is None or self.part is not None:
            phases = self.progress.phases
        workers_and_batch_size = None
        if self.part is not None:
            workers_and_batch_size = (self.part.workers, self.part.batch_size)
        return "ranks", self.dataset, self.epoch, phases, workers_and_batch_size

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads: a few numbers, which a person can read."""
        data = self.progress.to_json(self.dataset)
        for name in ("over", "ended", "rank", "part", "seeds"):
            value = getattr(self, name)
            if value:
                data[name] = list(value) if isinstance(value, tuple) else value
        if not self.in_step:
            data["in_step"] = False
        return data | mixture_to_json(self.mixture)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from the dict of `to_json`. Raises ConfigError for anything else."""
        progress, dataset = Progress.from_json(data)
        try:
            return cls(
                dataset,
                progress,
                over=flag(data.get("over", False)),
                rank=_rank_from_json(data.get("rank")),
                ended=flag(data.get("ended", False)),
                in_step=flag(data.get("in_step", True)),
                part=_part_from_json(data.get("part")),
                mixture=mixture_from_json(data),
                seeds=named_numbers(data.get("seeds", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise invalid_state(exn) from exn


@dataclass(frozen=True, slots=True)
class StateForm:
    """The facts that all states of a dataset share.

    Attributes:
        dataset: identifier of the dataset; see `RankState`.
        deal: division of the dataset's samples among readers.
        batch_size: number of samples in a batch of a rank.
        drop_last: True if a loader leaves out a short last batch; None if that is unknown.
        seeds: see `RankState`.
    """

    dataset: str
    deal: SpanDeal
    batch_size: int
    drop_last: bool | None
    seeds: Mapping[str, int]

    def state(
        self,
        progress: Progress,
        topology: Topology,
        *,
        ended: bool,
        over: bool,
        left: int,
        part: WorkerPart | None = None,
    ) -> RankState:
        """Return the state of a rank, or of its worker.

        Args:
            progress: see `RankState`.
            topology: the rank.
            ended: True if the rank has nothing left of the epoch.
            over: True if no rank has anything left of the epoch.
            left: number of samples that the rank, or its worker, has left.
            part: part of a worker; None for the whole rank.
        """
        # Ranks differ in their numbers of samples only with `even=None`.
        may_differ = self.deal.even is None and topology.world_size > 1
        rank = None
        if may_differ or part is not None:
            rank = (topology.rank, topology.world_size)

        in_step = True
        if may_differ and not over:
            # All ranks take equally many batches until one of them has none left.
            in_step = self._has_batch(left) or self.ends_together(progress, topology)

        return RankState(
            self.dataset,
            progress,
            over=over,
            rank=rank,
            ended=ended and may_differ,  # otherwise the progress shows it: see `is_read`
            in_step=in_step,
            part=part,
            mixture=self.deal.mixture_of(progress.epoch),
            seeds=self.seeds,
        )

    def _has_batch(self, left: int) -> bool:
        """Return True if a rank, or its worker, is known to have a further batch; see `state`."""
        if self.drop_last is False:
            return left > 0
        return left >= self.batch_size

    def ends_together(self, progress: Progress, topology: Topology) -> bool:
        """Return True if all ranks are known to end the epoch after the same number of batches."""
        if topology.world_size == 1:
            return True
        partition = replace(self.deal.partition(topology), batch_size=self.batch_size)
        epoch = progress.epoch
        phases = progress.start_of(self.deal, topology).phases
        possible = (False, True) if self.drop_last is None else (self.drop_last,)
        return all(
            self.deal.ends_together(epoch, partition, phases, drop_last=drop_last)
            for drop_last in possible
        )


def _rank_from_json(value: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a state names; None if it names none."""
    if value is None:
        return None
    rank, ranks = value
    ranks = whole_number(ranks, 1, MAX_READERS)
    return whole_number(rank, 0, ranks - 1), ranks


def _part_from_json(value: Any) -> WorkerPart | None:
    """Return the part of a worker that a state describes; None if it describes none."""
    if value is None:
        return None
    worker, workers, batch_size, samples = value
    workers = whole_number(workers, 1, MAX_READERS)
    return WorkerPart(
        whole_number(worker, 0, workers - 1),
        workers,
        count(batch_size, 1),
        count(samples),
    )


def progress_of(states: Sequence[RankState], topology: Topology) -> Progress:
    """Return the progress from which a rank resumes, given the states of ranks or of their workers.

    Raises ConfigError if the progress cannot be derived from these states.
    """
    _check_moment(states)
    own = [state for state in states if state.rank == (topology.rank, topology.world_size)]
    if own:
        return _progress_of_rank(own).of_rank(topology.rank)
    return progress_of_all(states)


def progress_of_all(states: Sequence[RankState]) -> Progress:
    """Return the progress of all ranks, given the states of some ranks or of their workers.

    Raises ConfigError if the progress cannot be derived from these states.
    """
    _check_moment(states)
    by_rank: dict[tuple[int, int] | None, list[RankState]] = {}
    for state in states:
        by_rank.setdefault(state.rank, []).append(state)
    progresses = {rank: _progress_of_rank(of_rank) for rank, of_rank in by_rank.items()}
    progress = next(iter(progresses.values()))

    # 1. A state without a rank's number comes from ranks that are always in step, and so stands for
    # all of them.
    first_rank = states[0].rank
    if first_rank is None or None in progresses:
        return progress

    # 2. Some ranks' states are missing. They must be known to be at the same place as the others.
    _, ranks = first_rank
    if len(progresses) < ranks:
        # A rank has a further batch as long as one of its workers has.
        are_in_step = all(any(state.in_step for state in of_rank) for of_rank in by_rank.values())
        if are_in_step and len(set(progresses.values())) == 1:
            return progress
        raise ConfigError(
            "the states of some ranks do not say how far the others are",
            remedy="load the states of all ranks",
        )

    # 3. There are states of all ranks.
    by_number = [progresses[rank, ranks] for rank in range(ranks)]
    if len(set(by_number)) == 1:
        return progress
    return _progress_out_of_step(by_number)


def _check_moment(states: Sequence[RankState]) -> None:
    """Raise ConfigError unless all states are of one moment."""
    if len({state.moment for state in states}) > 1:
        raise not_of_one_moment()


def _progress_out_of_step(progresses: Sequence[Progress]) -> Progress:
    """Return the progress of ranks that have come to different places in the last phase.

    Args:
        progresses: the progress of each rank. They differ only in the last phase, which some ranks
            may not have begun.
    """
    ranks = len(progresses)
    earlier = progresses[0].phases
    if earlier and earlier[-1].ranks == ranks:
        earlier = earlier[:-1]

    before = len(earlier)
    for progress in progresses:
        if progress.phases[:before] != earlier or len(progress.phases) > before + 1:
            raise not_of_one_moment()

    taken = []
    for rank, progress in enumerate(progresses):
        last = progress.phases[before:]
        taken.append(last[0].samples(rank) if last else 0)
    # The last phase is counted in batches of one sample, with a number for each rank.
    return replace(progresses[0], phases=(*earlier, BatchPhase(ranks, 1, tuple(taken))))


def _progress_of_rank(states: Sequence[RankState]) -> Progress:
    """Return the progress of a rank from its state, or from the states of all its workers."""
    first = states[0]
    if first.part is None:
        return first.progress
    parts = {state.part.worker: state.part for state in states if state.part is not None}
    if len(parts) < first.part.workers:
        missing = first.part.workers - len(parts)
        raise ConfigError(
            f"the states of {missing} of {first.part.workers} workers are missing",
            remedy="load the loader's whole state, with all of its workers",
        )
    if first.rank is None:
        raise ConfigError(
            "the state of a worker names no ranks",
            remedy="load what state_dict() has returned",
        )
    _, ranks = first.rank
    samples = sum(part.samples for part in parts.values())
    return first.progress.after_samples(ranks, first.part.batch_size, samples)


def is_read(states: Sequence[RankState], deal: SpanDeal, topology: Topology) -> bool:
    """Return True if states show that nothing is left of their epoch on any rank.

    Args:
        states: the states, all of one moment.
        deal: division of the epoch among the ranks.
        topology: the rank that resumes.
    """
    first = states[0]
    if first.rank is not None and first.part is None:
        # These ranks may have different numbers of batches, so the state of each has to say that
        # the rank has ended.
        _, ranks = first.rank
        has_all_ranks = len({state.rank for state in states}) == ranks
        return has_all_ranks and all(state.ended for state in states)
    try:
        progress = progress_of(states, topology)
    except ConfigError:
        return False
    last_ranks = progress.phases[-1].ranks if progress.phases else topology.world_size
    return progress.is_over(deal, Topology(0, last_ranks))
