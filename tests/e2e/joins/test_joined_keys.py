"""Joined datasets whose partners are in any shard: keys decide on pairs, positions never."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import ConfigError, UnmatchedKeyError
from shardcache_client.dataset import Joined, ShardDataset
from shardcache_client.joining import JoinedReader
from shardcache_client.reader import ShardReader
from support.cases import first_quick
from support.programs.daemon import Daemon
from support.shards.reading import keys_of, write_index
from support.shards.tables import recut
from support.shards.tars import Sample, make_tar, random_samples

COUNTS = [5, 5, 5, 5]
IMAGES = random_samples(20, {"jpg": 40}, seed=1)
CAPTIONS = random_samples(20, {"txt": 40}, seed=2)
KEYS = [str(sample["__key__"]) for sample in IMAGES]

DEALT = [CAPTIONS[number] for shard in range(4) for number in range(shard, 20, 4)]
"""The captions in another order across the shards, with as many per shard as images."""

DEFAULTS: dict[str, Any] = {"members": ("jpg", "cap.txt"), "missing": {"cap.txt": b""}}


def sources(daemon: Daemon, images: str, captions: str) -> dict[str, Any]:
    """Return the two datasets that are joined."""
    return {
        "": ShardDataset(images, socket=daemon.socket, even=None),
        "cap": ShardDataset(captions, socket=daemon.socket),
    }


def captions_of(joined: Any) -> dict[str, object]:
    """Return the caption of each key."""
    return {sample["__key__"]: sample["cap.txt"] for sample in joined}


def write_bare(folder: Path, samples: list[Sample]) -> str:
    """Write four shards with an index but no table of their keys; return the index's url."""
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.tar").write_bytes(make_tar(samples[5 * number : 5 * number + 5]))
    return write_index(folder, COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"missing": "skip"}, DEFAULTS], ids=str)
def test_partners_are_found_in_any_shard_of_as_many_samples(
    daemon: Daemon, tmp_path: Path, options: Mapping[str, Any]
) -> None:
    """All samples get their captions, whatever becomes of those without."""
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    captions = recut(daemon, tmp_path / "cap", DEALT, COUNTS)
    joined = Joined(sources(daemon, images, captions), **options)
    assert captions_of(joined) == {sample["__key__"]: sample["txt"] for sample in CAPTIONS}


@pytest.mark.slow
def test_partners_are_found_by_readers_without_torch_and_by_number(
    daemon: Daemon, tmp_path: Path
) -> None:
    """By `JoinedReader` and `indexed`, as by `Joined`."""
    images = recut(daemon, tmp_path / "img", IMAGES, COUNTS)
    captions = recut(daemon, tmp_path / "cap", DEALT, COUNTS)
    want = {sample["__key__"]: sample["txt"] for sample in CAPTIONS}
    readers = {
        "": ShardReader(images, socket=daemon.socket),
        "cap": ShardReader(captions, socket=daemon.socket),
    }
    assert captions_of(JoinedReader(readers)) == want
    with Joined(sources(daemon, images, captions)).indexed() as numbered:
        assert captions_of(numbered) == want


@pytest.mark.parametrize("options", [{"missing": "skip"}, DEFAULTS], ids=str)
@pytest.mark.parametrize("bare", first_quick(["img", "cap", "both"]))
def test_samples_are_left_out_or_filled_only_by_the_tables_of_keys(
    daemon: Daemon, tmp_path: Path, options: Mapping[str, Any], bare: str
) -> None:
    """Without tables, a partner may be in any other shard: the error says how to write them."""
    urls = {}
    for name, samples in (("img", IMAGES), ("cap", DEALT)):
        if bare in (name, "both"):
            urls[name] = write_bare(tmp_path / name, samples)
        else:
            urls[name] = recut(daemon, tmp_path / name, samples, COUNTS)
    with pytest.raises(ConfigError, match=r"missing=.* needs the tables of keys") as caught:
        Joined(sources(daemon, urls["img"], urls["cap"]), **options)
    assert "--samples" in str(caught.value.remedy)


def test_missing_partners_of_plain_tars_raise(daemon: Daemon, tmp_path: Path) -> None:
    """A partner in another shard is an error with a remedy, if the shards have no index."""
    write_bare(tmp_path / "img", IMAGES)
    write_bare(tmp_path / "cap", DEALT)
    plain = sources(daemon, f"{tmp_path}/img/{{0..3}}.tar", f"{tmp_path}/cap/{{0..3}}.tar")
    with pytest.raises(UnmatchedKeyError, match=r"keys have no partner in .*/cap/0\.tar") as caught:
        list(Joined(plain))
    assert "shardcache index" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match=r"missing='skip' needs the tables of keys"):
        Joined(plain, missing="skip")


# Keys that come again in another shard of the first source


@pytest.fixture
def repeated(daemon: Daemon, tmp_path: Path) -> dict[str, Any]:
    """Images whose third shard has a key of the first; each key has one caption."""
    again = [
        {**sample, "__key__": KEYS[2]} if sample is IMAGES[11] else sample for sample in IMAGES
    ]
    images = recut(daemon, tmp_path / "img", again, COUNTS)
    return sources(daemon, images, recut(daemon, tmp_path / "cap", CAPTIONS, COUNTS))


@pytest.mark.slow
def test_key_in_two_shards_of_the_first_source_raises(repeated: dict[str, Any]) -> None:
    """As one does that comes twice in a shard; the error says where to look."""
    again = f"1 of 5 keys .*'{KEYS[2]}'.* comes again in another shard of the first source"
    with pytest.raises(UnmatchedKeyError, match=again):
        list(Joined(repeated))
    with pytest.raises(UnmatchedKeyError, match=again):
        list(Joined(repeated).subset(range(10, 15)))


@pytest.mark.slow
def test_key_in_two_shards_of_the_first_source_has_no_partner(repeated: dict[str, Any]) -> None:
    """Its samples are skipped or get the default, and selections see no other source."""
    others = [key for key in KEYS if key not in (KEYS[2], KEYS[11])]
    assert keys_of(Joined(repeated, missing="skip")) == others
    filled = [
        sample["__key__"] for sample in Joined(repeated, **DEFAULTS) if sample["cap.txt"] == b""
    ]
    assert filled == [KEYS[2], KEYS[2]]
    assert keys_of(Joined(repeated).select(lambda entry: "cap.txt" in entry.sizes)) == others
