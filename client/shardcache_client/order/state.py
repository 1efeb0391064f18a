"""A dataset's state, in a few numbers: where each reader is in an epoch; and finding it again in a checkpoint. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shardcache.errors import ConfigError
from shardcache_client.order.partition import Cut
from shardcache_client.order.progress import Phase
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
    """

    dataset: str
    epoch: int
    cut: Cut
    counted: bool = True
    phases: tuple[Phase, ...] = ()
    reader: int = 0
    place: Place = Place()
    beyond: str = ""

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


def resume(states: Sequence[State], cut: Cut, topology: Topology) -> Resumption:
    """Return how a reader goes on from the states of some readers of a job, which may have been cut otherwise.

    Of a reader whose state is not there, another rank's worker of the same number is believed, where samples are
    counted: all ranks take their batches together. Raises ConfigError where a worker's state is missing, and where
    shards that were not counted would have to be cut anew.
    """
    first = states[0]
    if cut == first.cut:
        mine = _state_of(states, topology.reader)
        if mine is not None:
            return Resumption(first.epoch, first.phases, mine.place)
    if not first.counted and cut == first.cut:
        raise ConfigError(
            f"the state of rank {topology.rank}, worker {topology.worker} is missing, and others' say nothing of its "
            "shards, whose samples are not counted",
            remedy="load the states of all ranks",
        )
    if not first.counted:
        raise ConfigError(
            "an epoch of shards whose samples are not counted goes on only with the same ranks and workers",
            remedy="run with those that wrote the state; or begin the epoch anew, with an index made by "
            "`shardcache index URL... -o index.json`, which makes this possible from then on",
        )
    taken, beyond = [], []
    for reader in range(first.cut.readers):
        state = _state_of(states, reader)
        if state is None:
            raise ConfigError(
                f"the state of worker {reader % first.cut.workers} is missing, without which nobody can go on for it",
                remedy="load the loader's whole state, with all its workers'",
            )
        # Who reads for the second time has taken all; what it reads now is made up for.
        taken.append(1 << 62 if state.place.time else state.place.taken)
        beyond.append(state.beyond)
    same = taken[: first.cut.workers]
    if taken == same * first.cut.world_size:
        taken = same  # as always, unless some rank had to skip something
    phase = Phase(first.cut, tuple(taken), tuple(beyond) if any(beyond) else ())
    return Resumption(first.epoch, (*first.phases, phase))


def _state_of(states: Sequence[State], reader: int) -> State | None:
    """Return the reader's state, else what that of the same worker of another rank says about it, else None."""
    own = next((state for state in states if state.reader == reader), None)
    if own is not None or not states[0].counted:
        return own
    workers = states[0].cut.workers
    other = next((state for state in states if state.reader % workers == reader % workers), None)
    if other is None:
        return None
    # It has given as many. What it skipped or read ahead was in its own share.
    given = other.place.given
    return replace(other, reader=reader, place=Place(taken=given, given=given), beyond="")
