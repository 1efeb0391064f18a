"""Batches from DataLoader workers, as bytes and with zero copy: in the workers and at the trainer.

In `batches` only the size of a batch reaches the trainer, so that reading is measured; in
`handover` the samples do.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from benchmarks import peers
from benchmarks.data import LARGE
from benchmarks.measure import Figure, Row, Target, call, interleaved, medians, rate
from benchmarks.workplace import Daemon, Workplace

(EXTENSION,) = LARGE.extensions
WORKERS = 2
BATCH = 32
_TIMED_S = 3.0

BYTES = "shardcache"
ZERO_COPY = "zero_copy"
WEBDATASET = "webdataset"
LITDATA = "litdata"
_FORMS = {BYTES: ("bytes", Target("≥", 0.9)), ZERO_COPY: ("zero copy", Target("≥", 1.1))}
_PEERS = {WEBDATASET: Target("≥", 5.0), LITDATA: Target("≥", 5.0), BYTES: None}
USES = {False: "left alone", True: "every byte read"}


def batches(place: Workplace) -> list[Row]:
    """Return samples a second that workers gather, medians of interleaved rounds."""
    with place.warmed(place.url(LARGE)) as daemon:
        contenders = _contenders(place, daemon, gathered_per_s, (BYTES, ZERO_COPY, LITDATA))
        rates = medians(contenders, lambda text: place.say(f"{text} samples/s"), place.rounds)
    what = f"{LARGE.label} × {BATCH}, {WORKERS} workers"
    return [
        Row("samples/s", f"{what}, {form}", rates[ours], LITDATA, rates[LITDATA], target)
        for ours, (form, target) in _FORMS.items()
    ]


def handover(place: Workplace) -> Iterator[Row]:
    """Yield megabytes a second that reach the trainer, best of all rounds each."""
    with place.warmed(place.url(LARGE)) as daemon:
        for read in USES:
            yield from _handed_over(place, daemon, read)


def _handed_over(place: Workplace, daemon: Daemon, read: bool) -> list[Row]:
    contenders = _contenders(
        place, daemon, handed_mb_per_s, (ZERO_COPY, BYTES, WEBDATASET, LITDATA), read=read
    )
    tries = interleaved(
        contenders, lambda text: place.say(f"{USES[read]} · {text} MB/s"), place.rounds
    )
    best = {name: Figure(rates, max) for name, rates in tries.items()}
    what = f"{LARGE.label} × {BATCH}, {WORKERS} workers, {USES[read]}"
    return [
        Row("MB/s", what, best[ZERO_COPY], f"{peer}, bytes", best[peer], target)
        for peer, target in _PEERS.items()
    ]


def _contenders(
    place: Workplace,
    daemon: Daemon,
    measured: Callable[..., float],
    names: Iterable[str],
    **how: Any,
) -> dict[str, Callable[[], float]]:
    dataset = place.dataset(LARGE)
    url = place.url(LARGE)
    sources = {WEBDATASET: str(dataset.folder), LITDATA: str(place.litdata(LARGE))}
    how |= {"samples": dataset.samples, "socket": str(daemon.socket)}
    return {
        name: partial(call, measured, contender=name, source=sources.get(name, url), **how)
        for name in names
    }


def gathered_per_s(contender: str, source: str, socket: str, samples: int) -> float:
    # torch's own loader for all: litdata's dataset is no slower in it than in litdata's.
    loader = _loader(_dataset(contender, source, socket), _gathered)
    return rate(lambda: sum(loader), samples, _TIMED_S)


def handed_mb_per_s(contender: str, source: str, socket: str, samples: int, read: bool) -> float:
    """Return what the trainer receives, where it reads every byte or only asks for the length."""
    import numpy as np

    def as_bytes(sample: dict[str, Any]) -> dict[str, Any]:
        # Its samples hold memoryviews, which no queue can pickle: whoever does not decode in the
        # workers does this.
        return sample | {EXTENSION: bytes(sample[EXTENSION])}

    if contender == LITDATA:
        from litdata import StreamingDataLoader

        loader = _loader(peers.litdata(source, transform=as_bytes), list, StreamingDataLoader)
    else:
        loader = _loader(_dataset(contender, source, socket), list)

    def receive() -> float:
        received = 0
        for batch in loader:
            for sample in batch:
                value = sample[EXTENSION]
                received += len(value)
                if read:
                    np.frombuffer(value, np.uint64).sum()
        return received

    return rate(receive, samples * LARGE.sample_bytes, _TIMED_S) / 1e6


def _dataset(contender: str, source: str, socket: str) -> Any:
    from shardcache_client.dataset import ShardDataset

    if contender in (BYTES, ZERO_COPY):
        return ShardDataset(source, socket=socket, zero_copy=contender == ZERO_COPY)
    return {WEBDATASET: peers.webdataset, LITDATA: peers.litdata}[contender](source)


def _loader(dataset: Any, collate: Callable[[Any], Any], kind: Any = None) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    loader: Iterable[Any] = (kind or DataLoader)(
        dataset, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate, persistent_workers=True
    )
    return loader


def _gathered(batch: list[Any]) -> int:
    """Return the number of samples of a batch, all that its worker sends."""
    assert sum(len(sample[EXTENSION]) for sample in batch) == len(batch) * LARGE.sample_bytes
    return len(batch)
