"""Batches of decoded JPEGs, as a training loop gets them: ours next to webdataset's, litdata's and MosaicML's loaders.

Each contender reads the same files, kept in its own format on this disk, and gives batches of 224 × 224 crops as uint8
tensors. webdataset decodes by its own "rgb8" (Pillow); litdata and MosaicML, which leave it to the user, by simplejpeg,
as ours does.

python -m benchmarks.reading.decoded '{"contender": "webdataset", "source": "…", …}': one contender, a process.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.daemon import Daemon
from benchmarks.measure import medians, python, run
from benchmarks.table import Row, Target
from benchmarks.workplace import Workplace
from support.shards.tars import make_tar

WORKERS, BATCH = 2, 64
SIDE, CROP = 256, 224
SHARDS, SHARD_SAMPLES = 4, 768
_TIMED_S = 6.0
_EDGE = (SIDE - CROP) // 2

Sample = tuple[str, bytes, int]


@dataclass(frozen=True, slots=True)
class Task:
    """One contender's input."""

    contender: str  # key of `CONTENDERS`
    source: str  # pattern of tars, or folder of chunks
    socket: str  # of the daemon, where the contender is ours
    scratch: str  # a folder for what the contender caches


def measure(place: Workplace) -> list[Row]:
    """Return decoded images a second, medians of interleaved rounds."""
    sources = _write(place)
    with place.daemon() as daemon, place.folder() as scratch:
        daemon.warm(sources["shardcache"])
        rates = medians(_contenders(sources, daemon, scratch), lambda text: place.say(f"{text} images/s"), place.rounds)
    ours = rates.pop("shardcache")
    what = f"images/s, JPEGs of {SIDE} × {SIDE} decoded and cropped, batches of {BATCH}, {WORKERS} workers"
    best = max(rates, key=lambda name: rates[name])
    return [
        Row("decoded", what, ours, peer, rate, Target("≥", 1.0) if peer == best else None)
        for peer, rate in rates.items()
    ]


def _contenders(sources: dict[str, str], daemon: Daemon, scratch: Path) -> dict[str, Callable[[], float]]:
    def images_per_s(contender: str) -> float:
        task = Task(contender, sources[contender], str(daemon.socket), str(scratch))
        return round(float(run(python("reading.decoded", json.dumps(asdict(task)))).output.splitlines()[-1]))

    return {name: partial(images_per_s, name) for name in sources}


def samples(shard: int) -> Iterator[Sample]:
    """Yield key, JPEG and label of each sample of a shard, the same every time: noise on a smooth picture."""
    from PIL import Image

    source = np.random.default_rng(shard)
    for number in range(SHARD_SAMPLES):
        smooth = Image.fromarray(source.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((SIDE, SIDE))
        noisy = np.clip(np.asarray(smooth, dtype=np.int16) + source.integers(-8, 9, (SIDE, SIDE, 3)), 0, 255)
        file = io.BytesIO()
        Image.fromarray(noisy.astype(np.uint8)).save(file, "JPEG", quality=90)
        yield f"{shard:03d}{number:04d}", file.getvalue(), number % 10


def _write(place: Workplace) -> dict[str, str]:
    """Write the samples in every contender's format; return where each finds its own."""
    place.say("making JPEGs")
    root = place.root / "decoded"
    tars, litdata_folder, mosaic_folder = root / "tars", root / "litdata", root / "mosaicml"
    tars.mkdir(parents=True, exist_ok=True)
    shards = [list(samples(shard)) for shard in range(SHARDS)]
    for number, shard in enumerate(shards):
        members = [{"__key__": key, "jpg": image, "cls": str(label).encode()} for key, image, label in shard]
        (tars / f"{number}.tar").write_bytes(make_tar(members))
    _write_litdata(litdata_folder, shards)
    _write_mosaicml(mosaic_folder, shards)
    rows = [{"url": f"{number}.tar", "nsamples": SHARD_SAMPLES} for number in range(SHARDS)]
    (tars / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return {
        "shardcache": f"file://{tars}/index.json",
        "webdataset": f"{tars}/{{0..{SHARDS - 1}}}.tar",
        "litdata": str(litdata_folder),
        "mosaicml": str(mosaic_folder),
    }


def _write_litdata(folder: Path, shards: list[list[Sample]]) -> None:
    with redirect_stdout(io.StringIO()):
        from litdata.streaming.writer import BinaryWriter

        folder.mkdir(exist_ok=True)
        writer = BinaryWriter(str(folder), chunk_bytes="64MB")
        for number, (_, image, label) in enumerate(sample for shard in shards for sample in shard):
            writer.add_item(number, {"image": image, "label": label})
        writer.done()
        writer.merge()


def _write_mosaicml(folder: Path, shards: list[list[Sample]]) -> None:
    hide_torchvision()
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"image": "bytes", "label": "int"}, exist_ok=True) as writer:
        for _, image, label in (sample for shard in shards for sample in shard):
            writer.write({"image": image, "label": label})


def shardcache(task: Task) -> Any:
    """Our dataset and its loader."""
    from shardcache_client import ShardDataset

    dataset = ShardDataset(task.source, shuffle=True, decode={"jpg": "rgb8", "cls": int}, socket=task.socket)
    return dataset.map(_crop_ours).loader(batch_size=BATCH, num_workers=WORKERS)


def _crop_ours(sample: dict[str, Any]) -> tuple[Any, int]:
    return _crop(sample["jpg"]), sample["cls"]


def webdataset(task: Task) -> Any:
    """webdataset over local files."""
    import webdataset as wds

    dataset = wds.WebDataset(task.source, shardshuffle=SHARDS).shuffle(1_000).decode("rgb8").to_tuple("jpg", "cls")
    batches = dataset.map_tuple(_crop, int).batched(BATCH)
    return wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def litdata(task: Task) -> Any:
    """litdata over its chunks in a local folder."""
    logging.getLogger("litdata").setLevel(logging.ERROR)
    import simplejpeg
    from litdata import StreamingDataLoader, StreamingDataset

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return _crop(simplejpeg.decode_jpeg(sample["image"])), sample["label"]

    return StreamingDataLoader(
        Crops(task.source, shuffle=True), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )


def mosaicml(task: Task) -> Any:
    """MosaicML's streaming over its shards in a local folder."""
    hide_torchvision()
    import simplejpeg
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    class Crops(StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return _crop(simplejpeg.decode_jpeg(sample["image"])), sample["label"]

    dataset = Crops(local=task.source, shuffle=True, batch_size=BATCH)
    return DataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)


def hide_torchvision() -> None:
    """Let `streaming` be imported: its examples import torchvision, and PyPI's fails next to a torch for CPUs."""
    import transformers.feature_extraction_utils  # noqa: F401  # first, so that it finds no torchvision

    names = {"": {}, ".datasets": {"VisionDataset": object}, ".transforms": {}}
    for name, contents in (names | {".transforms.functional": {"to_tensor": None}}).items():
        module = ModuleType(f"torchvision{name}")
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        vars(module).update(contents)
        sys.modules[module.__name__] = module


def _crop(pixels: Any) -> Any:
    return np.ascontiguousarray(pixels[_EDGE : _EDGE + CROP, _EDGE : _EDGE + CROP])


CONTENDERS = {contender.__name__: contender for contender in (shardcache, webdataset, litdata, mosaicml)}


def images_per_s(task: Task) -> float:
    """Read an epoch unmeasured, with the workers' start in it, then whole epochs for a while; check each."""
    loader = CONTENDERS[task.contender](task)
    _read_epoch(loader, task)
    images, started_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - started_s) < _TIMED_S:
        images += _read_epoch(loader, task)
    return images / elapsed_s


def _read_epoch(loader: Any, task: Task) -> int:
    images = sum(len(batch[0]) for batch in loader)
    if images != SHARDS * SHARD_SAMPLES:
        raise RuntimeError(f"{task.contender} gave {images} images, the dataset has {SHARDS * SHARD_SAMPLES}")
    return images


if __name__ == "__main__":
    print(images_per_s(Task(**json.loads(sys.argv[1]))))
