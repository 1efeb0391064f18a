"""A reader's position in an epoch, and the states in which checkpoints hold it. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias

from shardcache.errors import ConfigError
from shardcache_client.order.rounds import Partition, Phase, Topology, what_is_left
from shardcache_client.position.rank_state import RankState, flag, text

_FORMAT = 2
_MARK = "shardcache"
_MAX_READERS = 1 << 20
_BITS = re.compile(r"|(?:0x)?[0-9a-f]+")


@dataclass(slots=True)
class Position:
    """A reader's position: an epoch, the divisions of it so far, and how far the reader has come in its share."""

    epoch: int
    phases: tuple[Phase, ...] = ()  # earlier phases of the epoch, read by other readers
    time: int = 0  # number of shares read to the end
    taken: int = 0  # number of samples passed in the current share
    given: int = 0  # number of samples yielded in all, without bad ones
    step: int = 0  # the step being read, if samples are not counted
    before: int = 0  # number of samples taken before this step

    @property
    def nth(self) -> int:
        """Number of samples taken in this step."""
        return self.taken - self.before

    def begin_step(self, step: int, skipped: int) -> None:
        """Note the start of a step, of which `skipped` samples were taken before."""
        self.step, self.before = step, self.taken - skipped

    def begin_share(self) -> None:
        """Note the start of the next share."""
        self.time, self.taken, self.step, self.before = self.time + 1, 0, 0, 0

    def after(self, samples: int) -> "Position":
        """Return the position after `samples` more good samples; only if samples are counted."""
        return replace(self, taken=self.taken + samples, given=self.given + samples)

    def at(self, given: int) -> "Position":
        """Return the position in this phase after `given` good samples and no bad ones."""
        return Position(self.epoch, self.phases, taken=given, given=given)


@dataclass(frozen=True, slots=True)
class ReaderState:
    """The position of one reader of a job."""

    dataset: str  # identifies the dataset: its urls, seed and everything else that its order depends on
    position: Position
    cut: Partition  # division of the rest of the epoch after the position's phases
    counted: bool = True  # True if samples are dealt, False if whole shards whose samples are not counted
    reader: int = 0  # `rank * workers + worker`
    # Samples after the position that were passed as well, as in `Phase`; set by stages that reorder samples. The same
    # readers read them again on resuming; other readers do not.
    beyond: str = ""
    over: bool = False  # True if no reader has anything left of the epoch
    # Of a mixture, by name: position in its endless sequence at the "start" of the epoch, number of its "samples" in
    # the epoch, and of those that this reader has "passed" of its share.
    sources: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)  # those drawn, by source; that of a dataset alone under ""
    # False if other ranks may have come further, or less far: its workers did not take turns, or this one has reached
    # its end, and loaders drop short batches, which not all ranks have.
    in_step: bool = True
    ended: bool = False  # True if this reader's rank has no further batch in the epoch; others may have

    @property
    def epoch(self) -> int:
        """The epoch being read."""
        return self.position.epoch

    @property
    def moment(self) -> object:
        """What states of one moment have in common."""
        return "readers", self.dataset, self.epoch, self.cut, self.counted, self.position.phases

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON-compatible dict of numbers and short strings."""
        fields = {name: value for name, value in asdict(self).items() if value or name not in ("sources", "seeds")}
        if self.in_step:
            del fields["in_step"]
        if not self.ended:
            del fields["ended"]
        place = fields.pop("position")
        whole = {"epoch": place.pop("epoch"), "phases": place.pop("phases")}
        place["nth"] = self.position.nth
        del place["before"]
        return {_MARK: _FORMAT, **fields, **whole, "place": place}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ReaderState":
        """Build from the dict of `to_json`. Raises ConfigError for anything else."""
        if data.get(_MARK) != _FORMAT:
            raise ConfigError(f"the state has format {data.get(_MARK)!r}; this version supports {_FORMAT}")
        try:
            place = {name: _count(value) for name, value in data["place"].items()}
            place["before"] = place["taken"] - place.pop("nth")
            return cls(
                dataset=text(data["dataset"]),
                position=Position(_count(data["epoch"]), tuple(map(_phase, data["phases"])), **place),
                cut=_cut(data["cut"]),
                counted=flag(data["counted"]),
                reader=_count(data["reader"]),
                beyond=_bits(data["beyond"]),
                over=flag(data.get("over", False)),
                sources={
                    text(name): {text(key): _count(number) for key, number in numbers.items()}
                    for name, numbers in data.get("sources", {}).items()
                },
                seeds={text(name): _count(seed) for name, seed in data.get("seeds", {}).items()},
                in_step=flag(data.get("in_step", True)),
                ended=flag(data.get("ended", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise ConfigError(f"the state is invalid: {str(exn)[:200]}") from exn


# States come from files that anyone may have written, and their values are used without any check but these.


def _count(value: object, least: int = 0, most: int = 1 << 62) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"not an integer from {least} to {most}")
    return value


def _bits(value: object) -> str:
    """Return bits in hexadecimal, as in `Phase.beyond`. Checked here, as `int` would also accept a negative number."""
    if not _BITS.fullmatch(text(value)):
        raise ValueError("not hexadecimal digits")
    return text(value)


def _cut(data: Mapping[str, Any]) -> Partition:
    cut = Partition(**data)
    if cut.even not in ("pad", "drop", None):
        raise ValueError("unknown value of even")
    for value in (cut.world_size, cut.workers, cut.readers):
        _count(value, 1, _MAX_READERS)
    _count(cut.batch_size, 1)
    return cut


def _phase(data: Mapping[str, Any]) -> Phase:
    phase = Phase(_cut(data["cut"]), tuple(map(_count, data["taken"])), tuple(map(_bits, data["beyond"])))
    cut = phase.cut
    if len(phase.taken) not in (cut.workers, cut.readers) or len(phase.beyond) not in (0, cut.readers):
        raise ValueError("the number of readers in a phase does not match its cut")
    return phase


Saved: TypeAlias = RankState | ReaderState
"""A state of samples that have numbers, or of any others."""


def find_states(data: object) -> list[Saved]:
    """Return the states, all of one moment, anywhere in nested dicts and lists such as a StatefulDataLoader's state."""
    try:
        states = [_saved(each) for each in search(data)]
    except RecursionError as exn:
        raise ConfigError("the state to load is nested too deeply") from exn
    if not states:
        remedy = "load the return value of state_dict() of the dataset, or of the loader around it"
        raise ConfigError("the object to load contains no state of a ShardDataset", remedy=remedy)
    if len({state.moment for state in states}) > 1:
        remedy = "load the states of a single checkpoint and dataset"
        raise ConfigError("the states to load are not from one moment of one job", remedy=remedy)
    return states


def _saved(data: Mapping[str, Any]) -> Saved:
    return ReaderState.from_json(data) if data.get(_MARK) == _FORMAT else RankState.from_json(data)


def find_turn(data: object) -> int:
    """Return the number of the worker whose turn is next, according to the first `ShardLoader` state found; else 0."""
    if isinstance(data, Mapping):
        turn = data.get("turn")
        if isinstance(turn, int) and isinstance(data.get("workers"), Sequence):
            return max(0, turn)
    return next(filter(None, map(find_turn, _children(data))), 0)


def search(data: object, mark: str = _MARK) -> Iterator[Mapping[str, Any]]:
    """Yield the outermost mappings with this key anywhere in nested mappings and lists. Raises ConfigError."""
    if isinstance(data, Mapping):
        if mark in data:
            yield data
            return
        if data.get("_steps_since_snapshot"):
            raise ConfigError(
                "the loader's state is older than the moment at which it was requested",
                remedy="use StatefulDataLoader with snapshot_every_n_steps=1, its default",
            )
    for each in _children(data):
        yield from search(each, mark)


def _children(data: object) -> Sequence[object]:
    if isinstance(data, Mapping):
        return list(data.values())
    is_list = isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview | range)
    return data if is_list else ()  # type: ignore[return-value]


def resume(states: Sequence[ReaderState], cut: Partition, topology: Topology, samples: int | None) -> Position:
    """Return the position from which a reader resumes, given the states of some readers, perhaps cut differently.

    If samples are counted, the position of a reader without a state follows from the batches that another rank has
    taken, as all ranks take their batches in step. `samples` is the number in the epoch; None if they are not counted.
    Raises ConfigError if the position cannot be derived, or if uncounted shards would have to be cut again.
    """
    first, reader = states[0], topology.reader
    own = {state.reader: state for state in states}
    if cut == first.cut and reader in own:
        return replace(own[reader].position)
    if samples is None or not first.counted:
        if cut == first.cut:
            raise ConfigError(
                f"the state of rank {topology.rank}, worker {topology.worker} is missing and cannot be derived from "
                "the others, as the samples of its shards are not counted",
                remedy="load the states of all ranks",
            )
        raise ConfigError(
            "an epoch of shards whose samples are not counted can resume only with the same ranks and workers",
            remedy="run with those that wrote the state; or restart the epoch with an index made by "
            "`shardcache index URL... -o index.json`, which makes this possible from then on",
        )
    left, ranks = _samples_left(first, samples), _by_rank(states)
    if cut == first.cut:
        return _position_of(reader, cut, left, ranks)
    # A reader past its own share has taken all of that; it now reads replacements for skipped samples.
    each = [(_position_of(each, first.cut, left, ranks), size) for each, size in enumerate(_sizes(first.cut, left))]
    taken = [size if position.time else position.taken for position, size in each]
    beyond = tuple(own[reader].beyond if reader in own else "" for reader in range(first.cut.readers))
    same = taken[: first.cut.workers]
    if taken == same * first.cut.world_size:
        taken = same  # the usual case: no rank has skipped anything
    phase = Phase(first.cut, tuple(taken), beyond if any(beyond) else ())
    return Position(first.epoch, (*first.position.phases, phase))


def have_ended(states: Sequence[ReaderState]) -> bool:
    """Return True if these are the states of all readers of their job, and none has a further batch in the epoch."""
    is_whole = {state.reader for state in states} == set(range(states[0].cut.readers))
    return is_whole and all(state.ended for state in states)


def is_read(states: Sequence[ReaderState], samples: int) -> bool:
    """Return True if the states show that no reader of their job has anything left of an epoch of `samples` samples.

    A loader's states say so with `over`; those of a dataset's readers, each of which knows itself alone, do not.
    """
    cut, left, ranks = states[0].cut, _samples_left(states[0], samples), _by_rank(states)
    try:
        positions = [(_position_of(reader, cut, left, ranks), size) for reader, size in enumerate(_sizes(cut, left))]
    except ConfigError:
        return False
    # Unless even is None, a reader goes on until it has yielded as many samples as its share has.
    return all((each.taken if cut.even is None else each.given) >= size for each, size in positions)


# Positions of all readers of a phase, derived from the states of some. Another rank's state determines a missing
# reader's number of batches only as long as that is the same for any batch size and any worker's turn: after an earlier
# resume, the loader may have begun again with worker 0.

_worker_sizes = lru_cache(maxsize=64)(Partition.worker_sizes)  # called for each worker of a rank, rank by rank
_Ranks = Mapping[int, Mapping[int, ReaderState]]


def _samples_left(state: ReaderState, samples: int) -> int:
    return len(what_is_left(samples, state.position.phases, state.cut))


def _sizes(cut: Partition, left: int) -> list[int]:
    """Return the number of samples in the share of each reader."""
    return [size for rank in range(cut.world_size) for size in _worker_sizes(cut, left, rank)]


def _by_rank(states: Sequence[ReaderState]) -> _Ranks:
    """Return states by rank and worker."""
    ranks: dict[int, dict[int, ReaderState]] = {}
    for state in states:
        rank, worker = divmod(state.reader, state.cut.workers)
        ranks.setdefault(rank, {})[worker] = state
    return ranks


def _position_of(reader: int, cut: Partition, left: int, ranks: _Ranks) -> Position:
    """Return a reader's position. Raises ConfigError if no state determines it."""
    rank, worker = divmod(reader, cut.workers)
    if worker in ranks.get(rank, {}):
        return replace(ranks[rank][worker].position)
    if not any(worker in workers for workers in ranks.values()):
        raise ConfigError(
            f"the state of worker {worker} is missing and cannot be derived from the other states",
            remedy="load the loader's whole state, with all of its workers",
        )
    for other, workers in ranks.items():
        given = _given(worker, rank, other, cut, left, workers) if all(s.in_step for s in workers.values()) else None
        if given is not None:
            # Samples that the other rank skipped or read ahead belong to that rank's own share.
            return next(iter(workers.values())).position.at(given)
    raise ConfigError(
        f"the state of rank {rank} is missing and cannot be derived from those of other ranks, which had fewer or "
        "more samples, skipped some, had reached the end, or took batches as they came (in_order=False)",
        remedy="load the states of all ranks; or use even='pad' or even='drop', which keep ranks equal",
    )


def _given(
    worker: int, rank: int, other: int, cut: Partition, left: int, workers: Mapping[int, ReaderState]
) -> int | None:
    """Return the number of samples that a rank's worker has yielded, derived from another rank's; None if unknown."""
    places = {each: state.position for each, state in workers.items()}
    sizes, others = _worker_sizes(cut, left, rank), _worker_sizes(cut, left, other)
    if len(places) == cut.workers and any(others) and not any(place.taken for place in places.values()):
        return 0
    ended = {each: place for each, place in places.items() if place.taken >= others[each]}
    skipped = cut.even is None and any(place.given < others[each] for each, place in ended.items())
    if worker in places and sizes == others and not skipped:
        return places[worker].given
    if len(places) < cut.workers:
        return None
    if not ended:
        return min(places[worker].given, sizes[worker])
    if len(ended) == cut.workers and not skipped and cut.batches(left, rank) <= cut.batches(left, other):
        return sizes[worker]
    return None


# Global batches, of which all ranks take equal parts in step


def in_batches(states: Sequence[ReaderState]) -> list[ReaderState]:
    """Return states of the same moment that any readers continue with the next global batch, beginning with worker 0.

    States from within a batch stay as they are, for the same readers to continue with the next sample.
    """
    first = states[0]
    if any(state.position.given % state.cut.batch_size for state in states):
        return list(states)
    return [replace(first, position=_after_batches(states), reader=worker) for worker in range(first.cut.workers)]


def _after_batches(states: Sequence[ReaderState]) -> Position:
    first, workers = states[0], states[0].cut.workers
    given = {state.reader % workers: state.position.given for state in states}  # ranks are in step
    if len(given) < workers:
        raise ConfigError(
            "the states of some workers are missing", remedy="load the loader's whole state, with all of its workers"
        )
    phase = Phase(first.cut, tuple(given[worker] for worker in range(workers)))
    return Position(first.epoch, (*first.position.phases, phase))


def resume_batches(states: Sequence[ReaderState], cut: Partition, topology: Topology) -> Position:
    """Return the position from which a reader resumes, given the states of some readers of a job; see `resume`."""
    if cut == states[0].cut:
        own = {state.reader: state.position for state in states}
        alike = [state.position for state in states if state.reader % cut.workers == topology.worker]
        if topology.reader in own:
            return replace(own[topology.reader])
        if alike:  # samples that the other rank skipped belong to its own part
            return alike[0].at(alike[0].given)
    return _after_batches(states)
