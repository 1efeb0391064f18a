"""The state of one reader of samples that have no numbers. Pure.

They are filtered ones, uncounted ones, or those of a stage.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.position.mixture_state import Terms, mixture_from_json, mixture_to_json
from shardcache_client.position.progress import BatchPhase, Progress
from shardcache_client.position.rank_state import RankState, progress_of
from shardcache_client.position.state_values import (
    MAX_READERS,
    count,
    flag,
    hexadecimal,
    invalid_state,
    named_numbers,
    text,
    whole_number,
)
from shardcache_client.stages.stage import Mark


class Reached(NamedTuple):
    """A reader's position in its share of an epoch.

    Attributes:
        mark: its place, and that in the stage's group.
        items: number of items that it was given.
        step: of an uncounted epoch, a step that begins at or before the place.
    """

    mark: Mark = Mark()
    items: int = 0
    step: StepPlace = StepPlace()


@dataclass(frozen=True, slots=True)
class StagedState:
    """The state of a reader: a rank, or one of its workers in a plain DataLoader.

    Attributes:
        dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends on.
        progress: the epoch, with the phases that other readers have read of it.
        reader: number of the reader, `rank * workers + worker`.
        readers: number of all readers.
        workers: number of readers of each rank.
        reached: where the reader is in its share of the rest.
        counted: True if samples are dealt, False if whole shards whose samples are not counted.
        over: True if no reader has anything left of the epoch.
        ended: True if this reader has nothing left of the epoch.
        in_step: True if the readers of the same worker of all ranks are at the same place.
        stage: name of the stage, whose groups the mark is of; "" if there is none.
        mixture, seeds: as in a `RankState`.
    """

    dataset: str
    progress: Progress
    reader: int
    readers: int
    workers: int
    reached: Reached
    counted: bool = True
    over: bool = False
    ended: bool = False
    in_step: bool = False
    stage: str = ""
    mixture: MixtureState | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch being read."""
        return self.progress.epoch

    @property
    def terms(self) -> Terms:
        """The terms of the run that took the state."""
        return Terms.of_state(self.seeds, self.mixture)

    @property
    def moment(self) -> object:
        """The facts that states of one moment have in common."""
        readers = (self.readers, self.workers)
        return "readers", self.dataset, self.progress, readers, self.counted, self.stage

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads: a few numbers, which a person can read."""
        mark, items, step = self.reached
        data = self.progress.to_json(self.dataset)
        data["reader"] = [self.reader, self.readers, self.workers]
        data["place"] = mark.place
        if items:
            data["items"] = items
        if mark.group or mark.given:
            data["group"] = [mark.group, mark.given, hex(mark.beyond)]
        if mark.again:
            data["again"] = mark.again
        if not self.counted:
            data["step"] = list(step)
        for name in ("over", "ended", "in_step", "stage", "seeds"):
            value = getattr(self, name)
            if value:
                data[name] = value
        return data | mixture_to_json(self.mixture)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Build from the dict of `to_json`. Raises ConfigError for anything else."""
        progress, dataset = Progress.from_json(data)
        try:
            reader, readers, workers = data["reader"]
            readers = whole_number(readers, 1, MAX_READERS)
            step = data.get("step")
            items = count(data.get("items", 0))
            return cls(
                dataset,
                progress,
                reader=whole_number(reader, 0, readers - 1),
                readers=readers,
                workers=_divisor(workers, readers),
                reached=Reached(_mark(data), items, _step(step)),
                counted=step is None,
                over=flag(data.get("over", False)),
                ended=flag(data.get("ended", False)),
                in_step=flag(data.get("in_step", False)),
                stage=text(data.get("stage", "")),
                mixture=mixture_from_json(data),
                seeds=named_numbers(data.get("seeds", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise invalid_state(exn) from exn


def _divisor(value: object, of: int) -> int:
    found = whole_number(value, 1, of)
    if of % found:
        raise ValueError(f"{of} readers are not of ranks with {found} each")
    return found


def _mark(data: Mapping[str, Any]) -> Mark:
    group, given, beyond = data.get("group", (0, 0, ""))
    return Mark(
        count(data["place"]),
        count(group),
        count(given),
        int(hexadecimal(beyond) or "0", 16),
        count(data.get("again", 0)),
    )


def _step(value: Any) -> StepPlace:
    if value is None:
        return StepPlace()
    share, step, before = value
    return StepPlace(
        count(share),
        count(step),
        count(before),
    )


class Resume(NamedTuple):
    """Place from which a reader resumes.

    Attributes:
        progress: the phases that others have read.
        reached: how far the reader is in its share of the rest.
    """

    progress: Progress
    reached: Reached = Reached()


def resume(
    states: Sequence[StagedState | RankState],
    reader: Topology,
    *,
    counted: bool,
    stage: str = "",
) -> Resume:
    """Return the place from which a reader resumes.

    Args:
        states: of some readers, perhaps of another number of them.
        reader: the rank, or its worker in a plain DataLoader.
        counted: False if the dataset's samples are not counted.
        stage: name of the dataset's stage; "" if it has none. Another one makes other groups, so
            that single places are left out, as where the rest is divided among other readers.

    Raises ConfigError if it cannot be derived.
    """
    staged = [state for state in states if isinstance(state, StagedState)]
    if not staged:
        ranks = [state for state in states if isinstance(state, RankState)]
        return _of_progress(progress_of(ranks, _alone(reader)), reader)
    first = staged[0]
    by_reader = {state.reader: state for state in staged}
    if (first.readers, first.workers) == (reader.readers, reader.workers):
        reached = _found(by_reader, reader.reader, first.workers).reached
        if stage == first.stage:
            return Resume(first.progress, reached)
        if all(_is_between_groups(state.reached.mark) for state in staged):
            return Resume(first.progress, reached._replace(mark=Mark(reached.mark.place)))
    if not (counted and first.counted):
        raise ConfigError(
            "an epoch of shards whose samples are not counted can resume only on the same ranks, "
            "and with the same workers if a plain DataLoader reads it",
            remedy="run with those that wrote the state; or restart the epoch with an index made "
            "by `shardcache index URL... -o index.json`, which makes this possible from then on",
        )
    return Resume(_divided(by_reader, first))


def _is_between_groups(mark: Mark) -> bool:
    """Return True if a stage has given all of the samples before a mark, and none after it."""
    return mark == Mark(mark.place, mark.group)


def as_progress(states: Sequence[StagedState]) -> Progress:
    """Return the progress that the states of readers show, for ranks whose samples have numbers.

    Raises ConfigError if states are missing that others do not determine.
    """
    return _divided({state.reader: state for state in states}, states[0])


def tell_of_all(states: Sequence[StagedState]) -> bool:
    """Return True if it is known of all readers exactly which places they have passed."""
    readers = {state.reader for state in states}
    if readers == set(range(states[0].readers)):
        return True
    return not any(state.reached.mark.given for state in states)


def have_ended(states: Sequence[StagedState]) -> bool:
    """Return True if no reader of a job has anything left of the epoch.

    For that, these must be the states of all of them.
    """
    is_whole = {state.reader for state in states} == set(range(states[0].readers))
    return is_whole and all(state.ended for state in states)


def has_ended(states: Sequence[StagedState | RankState], reader: Topology) -> bool:
    """Return True if a reader's own state says that it has nothing left of the epoch."""
    own = (reader.reader, reader.readers, reader.workers)
    staged = (state for state in states if isinstance(state, StagedState))
    return any(each.ended and (each.reader, each.readers, each.workers) == own for each in staged)


def _alone(reader: Topology) -> Topology:
    """Return a reader as a rank of its own."""
    return Topology(reader.reader, reader.readers)


def _of_progress(progress: Progress, reader: Topology) -> Resume:
    """Return from where a reader resumes after what ranks have read whose samples had numbers."""
    phases = progress.phases
    if not phases or phases[-1].ranks != reader.readers or phases[-1].beyond:
        return Resume(progress)
    earlier = replace(progress, phases=phases[:-1])
    return Resume(earlier, Reached(Mark(phases[-1].samples(reader.reader))))


def _found(by_reader: Mapping[int, StagedState], reader: int, workers: int) -> StagedState:
    """Return a reader's state, or that of the same worker of another rank if ranks are in step.

    Raises ConfigError.
    """
    own = by_reader.get(reader)
    if own is not None:
        return own
    for other, state in by_reader.items():
        if state.in_step and other % workers == reader % workers:
            return replace(
                state, reached=state.reached._replace(mark=_of_another(state.reached.mark))
            )
    raise ConfigError(
        "one rank's state does not say how far the others are",
        remedy="load the states of all ranks",
    )


def _of_another(mark: Mark) -> Mark:
    """Return where a reader is when that of another rank, with which it is in step, has a mark.

    It may have no sample for the group, although the other has, and repeats its last one then.
    """
    if not mark.first:
        return mark._replace(beyond=0)
    return Mark(mark.first - 1, mark.group, mark.given, beyond=1, again=1)


def _divided(by_reader: Mapping[int, StagedState], first: StagedState) -> Progress:
    """Return the progress after what all readers have read, of which others are to read the rest.

    Raises ConfigError if states are missing that others do not determine.
    """
    if not tell_of_all(list(by_reader.values())):
        raise ConfigError(
            "one rank's state does not say which samples of their present groups the "
            "other ranks have already given; other readers, or another stage, would "
            "read these again",
            remedy="load the states of all ranks; one is enough for the same ranks and workers",
        )
    readers = range(first.readers)
    marks = [_found(by_reader, reader, first.workers).reached.mark for reader in readers]
    places = tuple(mark.place for mark in marks)
    beyond = tuple(f"{mark.beyond:x}" if mark.beyond else "" for mark in marks)
    if not any(places) and not any(beyond):
        return first.progress
    phase = BatchPhase(first.readers, 1, places, beyond if any(beyond) else ())
    return replace(first.progress, phases=(*first.progress.phases, phase))
