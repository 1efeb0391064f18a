"""Reading of several lanes in turns, each through the shards that it holds."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from shardcache_client.files.slicing import Sample
from shardcache_client.order.interleaving import Interleaved
from shardcache_client.order.share import Segment
from shardcache_client.reading.iteration import read_segment
from shardcache_client.reading.position import Progress
from shardcache_client.reading.shard_window import ShardWindow


def read(
    part: Segment | Interleaved,
    counts: Sequence[int] | None,
    shard_window: ShardWindow,
    reader_position: Progress,
) -> Iterator[Sample]:
    """Yield the samples of a part of a reader's share; errors go to the position's handler.

    Args:
        counts: number of samples in each shard of the manifest, if samples are dealt; else None.
    """
    with closing(_places(part, counts, shard_window, reader_position)) as places:
        for sample in places:
            if sample is not None:
                yield sample


def _places(
    part: Segment | Interleaved,
    counts: Sequence[int] | None,
    shard_window: ShardWindow,
    reader_position: Progress,
) -> Generator[Sample | None]:
    if isinstance(part, Segment):
        yield from read_segment(part, counts, shard_window, reader_position)
        return
    # A lane takes a shard from the window when its turn needs one. A turn that has no sample to give is over, too, so
    # the lanes take their shards in the order of the plan, whatever is skipped.
    names, lane_position = part.whole.names, _LanePosition(reader_position)
    lanes = {
        lane: _places(lanes_part, counts, shard_window, lane_position) for lane, lanes_part in part.parts().items()
    }
    try:
        for lane in part.turns():
            sample = next(lanes[lane])
            if names and sample is not None:
                sample["__source__"] = names[lane]
            yield sample
        for places in lanes.values():
            next(places, None)  # beyond its last sample, where it gives back its shards
    finally:
        for places in lanes.values():
            places.close()


class _LanePosition:
    """The reader's position as a lane moves it on: beats of a lane are not beats of the reader."""

    def __init__(self, position: Progress) -> None:
        self._position = position

    @property
    def taken(self) -> int:
        """Number of samples that the reader has passed, of all lanes."""
        return self._position.taken

    @taken.setter
    def taken(self, taken: int) -> None:
        self._position.taken = taken

    def begin_beat(self, beat: int, skipped: int) -> None:
        """Do nothing: the number of samples passed is position enough, as they are counted."""

    def skip(self, exn: Exception) -> None:
        """Call the reader's handler."""
        self._position.skip(exn)
