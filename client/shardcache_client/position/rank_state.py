"""The state of a rank in checkpoints. Pure.

Ranks are in step if each has taken the same number of batches. Then the state of one rank stands
for all. With `even=None`, ranks have different numbers of samples and may be out of step. Then a
state has the progress of its rank alone, and the states of all ranks may be needed to resume.

With a plain DataLoader, each worker saves a state. It has the worker's part: the batches that this
worker has given to the loader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.dealing.deal import SpanDeal
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.topology import Topology
from shardcache_client.position.mixture_state import Terms, mixture_from_json, mixture_to_json
from shardcache_client.position.progress import BatchPhase, Progress
from shardcache_client.position.state_values import (
    MAX_READERS,
    checked_count,
    checked_flag,
    checked_integer,
    checked_numbers,
    invalid_state,
    not_of_one_moment,
)


class WorkerPart(NamedTuple):
    """Batches that a worker of a plain DataLoader has given since the state's `progress`.

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
        dataset: 16 hexadecimal digits that identify the dataset and everything on which its order
            depends.
        progress: progress of all ranks, or of this rank alone if they are not in step.
        over: True if no rank has a further batch in the epoch.
        rank: number of the rank that saved the state, and number of ranks; None if the state always
            stands for all ranks.
        ended: True if this rank has no further batch in the epoch, and ranks may be out of step.
        in_step: False near the end of an epoch, if other ranks may have one batch more or less left
            than this rank. In a worker's state, it is False once the worker has no further batch.
            So once the rank has none, it is False in the states of all workers.
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

    counted: ClassVar[bool] = True  # as in `StagedState`: samples that have numbers are counted

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
        """A value that is equal for all states that a job saved at the same moment.

        Ranks that may not be in step are at different places, so their phases do not count here.
        `progress_of` compares them.
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
        """Return a JSON object that `from_json` reads, and a person can read as well."""
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
        """Return the state that a JSON object describes. Raises ConfigError if it is invalid."""
        progress, dataset = Progress.from_json(data)
        try:
            return cls(
                dataset,
                progress,
                over=checked_flag(data.get("over", False)),
                rank=_rank_from_json(data.get("rank")),
                ended=checked_flag(data.get("ended", False)),
                in_step=checked_flag(data.get("in_step", True)),
                part=_part_from_json(data.get("part")),
                mixture=mixture_from_json(data),
                seeds=checked_numbers(data.get("seeds", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise invalid_state(exn) from exn


@dataclass(frozen=True, slots=True)
class StateForm:
    """The values that all states of a dataset have in common.

    Attributes:
        dataset: identifier of the dataset; see `RankState`.
        deal: division of the dataset's samples among ranks.
        batch_size: number of samples in a batch of a rank.
        drop_last: True if a loader leaves out a short last batch; None if that is unknown.
        seeds: the drawn seeds; see `RankState`.
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
            progress: progress of all ranks, or of this rank alone if they are not in step.
            topology: number of the rank, and number of ranks.
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
            # All ranks take equally many batches until one of them has none left. So if this rank
            # has a further batch, all are in step.
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
        """Return True if a rank, or its worker, is known to have a further batch.

        Args:
            left: number of samples that it has left.
        """
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
        # If it is unknown whether a loader drops the last batch, this must be true in both cases.
        possibilities = (False, True) if self.drop_last is None else (self.drop_last,)
        return all(
            self.deal.ends_together(epoch, partition, phases, drop_last=drop_last)
            for drop_last in possibilities
        )


def _rank_from_json(value: Any) -> tuple[int, int] | None:
    """Return the rank and the number of ranks that a state names; None if it names none."""
    if value is None:
        return None
    rank, ranks = value
    ranks = checked_integer(ranks, 1, MAX_READERS)
    return checked_integer(rank, 0, ranks - 1), ranks


def _part_from_json(value: Any) -> WorkerPart | None:
    """Return the part of a worker that a state describes; None if it describes none."""
    if value is None:
        return None
    worker, workers, batch_size, samples = value
    workers = checked_integer(workers, 1, MAX_READERS)
    return WorkerPart(
        checked_integer(worker, 0, workers - 1),
        workers,
        checked_count(batch_size, minimum=1),
        checked_count(samples),
    )


def progress_of(states: Sequence[RankState], topology: Topology) -> Progress:
    """Return the progress from which a rank resumes, given the states of ranks or of their workers.

    Raises ConfigError if the progress cannot be derived from these states.
    """
    _check_moment(states)
    own_rank = (topology.rank, topology.world_size)
    own_states = [state for state in states if state.rank == own_rank]
    if own_states:
        return _progress_of_rank(own_states).of_rank(topology.rank)
    return progress_of_all(states)


def progress_of_all(states: Sequence[RankState]) -> Progress:
    """Return the progress of all ranks, given the states of all or some ranks or of their workers.

    Raises ConfigError if the progress cannot be derived from these states.
    """
    _check_moment(states)
    by_rank: dict[tuple[int, int] | None, list[RankState]] = {}
    for state in states:
        by_rank.setdefault(state.rank, []).append(state)
    progresses = {rank: _progress_of_rank(of_rank) for rank, of_rank in by_rank.items()}
    progress = next(iter(progresses.values()))

    # 1. A state without a rank stands for all ranks, as these are always in step.
    first_rank = states[0].rank
    if first_rank is None or None in progresses:
        return progress

    # 2. The states of some ranks are missing. These must be known to be in step with the others.
    _, ranks = first_rank
    if len(progresses) < ranks:
        # A rank is in step as long as one of its workers has a further batch.
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
    """Return the progress of ranks that are at different places of the last phase.

    Args:
        progresses: the progress of each rank. They differ only in the last phase, which some ranks
            may not have begun.
    """
    ranks = len(progresses)
    earlier = progresses[0].phases
    if earlier and earlier[-1].ranks == ranks:
        earlier = earlier[:-1]

    taken = []  # number of samples that each rank has taken in the last phase
    for rank, progress in enumerate(progresses):
        last = progress.phases[len(earlier) :]
        if progress.phases[: len(earlier)] != earlier or len(last) > 1:
            raise not_of_one_moment()
        taken.append(last[0].samples(rank) if last else 0)
    last_phase = BatchPhase(ranks, batch_size=1, batches=tuple(taken))
    return replace(progresses[0], phases=(*earlier, last_phase))


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
        states: the states, all saved at the same moment of a job.
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
