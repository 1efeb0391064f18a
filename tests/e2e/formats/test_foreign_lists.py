"""Lists of shards and counts that other programs have written, as urls of a dataset."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardcache.errors import ConfigError, CountMismatchError, NotAnIndexError
from shardcache_client import reraise
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import cached_paths, open_cached
from support.programs.daemon import Daemon
from support.shards.reading import keys_of
from support.shards.tars import make_tar

NAMES = ("a-0.tar", "a-1.tar", "b-0.tar")
COUNTS = dict(zip(NAMES, (2, 3, 4), strict=True))
TIMM = {
    name: {
        "name": name,
        "filenames": files,
        "shard_lengths": [COUNTS[file] for file in files],
        "num_samples": sum(COUNTS[file] for file in files),
    }
    for name, files in {"train": ["a-0.tar", "a-1.tar"], "val": ["b-0.tar"]}.items()
}
INFO = {"energon_version": "7.4.1", "shard_counts": COUNTS}
SPLITS = {"split_parts": {"train": ["a-{0..1}.tar"], "val": ["b-0.tar"]}, "exclude": []}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of three shards."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, count in COUNTS.items():
        samples = [{"__key__": f"{name[:3]}-{number}", "txt": b"text"} for number in range(count)]
        (folder / name).write_bytes(make_tar(samples))
    (folder / ".nv-meta").mkdir()
    return folder


def written(path: Path, content: Any) -> str:
    """Write a list in the form that its name says; return its path."""
    text = content if isinstance(content, str) else json.dumps(content, indent=2)
    path.write_text(yaml.dump(content) if path.suffix == ".yaml" else text)
    return str(path)


def dataset_of(url: str, daemon: Daemon) -> ShardDataset[Any]:
    """Return a dataset of equal ranks, which takes counted samples."""
    return ShardDataset(url, even="drop", rank=0, world_size=2, socket=daemon.socket)


@pytest.mark.parametrize(
    ("name", "content", "split", "total"),
    [
        ("sizes.json", COUNTS, "", 9),
        ("_info.json", {"splits": TIMM}, "#train", 5),
        ("_info.json", {"splits": TIMM}, "#val", 4),
        ("_info.json", {"splits": {"train": TIMM["train"]}}, "", 5),
        (".nv-meta/.info.json", INFO, "", 9),
        (".nv-meta/.info.yaml", INFO, "", 9),
    ],
)
def test_counts_that_others_wrote_make_ranks_equal(
    name: str, content: Any, split: str, total: int, shards: Path, daemon: Daemon
) -> None:
    """A dataset without counts would refuse two ranks; the shards are beside the list."""
    url = written(shards / name, content) + split
    assert len(list(dataset_of(url, daemon))) == total // 2
    assert len(ShardDataset(url, socket=daemon.socket)) == total


@pytest.mark.parametrize("kind", ["json", "yaml"])
@pytest.mark.parametrize("info", [".info.json", ".info.yaml"])
def test_splits_of_energon_have_the_counts_beside_them(
    kind: str, info: str, shards: Path, daemon: Daemon
) -> None:
    """Whichever of its forms Energon wrote; braces are expanded."""
    written(shards / ".nv-meta" / info, INFO)
    url = written(shards / ".nv-meta" / f"split.{kind}", SPLITS)
    assert len(dataset_of(f"{url}#train", daemon)) == 5 // 2
    assert keys_of(ShardDataset(f"{url}#val", socket=daemon.socket)) == [
        f"b-0-{number}" for number in range(4)
    ]


def test_shards_that_a_split_excludes_are_left_out(shards: Path, daemon: Daemon) -> None:
    """By their names, with braces."""
    written(shards / ".nv-meta" / ".info.json", INFO)
    url = written(shards / ".nv-meta" / "split.json", SPLITS | {"exclude": ["a-{0..0}.tar"]})
    assert len(ShardDataset(f"{url}#train", socket=daemon.socket)) == 3


def test_split_without_counts_beside_it_is_read_uncounted(shards: Path, daemon: Daemon) -> None:
    """As a list of urls is."""
    url = written(shards / ".nv-meta" / "split.json", SPLITS)
    assert len(keys_of(ShardDataset(f"{url}#train", socket=daemon.socket))) == 5


@pytest.mark.parametrize("name", ["shards.list", "train.LIST"])
def test_list_of_urls_by_line_is_an_index(name: str, shards: Path, daemon: Daemon) -> None:
    """As WeNet's are; paths are absolute, or begin where the list is."""
    url = written(shards / name, f"{shards}/b-0.tar\n\na-0.tar\n")
    keys = keys_of(ShardDataset(url, socket=daemon.socket))
    assert keys == [*(f"b-0-{number}" for number in range(4)), "a-0-0", "a-0-1"]


@pytest.mark.parametrize("split", ["", "#test"])
def test_error_of_a_split_names_those_that_there_are(
    split: str, shards: Path, daemon: Daemon
) -> None:
    """And how to write one."""
    url = written(shards / "_info.json", {"splits": TIMM})
    with pytest.raises(ConfigError, match="it has: train, val") as caught:
        ShardDataset(url + split, socket=daemon.socket)
    assert "_info.json#train" in caught.value.remedy


@pytest.mark.parametrize(
    "content", [COUNTS, {"wids_version": 1, "shardlist": [{"url": "a-0.tar"}]}]
)
def test_split_of_a_list_without_any_is_refused(content: Any, shards: Path, daemon: Daemon) -> None:
    """Others would be read silently."""
    with pytest.raises(ConfigError, match="has no splits"):
        ShardDataset(written(shards / "list.json", content) + "#train", socket=daemon.socket)


def test_wrong_count_of_another_programs_list_is_an_error(shards: Path, daemon: Daemon) -> None:
    """As one of our own index is."""
    url = written(shards / "sizes.json", COUNTS | {"a-1.tar": 7})
    with pytest.raises(CountMismatchError, match="7"):
        list(ShardDataset(url, socket=daemon.socket, on_error=reraise))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("sizes.json", COUNTS | {"a-1.tar": "many"}),
        ("sizes.json", COUNTS | {"a-1.tar": -1}),
        ("_info.json", {"splits": {"train": {"filenames": ["a-0.tar"], "shard_lengths": []}}}),
        ("_info.json", {"splits": {"train": {}}}),
        (".nv-meta/split.yaml", "split_parts: {train: [a"),
        (".nv-meta/split.json", {"split_parts": {"train": "a-0.tar"}}),
        ("notes.list", "some notes"),
    ],
)
def test_lists_that_make_no_sense_are_refused(
    name: str, content: Any, shards: Path, daemon: Daemon
) -> None:
    """With what is wrong, and as no index."""
    path = shards / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(NotAnIndexError):
        ShardDataset(str(path), socket=daemon.socket)


def test_split_that_excludes_single_samples_is_refused(shards: Path, daemon: Daemon) -> None:
    """They would be read."""
    url = written(shards / ".nv-meta" / "split.json", SPLITS | {"exclude": ["a-0.tar/1"]})
    with pytest.raises(ConfigError, match="leaves out single samples"):
        ShardDataset(f"{url}#train", socket=daemon.socket)


def test_open_list_is_a_file_and_its_paths_are_the_shards(shards: Path, daemon: Daemon) -> None:
    """As of an index of our own."""
    url = written(shards / "sizes.json", COUNTS)
    with open_cached(url, socket=daemon.socket) as file:
        assert json.loads(file.read()) == COUNTS
    with cached_paths(url, socket=daemon.socket) as paths:
        assert len(paths) == len(COUNTS)
