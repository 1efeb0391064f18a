"""The state of one reader of samples that have no numbers. Pure.

A reader is a rank, or one of its workers in a plain DataLoader. Samples have no numbers if they are
filtered, uncounted, or made by a stage. Then a number of batches does not tell which samples were
read, so each reader's state has the reader's own place.

- A place is the number of a sample in the reader's share of the epoch, before any filter or stage.
- A stage makes items, such as blocks of tokens, from groups of samples.
- A mark is a reader's position between two items of a stage. It consists of a place, the number of
  items that were given of the group there, and the later samples that were given out of order: see
  `Mark`.
- An uncounted epoch is read in steps, each of which begins at a known place: see `StepPlace`.
- Ranks are in step if the same worker of each rank is at the same place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from shardcache.shared.exceptions import ConfigError
from shardcache_client.order.sources.changes import MixtureState
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.position.mixture_state import Terms, mixture_from_json, mixture_to_json
from shardcache_client.position.progress import BatchPhase, Progress
from shardcache_client.position.rank_state import RankState, progress_of
from shardcache_client.position.state_values import (
    MAX_READERS,
    checked_count,
    checked_flag,
    checked_hexadecimal,
    checked_integer,
    checked_numbers,
    checked_text,
    invalid_state,
)
from shardcache_client.stages.stage import Mark


class Reached(NamedTuple):
    """A reader's position in its share of an epoch.

    Attributes:
        mark: the reader's place, and its position in the stage's group.
        samples: number of samples that the reader has given before the mark, without those that a
            filter has left out; counted only if the reader gets a fixed number of samples in the
            epoch, and 0 otherwise.
        step: in an uncounted epoch, a step that begins at or before the place; unused otherwise.
    """

    mark: Mark = Mark()
    samples: int = 0
    step: StepPlace = StepPlace()


@dataclass(frozen=True, slots=True)
class StagedState:
    """The state of a reader: a rank, or one of its workers in a plain DataLoader.

    Attributes:
        dataset: 16 hexadecimal digits that identify the dataset and everything on which its order
            depends.
        progress: the epoch, with earlier phases, in which there were other numbers of readers.
        reader: number of the reader, `rank * workers + worker`.
        readers: number of readers of all ranks.
        workers: number of readers of each rank.
        reached: the reader's position in its share of what these phases have left of the epoch.
        counted: True if samples are dealt to readers. False if whole shards are dealt, whose
            samples are not counted.
        over: True if no reader has anything left of the epoch.
        ended: True if this reader has nothing left of the epoch.
        in_step: True if ranks are in step.
        stage: name of the stage whose groups the mark counts; "" if there is none.
        mixture: the mixture; see `RankState`.
        seeds: the drawn seeds; see `RankState`.
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
        """A value that is equal for all states that a job saved at the same moment."""
        readers = (self.readers, self.workers)
        return "readers", self.dataset, self.progress, readers, self.counted, self.stage

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads, and a person can read as well."""
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
        """Return the state that a JSON object describes. Raises ConfigError if it is invalid."""
        progress, dataset = Progress.from_json(data)
        try:
            reader, readers, workers = data["reader"]
            readers = checked_integer(readers, 1, MAX_READERS)
            step = data.get("step")
            samples = checked_count(data.get("items", 0))
            return cls(
                dataset,
                progress,
                reader=checked_integer(reader, 0, readers - 1),
                readers=readers,
                workers=_workers_from_json(workers, readers),
                reached=Reached(_mark_from_json(data), samples, _step_from_json(step)),
                counted=step is None,
                over=checked_flag(data.get("over", False)),
                ended=checked_flag(data.get("ended", False)),
                in_step=checked_flag(data.get("in_step", False)),
                stage=checked_text(data.get("stage", "")),
                mixture=mixture_from_json(data),
                seeds=checked_numbers(data.get("seeds", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise invalid_state(exn) from exn


def _workers_from_json(value: object, readers: int) -> int:
    """Return the number of readers of each rank. Raises ValueError unless it divides `readers`."""
    workers = checked_integer(value, 1, readers)
    if readers % workers:
        raise ValueError(f"{readers} readers are not a multiple of {workers} workers per rank")
    return workers


def _mark_from_json(data: Mapping[str, Any]) -> Mark:
    """Return the mark that a state describes."""
    group, given, beyond = data.get("group", (0, 0, ""))
    return Mark(
        place=checked_count(data["place"]),
        group=checked_count(group),
        given=checked_count(given),
        beyond=int(checked_hexadecimal(beyond) or "0", 16),
        again=checked_count(data.get("again", 0)),
    )


def _step_from_json(value: Any) -> StepPlace:
    """Return the step that a state names; the first step if it names none."""
    if value is None:
        return StepPlace()
    share, step, before = value
    return StepPlace(
        share=checked_count(share), step=checked_count(step), before=checked_count(before)
    )


class Resume(NamedTuple):
    """Place from which a reader resumes.

    Attributes:
        progress: the phases that are over. What they have left of the epoch is divided among the
            readers.
        reached: the reader's position in its share of this rest.
    """

    progress: Progress
    reached: Reached = Reached()


def resume_place(
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
            groups.
    """
    # 1. The states are from ranks whose samples had numbers.
    staged = [state for state in states if isinstance(state, StagedState)]
    if not staged:
        ranks = [state for state in states if isinstance(state, RankState)]
        return _resume_after_ranks(progress_of(ranks, reader.as_rank()), reader)

    # 2. The same readers go on, each from its own place. If the stage has changed, they can do so
    # only if no group was given in part.
    first = staged[0]
    by_reader = {state.reader: state for state in staged}
    if (first.readers, first.workers) == (reader.readers, reader.workers):
        reached = _state_of(by_reader, reader.reader, first.workers).reached
        if stage == first.stage:
            return Resume(first.progress, reached)
        if all(_is_between_groups(state.reached.mark) for state in staged):
            mark = Mark(place=reached.mark.place)  # the other stage counts its groups from 0
            return Resume(first.progress, reached._replace(mark=mark))

    # 3. The number of readers has changed, or a group was given in part. The places that are left
    # are divided among the readers, which needs counted samples.
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
    """Return the progress of all readers together, for readers whose samples have numbers.

    Raises ConfigError if states are missing and cannot be derived from the others.
    """
    return _progress_after({state.reader: state for state in states}, states[0])


def cover_all_readers(states: Sequence[StagedState]) -> bool:
    """Return True if the states show exactly which places each reader has passed.

    The state of a reader may stand for readers that are in step with it. But if a group was given
    in part, the state does not tell which places the other readers have passed in their groups.
    """
    if _has_all_readers(states):
        return True
    return not any(state.reached.mark.given for state in states)


def have_ended(states: Sequence[StagedState]) -> bool:
    """Return True if these are the states of all readers, and all have ended the epoch."""
    return _has_all_readers(states) and all(state.ended for state in states)


def _has_all_readers(states: Sequence[StagedState]) -> bool:
    """Return True if there is a state of every reader."""
    return {state.reader for state in states} == set(range(states[0].readers))


def has_reader_ended(states: Sequence[StagedState | RankState], reader: Topology) -> bool:
    """Return True if a reader's own state says that it has nothing left of the epoch."""
    own = (reader.reader, reader.readers, reader.workers)
    staged = (state for state in states if isinstance(state, StagedState))
    own_states = (state for state in staged if (state.reader, state.readers, state.workers) == own)
    return any(state.ended for state in own_states)


def _resume_after_ranks(progress: Progress, reader: Topology) -> Resume:
    """Return the place from which a reader resumes after ranks whose samples had numbers."""
    # If the number of readers is the same as in the last phase, the reader continues it, after the
    # samples that the reader of its number has taken. Otherwise the phase is over.
    phases = progress.phases
    if not phases or phases[-1].ranks != reader.readers or phases[-1].beyond:
        return Resume(progress)
    earlier = replace(progress, phases=phases[:-1])
    return Resume(earlier, Reached(Mark(place=phases[-1].samples(reader.reader))))


def _state_of(by_reader: Mapping[int, StagedState], reader: int, workers: int) -> StagedState:
    """Return a reader's state, or the state of a reader that is in step with it.

    Raises ConfigError if there is neither.

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
    the last sample that it gave before the group. So the returned mark begins at that sample, which
    counts as given.

    Args:
        mark: the mark of the other reader.
    """
    # The other reader's `beyond` and `again` do not apply, as they are about its own samples.
    if mark.first == 0:  # no sample was given before the group
        return mark._replace(beyond=0)
    return Mark(place=mark.first - 1, group=mark.group, given=mark.given, beyond=1, again=1)


def _progress_after(by_reader: Mapping[int, StagedState], first: StagedState) -> Progress:
    """Return the progress after everything that readers have read, so that others read the rest.

    Raises ConfigError if states are missing and cannot be derived from the others.

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
