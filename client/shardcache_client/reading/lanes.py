"""Reading of several lanes in turns, each through the shards that it holds."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import TypeVar

from shardcache_client.files.slicing import Sample
from shardcache_client.order.lanes import Interleaved, Strided
from shardcache_client.order.manifest import Manifest
from shardcache_client.order.share import Part, Segment
from shardcache_client.reading.iteration import Draw, DrawnSegment, drawn, read_segment
from shardcache_client.reading.position import ReadingProgress
from shardcache_client.reading.shard_window import ShardWindow

T = TypeVar("T")


def read(
    part: Part, manifest: Manifest | None, shard_window: ShardWindow, reader_position: ReadingProgress
) -> Iterator[Sample | None]:
    """Yield the sample of each place of a part of a reader's share, None in place of one that the handler skipped.

    Args:
        manifest: the dataset's, if samples are dealt; else None.
    """
    if isinstance(part, Segment):
        return read_segment(part, manifest, shard_window, reader_position)
    return _Reading(manifest, shard_window).places(part, reader_position)


class _Reading:
    """The reading of parts within parts, through one window of shards.

    A lane takes a shard from the window when its turn needs one. A turn whose sample is skipped or not wanted is over,
    too, so the lanes take their shards in the order of the plan, whatever happens.
    """

    def __init__(self, manifest: Manifest | None, shard_window: ShardWindow) -> None:
        self._manifest = manifest
        self._shard_window = shard_window

    def places(self, part: Part, position: ReadingProgress) -> Generator[Sample | None]:
        """Yield the sample of each place, None in place of a skipped one."""
        if isinstance(part, Segment):
            yield from read_segment(part, self._manifest, self._shard_window, position)
        elif isinstance(part, Strided):
            with closing(self.draws(part.passing(), _LanePosition(position))) as draws:
                at = -1
                for place in part.places():
                    for _ in range(place - at):
                        draw = next(draws)
                    at = place
                    yield drawn(draw, position)
                next(draws, None)  # beyond its last sample, where it gives back its shards
        else:
            assert isinstance(part, Interleaved)
            lane_position = _LanePosition(position)
            lanes = {lane: self.places(each, lane_position) for lane, each in part.parts().items()}
            with closing(_in_turn(part, lanes)) as turns:
                for lane, sample in turns:
                    yield sample if sample is None else _named(sample, part, lane)

    def draws(self, part: Part, position: ReadingProgress) -> Generator[Draw]:
        """Yield each sample as a function that returns it."""
        if isinstance(part, Segment):
            yield from DrawnSegment(part, self._manifest, self._shard_window, position).draws()
        else:
            assert isinstance(part, Interleaved)
            lanes = {lane: self.draws(each, position) for lane, each in part.parts().items()}
            with closing(_in_turn(part, lanes)) as turns:
                for lane, draw in turns:
                    yield partial(_draw_named, draw, part, lane)


def _in_turn(part: Interleaved, lanes: Mapping[int, Generator[T]]) -> Generator[tuple[int, T]]:
    try:
        for lane in part.in_turn():
            yield lane, next(lanes[lane])
        for places in lanes.values():
            next(places, None)  # beyond its last sample, where it gives back its shards
    finally:
        for places in lanes.values():
            places.close()


def _draw_named(draw: Draw, part: Interleaved, lane: int) -> Sample:
    return _named(draw(), part, lane)


def _named(sample: Sample, part: Interleaved, lane: int) -> Sample:
    if part.names:
        sample["__source__"] = part.names[lane]
    return sample


class _LanePosition:
    """The reader's position as a lane moves it on: steps of a lane are not steps of the reader."""

    def __init__(self, position: ReadingProgress) -> None:
        self._position = position

    @property
    def taken(self) -> int:
        """Number of samples that the reader has passed, of all lanes."""
        return self._position.taken

    @taken.setter
    def taken(self, taken: int) -> None:
        self._position.taken = taken

    def begin_step(self, step: int, skipped: int) -> None:
        """Do nothing: the number of samples passed is position enough, as they are counted."""

    def skip(self, exn: Exception) -> None:
        """Call the reader's handler."""
        self._position.skip(exn)
