"""The state of one reader of samples that have no numbers. Pure.

Samples have no numbers if they are filtered, uncounted, or made by a stage: then a number of
batches does not tell which samples were read. So each reader's state has the reader's own place. A
reader is a rank, or one of its workers in a plain DataLoader.

- A place is the number of a sample in the reader's share of the epoch, before any filter or stage.
- A stage makes items, such as blocks of tokens, from groups of samples.
- A mark is a reader's position between two items: a place, and the items of its group that were
  given. Its `beyond` tells which later samples were given too: see `Mark`.
- An uncounted epoch is read in steps, each of which begins at a known place: see `StepPlace`.
- Ranks are in step if the same worker of each rank is at the same place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from shardcache.errors import ConfigError
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.topology import Topology
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
        mark: the reader's place, and its position in the stage's group.
        samples: number of samples that the reader has given before the mark; 0 unless it gets a
            fixed number of samples in the epoch. Samples that were left out do not count.
        step: in an uncounted epoch, a step that begins at or before the place; unused otherwise.
    """

    mark: Mark = Mark()
    samples: int = 0
    step: StepPlace = StepPlace()


@dataclass(frozen=True, slots=True)
class StagedState:
    """The state of a reader: a rank, or one of its workers in a plain DataLoader.

    Attributes:
        dataset: 16 hexadecimal digits that identify the dataset, and all that its order depends on.
        progress: the epoch, with the phases that were read before by other numbers of readers.
        reader: number of the reader, `rank * workers + worker`.
        readers: number of readers of all ranks.
        workers: number of readers of each rank.
        reached: the reader's position in its share of the rest, which is what the phases of
            `progress` have left of the epoch.
        counted: True if samples are dealt to readers, False if whole shards are, whose samples are
            not counted.
        over: True if no reader has anything left of the epoch.
        ended: True if this reader has nothing left of the epoch.
        in_step: True if the same worker of each rank is at the same place.
        stage: name of the stage whose groups the mark counts; "" if there is none.
        mixture: see `RankState`.
        seeds: see `RankState`.
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
        """The seeds and the mixture's latest change, of the run that took the state."""
        return Terms.of_state(self.seeds, self.mixture)

    @property
    def moment(self) -> object:
        """The facts that are equal for all states of one moment of a job."""
        readers = (self.readers, self.workers)
        return "readers", self.dataset, self.progress, readers, self.counted, self.stage

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads: a few numbers, which a person can read."""
        mark, samples, step = self.reached
        data = self.progress.to_json(self.dataset)
        data["reader"] = [self.reader, self.readers, self.workers]
        data["place"] = mark.place
        if samples:
            data["items"] = samples
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
            samples = count(data.get("items", 0))
            return cls(
                dataset,
                progress,
                reader=whole_number(reader, 0, readers - 1),
                readers=readers,
                workers=_workers_from_json(workers, readers),
                reached=Reached(_mark_from_json(data), samples, _step_from_json(step)),
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


def _workers_from_json(value: object, readers: int) -> int:
    """Return the number of readers of each rank. Raises ValueError unless it divides `readers`."""
    workers = whole_number(value, 1, readers)
    if readers % workers:
        raise ValueError(f"{readers} readers are not of ranks with {workers} each")
    return workers


def _mark_from_json(data: Mapping[str, Any]) -> Mark:
    """Return the mark that a state describes."""
    group, given, beyond = data.get("group", (0, 0, ""))
    return Mark(
        place=count(data["place"]),
        group=count(group),
        given=count(given),
        beyond=int(hexadecimal(beyond) or "0", 16),
        again=count(data.get("again", 0)),
    )


def _step_from_json(value: Any) -> StepPlace:
    """Return the step that a state names; the first step if it names none."""
    if value is None:
        return StepPlace()
    share, step, before = value
    return StepPlace(share=count(share), step=count(step), before=count(before))


class Resume(NamedTuple):
    """Place from which a reader resumes.

    Attributes:
        progress: the phases that are over. The rest of the epoch is divided among the readers.
        reached: the reader's position in its share of this rest.
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
    """Return the place from which a reader resumes. Raises ConfigError if it cannot be derived.

    Args:
        states: states of some readers, whose number may differ from that of this run's readers.
        reader: the rank, or its worker in a plain DataLoader.
        counted: False if the dataset's samples are not counted.
        stage: name of the dataset's stage; "" if it has none. A stage of another name makes other
            groups. Then the places that are left are divided among the readers again, as they are
            if the number of readers has changed.
    """
    # 1. The states are those of ranks whose samples had numbers.
    staged = [state for state in states if isinstance(state, StagedState)]
    if not staged:
        ranks = [state for state in states if isinstance(state, RankState)]
        return _resume_after_ranks(progress_of(ranks, _as_rank(reader)), reader)

    # 2. The same readers go on, each from its own place. If the stage is another one, they can do
    # so only if no group was given in part.
    first = staged[0]
    by_reader = {state.reader: state for state in staged}
    if (first.readers, first.workers) == (reader.readers, reader.workers):
        reached = _state_of(by_reader, reader.reader, first.workers).reached
        if stage == first.stage:
            return Resume(first.progress, reached)
        if all(_is_between_groups(state.reached.mark) for state in staged):
            mark = Mark(place=reached.mark.place)  # the other stage counts its groups from 0
            return Resume(first.progress, reached._replace(mark=mark))

    # 3. The places that are left are divided among the readers, which needs counted samples.
    if not (counted and first.counted):
        raise ConfigError(
            "an epoch of shards whose samples are not counted can resume only on the same ranks, "
            "and with the same workers if a plain DataLoader reads it",
            remedy="run with those that wrote the state; or restart the epoch with an index made "
            "by `shardcache index URL... -o index.json`, which makes this possible from then on",
        )
    return Resume(_progress_after(by_reader, first))


def _is_between_groups(mark: Mark) -> bool:
    """Return True if a stage has given all samples before a mark and no sample after it."""
    return mark == Mark(place=mark.place, group=mark.group)


def as_progress(states: Sequence[StagedState]) -> Progress:
    """Return the progress that the states of readers show, for readers whose samples have numbers.

    Raises ConfigError if states are missing and do not follow from the others.
    """
    return _progress_after({state.reader: state for state in states}, states[0])


def cover_all_readers(states: Sequence[StagedState]) -> bool:
    """Return True if the states show for all readers exactly which places these have passed.

    The state of a reader may stand for others that are in step with it, unless a group is given in
    part: each reader has its own groups.
    """
    readers = {state.reader for state in states}
    if readers == set(range(states[0].readers)):
        return True
    return not any(state.reached.mark.given for state in states)


def have_ended(states: Sequence[StagedState]) -> bool:
    """Return True if these are the states of all readers, and all have ended the epoch."""
    has_all_readers = {state.reader for state in states} == set(range(states[0].readers))
    return has_all_readers and all(state.ended for state in states)


def has_reader_ended(states: Sequence[StagedState | RankState], reader: Topology) -> bool:
    """Return True if a reader's own state says that it has nothing left of the epoch."""
    own = (reader.reader, reader.readers, reader.workers)
    staged = (state for state in states if isinstance(state, StagedState))
    return any(each.ended and (each.reader, each.readers, each.workers) == own for each in staged)


def _as_rank(reader: Topology) -> Topology:
    """Return the place of a reader among ranks without workers, one for each reader."""
    return Topology(rank=reader.reader, world_size=reader.readers)


def _resume_after_ranks(progress: Progress, reader: Topology) -> Resume:
    """Return the place from which a reader resumes after ranks whose samples had numbers."""
    # A phase of as many readers is continued: the reader begins after the samples that its
    # predecessor has taken. Any other phase is over.
    phases = progress.phases
    if not phases or phases[-1].ranks != reader.readers or phases[-1].beyond:
        return Resume(progress)
    earlier = replace(progress, phases=phases[:-1])
    return Resume(earlier, Reached(Mark(place=phases[-1].samples(reader.reader))))


def _state_of(by_reader: Mapping[int, StagedState], reader: int, workers: int) -> StagedState:
    """Return a reader's state. Raises ConfigError if it is missing and does not follow from others.

    If ranks are in step, the state of the same worker of another rank stands for it.

    Args:
        by_reader: the states that were loaded, by number of the reader.
        reader: number of the reader.
        workers: number of readers of each rank.
    """
    own = by_reader.get(reader)
    if own is not None:
        return own
    for other, state in by_reader.items():
        if state.in_step and other % workers == reader % workers:
            mark = _mark_in_step(state.reached.mark)
            return replace(state, reached=state.reached._replace(mark=mark))
    raise ConfigError(
        "one rank's state does not say how far the others are",
        remedy="load the states of all ranks",
    )


def _mark_in_step(mark: Mark) -> Mark:
    """Return the mark of a reader that is in step with a reader of another rank.

    The reader may have no sample in the group, although the other reader has one. It then repeats
    the last sample that it gave before the group. So the returned mark is at the place of that
    sample, which counts as given.

    Args:
        mark: the mark of the other reader.
    """
    # The other reader's `beyond` and `again` are about samples of its own.
    if not mark.first:
        return mark._replace(beyond=0)
    return Mark(place=mark.first - 1, group=mark.group, given=mark.given, beyond=1, again=1)


def _progress_after(by_reader: Mapping[int, StagedState], first: StagedState) -> Progress:
    """Return the progress after everything that readers have read, so that others read the rest.

    Raises ConfigError if states are missing and do not follow from the others.

    Args:
        by_reader: the states that were loaded, by number of the reader.
        first: any of these states.
    """
    if not cover_all_readers(list(by_reader.values())):
        raise ConfigError(
            "one rank's state does not say which samples of their present groups the "
            "other ranks have already given; other readers, or another stage, would "
            "read these again",
            remedy="load the states of all ranks; one is enough for the same ranks and workers",
        )
    readers = range(first.readers)
    marks = [_state_of(by_reader, reader, first.workers).reached.mark for reader in readers]
    places = tuple(mark.place for mark in marks)
    beyond: tuple[str, ...] = tuple(f"{mark.beyond:x}" if mark.beyond else "" for mark in marks)
    if not any(places) and not any(beyond):
        return first.progress
    if not any(beyond):
        beyond = ()
    # The readers count as ranks, and their places as batches of one sample.
    phase = BatchPhase(first.readers, batch_size=1, batches=places, beyond=beyond)
    return replace(first.progress, phases=(*first.progress.phases, phase))
