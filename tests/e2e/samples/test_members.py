"""Members that a dataset reads and decodes, and its `map` and `filter`, against a real daemon."""

import gzip
import io
from asyncio import CancelledError
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

from shardcache.errors import ConfigError, DecodeError, MissingMemberError, SampleError
from shardcache_client import reraise
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.order.sequences.partition import Even
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import write_index
from support.shards.tars import make_tar

SHARDS = 3
SAMPLES = 8
LACKING = 5  # every sample with this remainder by 8 lacks its label


def picture(number: int) -> bytes:
    """Return an image of one color."""
    file = io.BytesIO()
    Image.new("RGB", (32, 24), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def pictures(folder: Path) -> str:
    """The url of an index of shards with pictures, labels (one of each missing) and padding."""
    source = folder / "pictures"
    source.mkdir()
    for shard in range(SHARDS):
        samples = []
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            label = {} if number % SAMPLES == LACKING else {"cls": b"%d" % number}
            samples.append(
                {"__key__": f"{number:06d}", "png": picture(number), **label, "bin": bytes(20_000)}
            )
        (source / f"{shard}.tar").write_bytes(make_tar(samples))
    return write_index(source, [SAMPLES] * SHARDS)


options = pytest.mark.parametrize(
    "options", [{}, pytest.param({"shuffle": True}, marks=pytest.mark.slow), {"zero_copy": True}]
)


@options
def test_samples_have_the_members_that_were_chosen_and_decoded(
    pictures: str, daemon: Daemon, options: dict[str, Any]
) -> None:
    """Others are absent; "jpg;png" takes either, and a default replaces a missing one."""
    dataset = ShardDataset(
        pictures,
        members=("jpg;png", "cls"),
        decode={"jpg": "rgb8", "cls": int},
        missing={"cls": -1},
        socket=daemon.socket,
        **options,
    )
    samples = sorted(dataset, key=lambda sample: sample["__key__"])
    assert len(samples) == SHARDS * SAMPLES
    for number, sample in enumerate(samples):
        assert set(sample) == {"__key__", "__url__", "jpg", "cls"}
        assert sample["cls"] == (-1 if number % SAMPLES == LACKING else number)
        assert np.array_equal(sample["jpg"][0, 0], [number, 0, 0])
        assert sample["jpg"].shape == (24, 32, 3)


@options
def test_the_first_alternative_wins_whatever_their_order_in_the_tar(
    folder: Path, daemon: Daemon, options: dict[str, Any]
) -> None:
    """In a stream, by number, and in a mixture."""
    both = [
        {"__key__": "0", "jpg": b"photo", "png": b"mask"},
        {"__key__": "1", "png": b"mask", "jpg": b"photo"},
    ]
    (folder / "both.tar").write_bytes(
        make_tar([*both, {"__key__": "2", "png": b"photo", "webp": b"-"}])
    )
    dataset = ShardDataset(
        write_index(folder, [3], "both.tar"), members="jpg;png", socket=daemon.socket, **options
    )
    for samples in (dataset, dataset.indexed(), Mixture({"a": dataset})):
        assert [bytes(sample["jpg"]) for sample in samples] == [b"photo"] * 3
        assert all("png" not in sample for sample in samples)


@pytest.fixture(scope="module")
def dotted(folder: Path) -> str:
    """The url of an index of a shard whose keys have dots, and so its extensions."""
    source = folder / "dotted"
    source.mkdir()
    names = ("clip.0", "song.1", "plain")
    (source / "0.tar").write_bytes(
        make_tar([{"__key__": name, "mp3": b"1", "txt": b"words"} for name in names])
    )
    return write_index(source, [len(names)])


@options
@pytest.mark.parametrize(
    "choice",
    [
        {"members": "*.mp3"},
        {"members": ("mp3;*.mp3",)},
        {"members": "*.MP3", "decode": {"mp3": bytes}},
    ],
)
def test_patterns_choose_members_of_keys_with_dots(
    dotted: str, daemon: Daemon, choice: dict[str, Any], options: dict[str, Any]
) -> None:
    """Each sample has its value under the pattern's ending, also by number and in a mixture."""
    dataset = ShardDataset(dotted, socket=daemon.socket, **choice, **options)
    for samples in (dataset, dataset.indexed(), Mixture({"a": dataset})):
        found = list(samples)
        assert [bytes(sample["mp3"]) for sample in found] == [b"1"] * 3
        assert all(
            sample.keys() - {"__source__"} == {"__key__", "__url__", "mp3"} for sample in found
        )


def test_table_of_decoders_names_members_by_pattern(dotted: str, daemon: Daemon) -> None:
    """Other members keep the extensions that they have in the tar, and their bytes."""
    first, *_ = ShardDataset(dotted, decode={"*.mp3": int}, socket=daemon.socket)
    assert first == {"__key__": "clip", "__url__": first["__url__"], "mp3": 1, "0.txt": b"words"}


def test_error_of_a_missing_member_names_the_pattern(dotted: str, daemon: Daemon) -> None:
    """It fits what the sample has."""
    with pytest.raises(MissingMemberError) as caught:
        list(ShardDataset(dotted, members="mp3", socket=daemon.socket, on_error=reraise))
    assert '"*.mp3"' in caught.value.remedy


def test_pattern_that_fits_two_members_is_an_error_of_the_sample(
    folder: Path, daemon: Daemon
) -> None:
    """Neither is taken silently; an alternative that is one of them decides."""
    (folder / "twice.tar").write_bytes(make_tar([{"__key__": "0", "a.jpg": b"a", "b.jpg": b"b"}]))
    url = str(folder / "twice.tar")
    with pytest.raises(SampleError, match=r"'a\.jpg' and 'b\.jpg', which one pattern fits"):
        list(ShardDataset(url, members="*.jpg", socket=daemon.socket, on_error=reraise))
    (sample,) = ShardDataset(url, members="b.jpg;*.jpg", socket=daemon.socket)
    assert sample["b.jpg"] == b"b"


@pytest.mark.parametrize("members", ["*", "*jpg", "a*.jpg", "*.", ("jpg", "*.jpg")])
def test_members_that_no_pattern_means_are_refused(
    members: Any, dotted: str, daemon: Daemon
) -> None:
    """At the constructor, as for extensions."""
    with pytest.raises(ConfigError):
        ShardDataset(dotted, members=members, socket=daemon.socket)


@pytest.fixture(scope="module")
def further(folder: Path) -> str:
    """The url of an index of a shard with a compressed member and one of webdataset's tensors."""
    source = folder / "further"
    source.mkdir()
    tensors = webdataset.tenbin.encode_buffer([np.arange(6.0).reshape(2, 3)])
    members = {"json.gz": gzip.compress(b'{"a": 1}'), "ten": bytes(tensors)}
    (source / "0.tar").write_bytes(make_tar([{"__key__": "0", **members}]))
    return write_index(source, [1])


@pytest.mark.parametrize("decode", ["rgb8", {"json.gz": "json", "ten": "tenbin"}])
@options
def test_members_in_webdatasets_further_formats_are_decoded(
    further: str, daemon: Daemon, decode: Any, options: dict[str, Any]
) -> None:
    """Compressed ones and its tensors, by extension and by name, wherever samples come from."""
    dataset = ShardDataset(further, decode=decode, socket=daemon.socket, **options)
    for samples in (dataset, dataset.indexed(), Mixture({"a": dataset})):
        (sample,) = samples
        assert sample["json.gz"] == {"a": 1}
        assert np.array_equal(sample["ten"], [[[0, 1, 2], [3, 4, 5]]])


def test_samples_that_lack_a_member_are_errors_or_skipped(pictures: str, daemon: Daemon) -> None:
    """An error goes to the handler. Skipped samples are replaced, so ranks stay equal."""
    with pytest.raises(MissingMemberError, match="'000005' has no member 'cls'"):
        list(ShardDataset(pictures, members=("png", "cls"), socket=daemon.socket, on_error=reraise))
    skipping = ShardDataset(pictures, decode={"cls": int}, missing="skip", socket=daemon.socket)
    numbers = [sample["cls"] for sample in skipping]
    assert len(numbers) == len(skipping)
    assert set(numbers) == {
        number for number in range(SHARDS * SAMPLES) if number % SAMPLES != LACKING
    }


@pytest.mark.parametrize("workers", first_quick([0, 2]))
def test_map_and_filter(pictures: str, daemon: Daemon, workers: int) -> None:
    """Remaining samples come once, in the order of the dataset; a state in the middle is exact."""
    whole = ShardDataset(pictures, shuffle=True, seed=3, socket=daemon.socket)
    odd = whole.map(lambda sample: int(sample["__key__"])).filter(lambda number: number % 2)
    assert len(whole.map(len)) == SHARDS * SAMPLES
    with pytest.raises(TypeError, match="because of filter"):
        len(odd)
    loader = odd.loader(batch_size=2, num_workers=workers, collate_fn=list)
    with pytest.raises(TypeError, match="filter"):
        _ = loader.remaining
    batches = list(loader)
    assert sorted(chain(*batches)) == sorted(
        number for number in range(SHARDS * SAMPLES) if number % 2
    )
    loader.set_epoch(0)
    taken = list(islice(iter(loader), 3))
    state = loader.state_dict()
    again = whole.map(lambda sample: int(sample["__key__"])).filter(lambda number: number % 2)
    resumed = again.loader(batch_size=2, num_workers=workers, collate_fn=list)
    resumed.load_state_dict(state)
    assert taken + list(resumed) == batches


@pytest.mark.parametrize(
    "ending",
    [
        GeneratorExit,
        pytest.param(CancelledError, marks=pytest.mark.slow),
        pytest.param(StopIteration, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("door", first_quick(["map", "decode", "collate"]))
def test_exceptions_that_end_a_worker_are_errors_of_the_function(
    door: str, ending: type[BaseException], daemon: Daemon, pictures: str
) -> None:
    """torch's worker would end silently, or without its batches, which are then missing."""

    def fail(_: Any) -> Any:
        raise ending

    dataset: Any = ShardDataset(
        pictures, decode={"png": fail} if door == "decode" else None, socket=daemon.socket
    )
    dataset = dataset.map(fail) if door == "map" else dataset
    loader = dataset.loader(
        batch_size=4, num_workers=1, collate_fn=fail if door == "collate" else None
    )
    error = RuntimeError if door == "collate" else DecodeError
    with pytest.raises(error, match=ending.__name__):
        list(loader)


def test_a_copy_counts_its_own_epochs(pictures: str, daemon: Daemon) -> None:
    """A dataset and what was made of it by `map` do not move each other's position."""
    whole = ShardDataset(pictures, shuffle=True, missing={}, socket=daemon.socket)
    mapped = whole.map(lambda sample: sample["__key__"])
    first = list(mapped)
    assert mapped.epoch == 1
    assert whole.epoch == 0
    assert [sample["__key__"] for sample in whole] == first
    assert list(mapped) != first


def test_a_filter_needs_ranks_that_may_differ(pictures: str, daemon: Daemon) -> None:
    """Ranks in step would wait for each other, and one's state says nothing of the other's."""

    def reader(rank: int, even: Even = None) -> ShardDataset[Any]:
        return ShardDataset(
            pictures, even=even, rank=rank, world_size=2, socket=daemon.socket
        ).filter(bool)

    with pytest.raises(ConfigError, match="different numbers of samples"):
        next(iter(reader(0, even="pad")))
    assert len(list(reader(0))) == SHARDS * SAMPLES // 2
    first = reader(0)
    samples = iter(first)
    next(samples)
    state = first.state_dict()
    del samples

    first.load_state_dict(state)
    assert len(list(first)) == SHARDS * SAMPLES // 2 - 1
    second = reader(1)
    second.load_state_dict(state)
    with pytest.raises(ConfigError, match="load the states of all ranks"):
        next(iter(second))
