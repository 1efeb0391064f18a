"""Data pipelines of other projects over a daemon: recipes in docs/examples with their own code."""

import importlib
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.programs.examples import EXAMPLES
from support.shards.tars import pack

SHARDS = 4
PER_SHARD = 12
TOTAL = SHARDS * PER_SHARD
BATCH = 3
WORKERS = 2
RANKS = 2

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # theirs
]


@pytest.fixture(scope="module", autouse=True)
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon found by the environment, and torchvision, which the recipes import."""
    importlib.import_module("torchvision_on_cpu")
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDCACHE_SOCKET", str(daemon.socket))
        patch.syspath_prepend(str(EXAMPLES))
        yield daemon


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon) -> Path:
    """Shards of images with a caption and a class, which number the samples, and their index."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        members = [(f"{n:06d}.{ext}", value) for n in numbers for ext, value in sample(n).items()]
        (folder / f"train-{shard}.tar").write_bytes(pack(members))
    index = folder / "index.json"
    assert shardcache("index", f"{folder}/*.tar", "-o", str(index), socket=daemon.socket).code == 0
    return folder


def sample(number: int) -> dict[str, bytes]:
    """Return a sample's members: an image, and the number as caption and class."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), "orange").save(buffer, "JPEG")
    return {"jpg": buffer.getvalue(), "txt": b"%d" % number, "cls": b"%d" % number}


def on_rank(rank: int, patch: pytest.MonkeyPatch) -> None:
    """Be a rank of the job, as a launcher says it."""
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", str(RANKS))


def check(epochs: list[list[list[int]]]) -> None:
    """Hold each epoch, a list of numbers for each rank, against the promise."""
    for ranks in epochs:
        assert len({len(numbers) for numbers in ranks}) == 1
        assert Counter(number for numbers in ranks for number in numbers) == Counter(range(TOTAL))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("train-{0..3}.tar", []),
        ("index.json", ["--dataset-resampled"]),
        ("train-{0..1}.tar::FOLDER/train-2.tar::FOLDER/train-3.tar", []),
    ],
    ids=["braces", "index", "parts"],
)
def test_open_clip_reads_every_sample_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, url: str, options: list[str]
) -> None:
    """Two ranks of two workers read two different epochs, by pattern, index or several urls."""
    check(open_clip(monkeypatch, f"{folder}/{url.replace('FOLDER', str(folder))}", BATCH, *options))


def test_open_clip_mixes_parts_by_their_upsampling_factors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    """Three shards at factor 1 and a single shard at factor 3 give half of each epoch each."""
    for name, pattern in (("large", "train-{0..2}.tar"), ("small", "train-3.tar")):
        made = shardcache(
            "index", f"{folder}/{pattern}", "-o", str(folder / f"{name}.json"), socket=daemon.socket
        )
        assert made.code == 0
    url = f"{folder}/large.json::{folder}/small.json"
    options = ("--dataset-resampled", "--train-data-upsampling-factors", "1::3")
    for ranks in open_clip(monkeypatch, url, BATCH, *options):
        numbers = [number for rank in ranks for number in rank]
        assert sum(number >= 3 * PER_SHARD for number in numbers) == TOTAL // 2
        assert len(numbers) == TOTAL


def test_open_clip_reads_every_sample_in_epochs_that_it_rounds_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """60 samples are promised of 48, in batches of 5 from four workers, and 12 come again."""
    for ranks in open_clip(monkeypatch, f"{folder}/train-{{0..3}}.tar", 5):
        reads = Counter(number for numbers in ranks for number in numbers)
        assert len(reads) == TOTAL
        assert reads.total() == 60


def open_clip(
    monkeypatch: pytest.MonkeyPatch, url: str, batch_size: int, *options: str
) -> list[list[list[int]]]:
    """Return the numbers that each rank reads in each of two epochs."""
    recipe = importlib.import_module("with_open_clip")
    params = importlib.import_module("open_clip_train.params")
    data = recipe.data
    command = [
        "--train-data",
        url,
        "--train-num-samples",
        str(TOTAL),
        "--dataset-type",
        "webdataset",
    ]
    args = params.parse_args(
        [*command, *options, "--batch-size", str(batch_size), "--workers", str(WORKERS)]
    )
    args.world_size = RANKS
    infos = []
    for rank in range(RANKS):
        on_rank(rank, monkeypatch)
        infos.append(data.get_data(args, (to_tensor, to_tensor), tokenizer=tokenize)["train"])
    epochs = []
    for epoch in range(2):
        ranks = []
        for rank, info in enumerate(infos):
            on_rank(rank, monkeypatch)
            info.set_epoch(epoch)
            batches = [texts.tolist() for images, texts in info.dataloader]
            assert len(batches) == info.dataloader.num_batches
            ranks.append([number for batch in batches for number in batch])
        epochs.append(ranks)
    return epochs


def test_open_clip_evaluates_on_every_sample(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that evaluates reads all of the validation shards."""
    data = importlib.import_module("with_open_clip").data
    params = importlib.import_module("open_clip_train.params")
    args = params.parse_args(
        [
            "--val-data",
            f"{folder}/train-{{0..3}}.tar",
            "--dataset-type",
            "webdataset",
            "--workers",
            "2",
        ]
    )
    on_rank(0, monkeypatch)
    info = data.get_data(args, (to_tensor, to_tensor), tokenizer=tokenize)["val"]
    assert sorted(number for _, texts in info.dataloader for number in texts.tolist()) == list(
        range(TOTAL)
    )


def to_tensor(picture: Any) -> torch.Tensor:
    """Return a picture's size, in place of its pixels."""
    return torch.tensor(picture.size)


def tokenize(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(text))]


def test_timm_reads_every_sample_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training epochs of timm's own loader differ in order; evaluation has the shards' order."""
    importlib.import_module("with_timm")
    from timm.data import create_dataset, create_loader

    def loader(is_training: bool, batch_size: int = BATCH) -> tuple[Any, Any]:
        split = f"train-{{0..3}}.tar|{TOTAL}"
        dataset = create_dataset(
            "wds/",
            root=str(folder),
            split=split,
            is_training=is_training,
            batch_size=batch_size,
            num_samples=TOTAL,
        )
        made = create_loader(
            dataset,
            (3, 8, 8),
            batch_size,
            is_training=is_training,
            num_workers=WORKERS,
            use_prefetcher=False,
        )
        return dataset, made

    def epochs(batch_size: int) -> list[list[list[int]]]:
        dataset, training = loader(True, batch_size)
        read = []
        for epoch in range(2):
            dataset.set_epoch(epoch)
            read.append([[int(number) for _, numbers in training for number in numbers]])
        return read

    check(epochs(BATCH))
    assert [(len(each), len(set(each))) for [each] in epochs(7)] == [(56, TOTAL)] * 2, "rounded up"
    _, evaluation = loader(False)
    assert sorted(int(number) for _, numbers in evaluation for number in numbers) == list(
        range(TOTAL)
    )
