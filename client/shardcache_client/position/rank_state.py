"""The state of a rank in checkpoints: the progress of all ranks, or its own where they are not in step. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order.deal import SpanDeal
from shardcache_client.order.rounds import Topology
from shardcache_client.position.progress import BatchPhase, Progress, whole_number

_MAX_WORKERS = 1 << 20
_MAX_COUNT = 1 << 62


class WorkerPart(NamedTuple):
    """Batches that a worker of a plain DataLoader has given, since the progress: every `workers`-th of the rank's."""

    worker: int
    workers: int
    batch_size: int
    samples: int  # given, most of them in whole batches


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of a rank, or of one of its workers in a plain DataLoader.

    Attributes:
        dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends on.
        over: True if no rank has a further batch in the epoch.
        rank: of whoever took the state and the number of ranks, where these need not be in step; else None.
        ended: True if this rank has no further batch in the epoch.
        in_step: False if other ranks may have a batch more than this one, which has none left, or one less.
        part: of a worker; None for the whole rank.
        sources: of a mixture, by name: position in its endless sequence at the "start" of the epoch, and number of its
            "samples" in the epoch.
        seeds: those drawn, by source; that of a dataset alone is under "".
    """

    dataset: str
    progress: Progress
    over: bool = False
    rank: tuple[int, int] | None = None
    ended: bool = False
    in_step: bool = True
    part: WorkerPart | None = None
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)

    counted: ClassVar[bool] = True

    @property
    def epoch(self) -> int:
        """The epoch being read."""
        return self.progress.epoch

    @property
    def moment(self) -> object:
        """The same for all states of one moment; of ranks that are not in step, see `progress_of`."""
        same = self.progress.phases if self.rank is None or self.part is not None else ()
        return "ranks", self.dataset, self.epoch, same, self.part and self.part[1:3]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads: a few numbers, which a person can read."""
        data = self.progress.to_json(self.dataset)
        for name in ("over", "ended", "rank", "part", "sources", "seeds"):
            value = getattr(self, name)
            if value:
                data[name] = list(value) if isinstance(value, tuple) else value
        if not self.in_step:
            data["in_step"] = False
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from the dict of `to_json`. Raises ConfigError for anything else."""
        progress, dataset = Progress.from_json(data)
        try:
            return cls(
                dataset,
                progress,
                over=flag(data.get("over", False)),
                rank=_rank(data.get("rank")),
                ended=flag(data.get("ended", False)),
                in_step=flag(data.get("in_step", True)),
                part=_part(data.get("part")),
                sources={text(name): named_numbers(numbers) for name, numbers in data.get("sources", {}).items()},
                seeds=named_numbers(data.get("seeds", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise ConfigError(
                f"the state is invalid: {str(exn)[:200]}", remedy="load what state_dict() has returned"
            ) from exn


@dataclass(frozen=True, slots=True)
class StateForm:
    """The facts that all states of a dataset share.

    Attributes:
        dataset: its identifier.
        batch_size: number of samples in its batches.
        drop_last: True if a loader leaves out a short last batch; None if that is not known.
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
        left: int | None = None,
        part: WorkerPart | None = None,
    ) -> RankState:
        """Return the state of a rank, which has so many samples left, or of its worker."""
        may_differ = self.deal.even is None and topology.world_size > 1
        has_batch = left is None or self.drop_last is False or left >= self.batch_size
        return RankState(
            self.dataset,
            progress,
            over=over,
            rank=(topology.rank, topology.world_size) if may_differ or part else None,
            ended=ended and may_differ,
            in_step=over or not may_differ or has_batch or self.ends_together(progress, topology),
            part=part,
            sources=self.deal.sources_of(progress.epoch),
            seeds=self.seeds,
        )

    def ends_together(self, progress: Progress, topology: Topology) -> bool:
        """Return True if the epoch is known to end after the same number of batches on all ranks."""
        if topology.world_size == 1:
            return True
        cut = self.deal.cut(topology)
        if cut.batch_size != self.batch_size:
            cut = replace(cut, batch_size=self.batch_size)
        drops = (False, True) if self.drop_last is None else (self.drop_last,)
        phases = progress.start_of(self.deal, topology).phases
        return all(self.deal.ends_together(cut, phases, drop_last=drop) for drop in drops)


# States come from files that anyone may have written, and their values are used without any check but these.


def flag(value: object) -> bool:
    """Return a truth value of a state. Raises TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def text(value: object) -> str:
    """Return a string of a state. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def named_numbers(value: Mapping[object, object]) -> dict[str, int]:
    """Return the numbers of a state that have names. Raises TypeError or ValueError for anything else."""
    return {text(name): whole_number(number, 0, _MAX_COUNT) for name, number in value.items()}


def _rank(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    rank, ranks = value
    ranks = whole_number(ranks, 1, _MAX_WORKERS)
    return whole_number(rank, 0, ranks - 1), ranks


def _part(value: Any) -> WorkerPart | None:
    if value is None:
        return None
    worker, workers, batch_size, samples = value
    workers = whole_number(workers, 1, _MAX_WORKERS)
    return WorkerPart(
        whole_number(worker, 0, workers - 1),
        workers,
        whole_number(batch_size, 1, _MAX_COUNT),
        whole_number(samples, 0, _MAX_COUNT),
    )


def progress_of(states: Sequence[RankState], topology: Topology) -> Progress:
    """Return the progress from which a rank resumes, given the states of some ranks or of their workers.

    Raises ConfigError if it cannot be derived from them.
    """
    if len({state.moment for state in states}) > 1:
        raise _not_of_one_moment()
    own = [state for state in states if state.rank == (topology.rank, topology.world_size)]
    if own:
        return _progress_of_rank(own).of_rank(topology.rank)
    by_rank: dict[tuple[int, int] | None, list[RankState]] = {}
    for state in states:
        by_rank.setdefault(state.rank, []).append(state)
    each = {rank: _progress_of_rank(some) for rank, some in by_rank.items()}
    progress = next(iter(each.values()))
    if None in each:
        return progress
    (_, ranks), *_ = (rank for rank in each if rank is not None)
    if len(each) < ranks:
        if all(state.in_step for state in states) and len(set(each.values())) == 1:
            return progress
        raise ConfigError(
            "the states of some ranks do not tell how far the others are",
            remedy="load the states of all ranks",
        )
    ordered = [each[rank, ranks] for rank in range(ranks)]
    return progress if len(set(ordered)) == 1 else _out_of_step(ordered, ranks)


def _out_of_step(ordered: Sequence[Progress], ranks: int) -> Progress:
    """Return the progress of ranks, each of which has come to another place in the last phase."""
    earlier = ordered[0].phases
    if earlier and earlier[-1].ranks == ranks:
        earlier = earlier[:-1]
    if any(len(each.phases) > len(earlier) + 1 or each.phases[: len(earlier)] != earlier for each in ordered):
        raise _not_of_one_moment()
    taken = []
    for rank, each in enumerate(ordered):
        last = each.phases[len(earlier) :]
        taken.append(last[0].samples(rank) if last else 0)
    return replace(ordered[0], phases=(*earlier, BatchPhase(ranks, 1, tuple(taken))))


def _progress_of_rank(states: Sequence[RankState]) -> Progress:
    """Return the progress of a rank from its state, or from those of all its workers."""
    first = states[0]
    if first.part is None:
        return first.progress
    parts = {state.part.worker: state.part for state in states if state.part is not None}
    if len(parts) < first.part.workers:
        raise ConfigError(
            f"the states of {first.part.workers - len(parts)} of {first.part.workers} workers are missing",
            remedy="load the loader's whole state, with all of its workers",
        )
    samples = sum(part.samples for part in parts.values())
    ranks = first.rank[1] if first.rank else None
    if ranks is None:
        raise ConfigError("the state of a worker names no ranks", remedy="load what state_dict() has returned")
    return first.progress.after_samples(ranks, first.part.batch_size, samples)


def _not_of_one_moment() -> ConfigError:
    return ConfigError(
        "the states to load are not from one moment of one job", remedy="load the states of a single checkpoint"
    )


def is_read(states: Sequence[RankState], deal: SpanDeal, topology: Topology) -> bool:
    """Return True if states show that nothing is left of their epoch on any rank."""
    ranks = {state.rank for state in states}
    known = states[0].rank
    if known is not None and states[0].part is None:
        return len(ranks) == known[1] and all(state.ended for state in states)
    try:
        progress = progress_of(states, topology)
    except ConfigError:
        return False
    last = progress.phases[-1].ranks if progress.phases else topology.world_size
    return progress.is_over(deal, Topology(0, last))
