"""Batches of decoded JPEGs for training: ours next to webdataset's, litdata's and MosaicML's.

Each contender reads the same files, kept in its own format on this disk, and gives batches of 224 ×
224 crops as uint8 tensors; ours by threads, and by worker processes as the others. webdataset
decodes by its own "rgb8" (Pillow); litdata and MosaicML, which leave it to the user, by simplejpeg,
as ours does.
"""

import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.measure import Row, Target, call, compared, rate
from benchmarks.workplace import Workplace
from support.shards.reading import write_index
from support.shards.tars import make_tar

WORKERS = 2
BATCH = 64
SIDE = 256
CROP = 224
SHARDS = 4
SHARD_SAMPLES = 768
PROCESSES = "shardcache, worker processes"
_TIMED_S = 6.0
_EDGE = (SIDE - CROP) // 2

Sample = tuple[str, bytes, int]


def measure(place: Workplace) -> list[Row]:
    """Return decoded images a second, medians of interleaved rounds."""
    sources = _write(place)
    what = f"JPEGs of {SIDE} × {SIDE} decoded and cropped, batches of {BATCH}, {WORKERS} workers"
    with place.warmed(sources["shardcache"]) as daemon:
        contenders = {
            name: partial(
                call, images_per_s, contender=name, source=source, socket=str(daemon.socket)
            )
            for name, source in sources.items()
        }
        return compared(
            contenders, place.say, place.rounds, "images/s", what, {"litdata": Target("≥", 1.4)}
        )


def samples(shard: int) -> Iterator[Sample]:
    """Yield key, JPEG and label of each sample of a shard: always the same noisy pictures."""
    from PIL import Image

    source = np.random.default_rng(shard)
    for number in range(SHARD_SAMPLES):
        smooth = Image.fromarray(source.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
            (SIDE, SIDE)
        )
        noisy = np.clip(
            np.asarray(smooth, dtype=np.int16) + source.integers(-8, 9, (SIDE, SIDE, 3)), 0, 255
        )
        file = io.BytesIO()
        Image.fromarray(noisy.astype(np.uint8)).save(file, "JPEG", quality=90)
        yield f"{shard:03d}{number:04d}", file.getvalue(), number % 10


def _write(place: Workplace) -> dict[str, str]:
    """Write the samples in every contender's format; return where each finds its own."""
    place.say("making JPEGs")
    root = place.root / "decoded"
    tars = root / "tars"
    tars.mkdir(parents=True, exist_ok=True)
    shards = [list(samples(shard)) for shard in range(SHARDS)]
    for number, shard in enumerate(shards):
        members = [
            {"__key__": key, "jpg": image, "cls": str(label).encode()}
            for key, image, label in shard
        ]
        (tars / f"{number}.tar").write_bytes(make_tar(members))
    items = [{"image": image, "label": label} for shard in shards for _, image, label in shard]
    peers.write_litdata(root / "litdata", items)
    peers.write_mosaicml(root / "mosaicml", {"image": "bytes", "label": "int"}, items)
    index = write_index(tars, [SHARD_SAMPLES] * SHARDS)
    return {
        "shardcache": index,
        PROCESSES: index,
        "webdataset": f"{tars}/{{0..{SHARDS - 1}}}.tar",
        "litdata": str(root / "litdata"),
        "mosaicml": str(root / "mosaicml"),
    }


def images_per_s(contender: str, source: str, socket: str) -> float:
    ours = {
        "shardcache": partial(_ours, socket=socket, workers="threads"),
        PROCESSES: partial(_ours, socket=socket, workers="processes"),
    }
    loaders = ours | {"webdataset": _webdataset}
    loader = loaders.get(contender, partial(_simplejpeg, contender))(source)
    return rate(lambda: sum(len(batch[0]) for batch in loader), SHARDS * SHARD_SAMPLES, _TIMED_S)


def _ours(source: str, socket: str, workers: str) -> Any:
    from shardcache_client.dataset import ShardDataset

    dataset = ShardDataset(source, shuffle=True, decode={"jpg": "rgb8", "cls": int}, socket=socket)
    return dataset.map(_crop_ours).loader(batch_size=BATCH, num_workers=WORKERS, workers=workers)


def _crop_ours(sample: dict[str, Any]) -> tuple[Any, int]:
    return _crop(sample["jpg"]), sample["cls"]


def _webdataset(source: str) -> Any:
    import webdataset as wds

    dataset = (
        wds.WebDataset(source, shardshuffle=SHARDS)
        .shuffle(1_000)
        .decode("rgb8")
        .to_tuple("jpg", "cls")
    )
    batches = dataset.map_tuple(_crop, int).batched(BATCH)
    return wds.WebLoader(batches, batch_size=None, num_workers=WORKERS, persistent_workers=True)


def _simplejpeg(contender: str, source: str) -> Any:
    """Return the loader of litdata or MosaicML, with a dataset that decodes by simplejpeg."""
    import simplejpeg

    if contender == "litdata":
        from litdata import StreamingDataLoader as Loader
        from litdata import StreamingDataset as Base

        where = {"input_dir": source}
    else:
        from torch.utils.data import DataLoader as Loader

        Base = peers.mosaicml().StreamingDataset  # noqa: N806  # a class
        where = {"local": source, "batch_size": BATCH}

    class Crops(Base):  # type: ignore[misc,valid-type]
        def __getitem__(self, index: Any) -> Any:
            sample = super().__getitem__(index)
            return _crop(simplejpeg.decode_jpeg(sample["image"])), sample["label"]

    return Loader(
        Crops(**where, shuffle=True), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True
    )


def _crop(pixels: Any) -> Any:
    return np.ascontiguousarray(pixels[_EDGE : _EDGE + CROP, _EDGE : _EDGE + CROP])
