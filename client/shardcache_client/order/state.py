"""A dataset's state, in a few numbers: where each reader is in an epoch; and finding it again in a checkpoint. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.order.partition import Cut
from shardcache_client.order.progress import Phase, what_is_left
from shardcache_client.topology import Topology

_FORMAT = 1
_MARK = "shardcache"
_MOST_READERS = 1 << 20
_BITS = re.compile(r"|(?:0x)?[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a reader is in its share.

    Attributes:
        time: how often it has read its share to the end.
        taken: samples passed since it began with it the last time.
        given: samples given altogether, bad ones not counted.
        beat, nth: the same place, by the beat and the sample within it, for where samples are not counted.
    """

    time: int = 0
    taken: int = 0
    given: int = 0
    beat: int = 0
    nth: int = 0

    def after(self, samples: int) -> Place:
        """Return the place behind so many good samples more, where samples are counted."""
        return Place(self.time, self.taken + samples, self.given + samples)


@dataclass(frozen=True, slots=True)
class State:
    """Where one reader of a job is.

    Attributes:
        dataset: tells whether it is a state of the same dataset: urls, seed and what else the order depends on.
        epoch: which is read.
        phases: what other readers have read of the epoch before.
        cut: how what was left then is cut.
        counted: whether samples are dealt, or whole shards whose samples nobody has counted.
        reader: `rank * workers + worker`.
        place: where it is.
        beyond: which samples behind the place were passed as well, as in `Phase`; set by stages that reorder samples.
            A reader that goes on as it was reads them again, others do not.
        over: whether no reader has anything left of the epoch.
    """

    dataset: str
    epoch: int
    cut: Cut
    counted: bool = True
    phases: tuple[Phase, ...] = ()
    reader: int = 0
    place: Place = Place()
    beyond: str = ""
    over: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON knows it: a dict of numbers and short strings."""
        return {_MARK: _FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> State:
        """Build from what `to_json` gave. Raises ConfigError for anything else."""
        if data.get(_MARK) != _FORMAT:
            raise ConfigError(f"the state is of format {data.get(_MARK)!r}; this version knows {_FORMAT}")
        try:
            return cls(
                dataset=_text(data["dataset"]),
                epoch=_count(data["epoch"]),
                cut=_cut(data["cut"]),
                counted=_flag(data["counted"]),
                phases=tuple(map(_phase, data["phases"])),
                reader=_count(data["reader"]),
                place=Place(**{name: _count(value) for name, value in data["place"].items()}),
                beyond=_bits(data["beyond"]),
                over=_flag(data.get("over", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exn:
            raise ConfigError(f"the state makes no sense: {str(exn)[:200]}") from exn


# What is read here came from a file that may be anybody's, and is counted and divided by without another look.


def _count(value: object, least: int = 0, most: int = 1 << 62) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"no number from {least} to {most}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _bits(value: object) -> str:
    """Return bits in hexadecimal, as `Phase.beyond` has them; of which `int` would take a negative number, too."""
    if not _BITS.fullmatch(_text(value)):
        raise ValueError("no hexadecimal digits")
    return _text(value)


def _cut(data: Mapping[str, Any]) -> Cut:
    cut = Cut(**data)
    if cut.even not in ("pad", "drop", None):
        raise ValueError("nobody cuts like that")
    for value in (cut.world_size, cut.workers, cut.batch_size):
        _count(value, 1, _MOST_READERS)
    _count(cut.readers, 1, _MOST_READERS)
    return cut


def _phase(data: Mapping[str, Any]) -> Phase:
    phase = Phase(_cut(data["cut"]), tuple(map(_count, data["taken"])), tuple(map(_bits, data["beyond"])))
    cut = phase.cut
    if len(phase.taken) not in (cut.workers, cut.readers) or len(phase.beyond) not in (0, cut.readers):
        raise ValueError("a phase says another number of readers than it has")
    return phase


def find_states(data: object) -> list[State]:
    """Return every state that lies somewhere in nested dicts and lists, such as a StatefulDataLoader's state.

    Raises ConfigError when there is none, or they are not of the same place in the same epoch.
    """
    try:
        states = [State.from_json(each) for each in _search(data)]
    except RecursionError as exn:
        raise ConfigError("what was to be loaded is nested without end") from exn
    if not states:
        raise ConfigError(
            "there is no state of a ShardDataset in what was to be loaded",
            remedy="load what state_dict() of the dataset, or of the loader around it, returned",
        )
    if len({(state.dataset, state.epoch, state.cut, state.counted, state.phases) for state in states}) > 1:
        raise ConfigError(
            "the states that were to be loaded together are not of one moment of one job",
            remedy="load those of a single checkpoint and dataset",
        )
    return states


def _search(data: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(data, Mapping):
        if _MARK in data:
            yield data
            return
        if data.get("_steps_since_snapshot"):
            raise ConfigError(
                "the loader's state is older than the moment at which it was asked for",
                remedy="use StatefulDataLoader with snapshot_every_n_steps=1, its default",
            )
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes | bytearray | memoryview | range):
        for each in data:
            yield from _search(each)


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a reader goes on: in which epoch, after which phases, from where in its share."""

    epoch: int
    phases: tuple[Phase, ...] = ()
    place: Place = Place()


def resume(states: Sequence[State], cut: Cut, topology: Topology, samples: int | None) -> Resumption:
    """Return how a reader goes on from the states of some readers of a job, which may have been cut otherwise.

    The place of a reader without a state follows from the batches that another rank has taken, where samples are
    counted: all ranks take their batches together.

    Args:
        samples: of the epoch; None where they are not counted.

    Raises ConfigError where the place of a reader cannot be known, and where shards that were not counted would have
    to be cut again.
    """
    first = states[0]
    own = {state.reader: state for state in states}
    if cut == first.cut and topology.reader in own:
        return Resumption(first.epoch, first.phases, own[topology.reader].place)
    if samples is None or not first.counted:
        raise _unknown_without_counts(cut == first.cut, topology)
    places = _Places(states, samples)
    if cut == first.cut:
        return Resumption(first.epoch, first.phases, places.of(topology.reader))
    readers = range(first.cut.readers)
    # A reader in its second round has taken all of its own share; what it reads now is made up for.
    taken = [1 << 62 if place.time else place.taken for place in map(places.of, readers)]
    beyond = tuple(own[reader].beyond if reader in own else "" for reader in readers)
    same = taken[: first.cut.workers]
    if taken == same * first.cut.world_size:
        taken = same  # as always, unless some rank had to skip something
    return Resumption(first.epoch, (*first.phases, Phase(first.cut, tuple(taken), beyond if any(beyond) else ())))


def _unknown_without_counts(same_cut: bool, topology: Topology) -> ConfigError:
    if same_cut:
        return ConfigError(
            f"the state of rank {topology.rank}, worker {topology.worker} is missing, and others' say nothing of its "
            "shards, whose samples are not counted",
            remedy="load the states of all ranks",
        )
    return ConfigError(
        "an epoch of shards whose samples are not counted goes on only with the same ranks and workers",
        remedy="run with those that wrote the state; or begin the epoch anew, with an index made by "
        "`shardcache index URL... -o index.json`, which makes this possible from then on",
    )


_worker_sizes = lru_cache(maxsize=64)(Cut.worker_sizes)  # asked for each worker of a rank, rank by rank


class _Places:
    """The places of all readers of a phase, by the states of some.

    The state of a rank without a reader's own state tells its number of batches only as long as that is the same for
    any size of batches and any worker's turn: the loader may have begun again with worker 0 after an earlier state.
    """

    def __init__(self, states: Sequence[State], samples: int) -> None:
        self._cut = states[0].cut
        self._left = len(what_is_left(samples, states[0].phases, self._cut))
        self._known: dict[int, dict[int, Place]] = {}
        for state in states:
            rank, worker = divmod(state.reader, self._cut.workers)
            self._known.setdefault(rank, {})[worker] = state.place

    def of(self, reader: int) -> Place:
        """Return a reader's place. Raises ConfigError where no state tells it."""
        rank, worker = divmod(reader, self._cut.workers)
        if worker in self._known.get(rank, {}):
            return self._known[rank][worker]
        if not any(worker in places for places in self._known.values()):
            raise ConfigError(
                f"the state of worker {worker} is missing, and no other state tells what is left of its share",
                remedy="load the loader's whole state, with all its workers'",
            )
        for other in self._known:
            given = self._given(worker, rank, other)
            if given is not None:
                # Samples that the other rank skipped or read ahead were in its own share.
                return Place(taken=given, given=given)
        raise ConfigError(
            f"the state of rank {rank} is missing, and how far it came cannot be told from those of other ranks, which "
            "had fewer or more samples, skipped some, or had come to the end",
            remedy="load the states of all ranks; or use even='pad' or even='drop', with which ranks are equal",
        )

    def _given(self, worker: int, rank: int, other: int) -> int | None:
        """Return how many samples a rank's worker has given, by another rank's places; None if those do not tell."""
        cut, places = self._cut, self._known[other]
        sizes, others = _worker_sizes(cut, self._left, rank), _worker_sizes(cut, self._left, other)
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
        if (
            len(ended) == cut.workers
            and not skipped
            and cut.batches(self._left, rank) <= cut.batches(self._left, other)
        ):
            return sizes[worker]
        return None
