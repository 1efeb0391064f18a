"""Mixing of an epoch: ours next to webdataset's shuffle buffers and MosaicML's py1e. No bytes are read.

One reader goes through shards of equal size. webdataset's own stages run for real, over numbers in place of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.data import LARGE
from benchmarks.reading.mixing import BATCH, NEARBY, Quality, Served, quality_of
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace
from shardcache_client.order.lanes import Mix
from shardcache_client.order.rounds import Order, Shuffle

SAMPLES = 500_000
SHARD_SAMPLES = (500, 1_000, 2_500, 10_000)
WINDOWS = (8, 16, 32)
BUFFERS = (1_000, 5_000)
USUAL_WINDOW, GOOD_BUFFER = WINDOWS[0], BUFFERS[-1]

_SEED = 7
_SHARD_BUFFER = 100  # what WebDataset(shardshuffle=True) means
# With fewer shards than that, the largest window would be most of the epoch.
_LEAST_SHARDS = 100


@dataclass(frozen=True, slots=True)
class Contender:
    """An order: what it serves, for a number of shards and of samples in each, and what it keeps in memory for it."""

    serve: Callable[[int, int], Served]
    buffered_samples: int = 0


def ours(window: int, shards: int, shard_samples: int) -> Served:
    """The first epoch of a dataset, read by a single reader."""
    order = Order([shard_samples] * shards, Shuffle(_SEED, window))
    mix = Mix([*order.pieces(0, order.samples)], window)
    return np.fromiter(_mixed(mix, shard_samples), np.int64, order.samples)


def _mixed(mix: Mix, shard_samples: int) -> Iterator[int]:
    @lru_cache(mix.window)
    def samples(piece: int) -> Sequence[int]:
        first = mix.pieces[piece].shard * shard_samples
        return [first + number for number in mix.pieces[piece].numbers(shard_samples, permuted=True)]

    for step in range(mix.steps):
        parts = [mix.part(piece, step, samples(piece)) for piece in mix.pieces_at(step)]
        come = [iter(part) for part in parts]
        yield from (next(come[place]) for place in mix.interleaved(step, [len(part) for part in parts]))


def webdataset(buffer: int, shards: int, shard_samples: int) -> Served:
    """`WebDataset(…, shardshuffle=100).shuffle(buffer)`, without what opens and reads the tars."""
    import webdataset as wds

    def expand(urls: Iterable[Mapping[str, str]]) -> Iterator[int]:
        for url in urls:
            first = int(url["url"]) * shard_samples
            yield from range(first, first + shard_samples)

    pipeline = wds.DataPipeline(
        wds.SimpleShardList([str(shard) for shard in range(shards)]),
        wds.shuffle(_SHARD_BUFFER, seed=_SEED),
        expand,
        wds.shuffle(buffer, seed=_SEED),
    )
    return np.fromiter(pipeline, np.int64, shards * shard_samples)


def py1e(window: int, shards: int, shard_samples: int) -> Served:
    """MosaicML's rule, from its description: in shuffled shards, shift each sample by at most half a block's size."""
    source = np.random.default_rng(_SEED)
    firsts = source.permutation(shards) * shard_samples
    samples = (firsts[:, np.newaxis] + np.arange(shard_samples)).ravel()
    half_block = window * shard_samples / 2
    return samples[np.argsort(np.arange(len(samples)) + source.uniform(-half_block, half_block, len(samples)))]


def _ours(window: int) -> str:
    return f"shardcache, window {window}"


def _webdataset(buffer: int) -> str:
    return f"webdataset shuffle({buffer})"


PEER = _webdataset(GOOD_BUFFER)


def contenders() -> dict[str, Contender]:
    """Return who is compared, by the names in the table."""
    return {
        **{_ours(window): Contender(partial(ours, window)) for window in WINDOWS},
        f"py1e, {USUAL_WINDOW} shards": Contender(partial(py1e, USUAL_WINDOW)),
        **{_webdataset(buffer): Contender(partial(webdataset, buffer), buffer) for buffer in BUFFERS},
    }


def measure(place: Workplace) -> list[Row]:
    """Return how our order mixes next to webdataset's buffer of 5,000; print all contenders."""
    found: dict[int, dict[str, Quality]] = {}
    for shard_samples in SHARD_SAMPLES:
        shards = max(_LEAST_SHARDS, round(SAMPLES * place.scale) // shard_samples)
        place.say(f"{shards} shards of {shard_samples:,} samples")
        found[shard_samples] = {
            name: quality_of(contender.serve(shards, shard_samples), shard_samples)
            for name, contender in contenders().items()
        }
    Console().print(_table(found))
    return list(_rows(found))


def _table(found: Mapping[int, Mapping[str, Quality]]) -> Table:
    table = Table(
        title="What shuffling leaves of the order of the files",
        caption=f"apart: mean distance of neighbours in a shard, and of samples up to {NEARBY} apart there; "
        "r: correlation of file order and served order, over the epoch and within a shard; "
        f"in {BATCH}: different shards in a batch; MB: samples of {LARGE.label} kept in memory",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("shard", justify="right")
    table.add_column("order", no_wrap=True)
    for name in ("apart", f"1–{NEARBY}", "epoch r", "shard r", f"in {BATCH}", "MB"):
        table.add_column(name, justify="right")
    buffered = {name: contender.buffered_samples for name, contender in contenders().items()}
    for shard_samples, qualities in found.items():
        table.add_section()
        for name, quality in qualities.items():
            buffered_bytes = buffered[name] * LARGE.sample_bytes
            table.add_row(f"{shard_samples:,}", name, *_cells(quality), f"{buffered_bytes / 1e6:,.0f}")
    return table


def _cells(quality: Quality) -> tuple[str, ...]:
    return (
        f"{quality.neighbours_apart:,.0f}",
        f"{quality.nearby_apart:,.0f}",
        f"{quality.epoch_correlation:+.3f}",
        f"{quality.shard_correlation:.3f}",
        f"{quality.shards_in_batch:.1f}",
    )


def _rows(found: Mapping[int, Mapping[str, Quality]]) -> Iterator[Row]:
    for shard_samples, qualities in found.items():
        enough = _enough(shard_samples)
        for window in sorted({USUAL_WINDOW, enough}):
            where = f"shards of {shard_samples:,}, window {window}"
            yield from _compared(where, qualities[_ours(window)], qualities[PEER], judged=window == enough)


def _compared(where: str, quality: Quality, theirs: Quality, *, judged: bool) -> Iterator[Row]:
    def row(what: str, figure: Callable[[Quality], float], target: Target | None = None) -> Row:
        return Row("shuffle", f"{what}, {where}", figure(quality), PEER, figure(theirs), target if judged else None)

    yield row("neighbours apart", lambda quality: quality.neighbours_apart, Target("≥", 1.0))
    yield row("correlation in a shard", lambda quality: quality.shard_correlation, Target("≤", 1.0))


def _enough(shard_samples: int) -> int:
    """Return the least window that mixes as well as a buffer.

    A sample waits in a buffer for a time that is distributed exponentially, so that two neighbours come a buffer's size
    apart; in a window its time is uniform, and they come a third of the window's samples apart.
    """
    return next(window for window in WINDOWS if window * shard_samples >= 3 * GOOD_BUFFER)
