"""Shards that a reader finds damaged are mended by the daemon, and readers go on."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from campaign.disks import flip
from shardcache.errors import NotATarError, NotFoundError, ShardcacheError
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.paths import cached_paths, open_cached
from shardcache_client.reader import ShardReader
from shardcache_client.samples.token_blocks import TokenBlocks
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.doors import DOORS
from support.shards.tars import make_tar, random_samples, write_indexed, write_token_shards

SAMPLES = 6
SHARDS = 2
VALUES = [
    sample["jpg"]
    for first in (0, SAMPLES)
    for sample in random_samples(SAMPLES, {"jpg": 50}, first=first)
]

Damage = Callable[[Path, Path], object]
"""Damages a cached shard, given the paths of its tar and its sidecar."""


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The url of an index of two shards, of which nothing is cached."""
    return write_indexed(tmp_path / "data", [SAMPLES] * SHARDS)


@pytest.fixture
def daemon(tmp_path: Path, source: str) -> Iterator[Daemon]:
    """A daemon with both shards in its cache and known sidecars, which does not scrub."""
    with Daemon(tmp_path, "--scrub-rate", "0", "--listing-ttl-s", "3600") as daemon:
        assert read(daemon, source) == VALUES
        yield daemon


def read(daemon: Daemon, url: str | Sequence[str], **options: Any) -> list[bytes]:
    """Return the values of a dataset's samples, once its shards are published."""
    values = [
        sample["jpg"]
        for sample in ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S, **options)
    ]
    daemon.await_publication()
    return values


def cached(daemon: Daemon) -> list[tuple[Path, Path]]:
    """Return the paths of the tar and the sidecar of each cached shard."""
    tars = sorted((daemon.cache_dir / "shards").rglob("*.tar"))
    return [(tar, tar.with_suffix(".idx")) for tar in tars]


def spoil(daemon: Daemon, damage: Damage) -> None:
    """Damage every cached shard."""
    shards = cached(daemon)
    assert len(shards) == SHARDS
    for tar, sidecar in shards:
        damage(tar, sidecar)


def fetched(daemon: Daemon) -> int:
    """Return how many bytes have come from the origin."""
    return int(daemon.status()["counters"]["origin_bytes"])


def _cut(path: Path, size_bytes: int) -> None:
    """Make a file shorter, or longer."""
    path.chmod(0o640)
    os.truncate(path, size_bytes)


def _link(path: Path) -> None:
    """Have a link to the same bytes in a file's place."""
    moved = path.rename(path.with_suffix(".moved"))
    path.symlink_to(moved)


INDEXES: dict[str, Damage] = {
    "a byte of the header": lambda _, sidecar: flip(sidecar, 100),
    "a byte of the prologue": lambda _, sidecar: flip(sidecar, 3),
    "a byte of the tables": lambda _, sidecar: flip(sidecar, sidecar.stat().st_size - 1),
    "cut short": lambda _, sidecar: _cut(sidecar, sidecar.stat().st_size - 1),
    "too long": lambda _, sidecar: _cut(sidecar, sidecar.stat().st_size + 1),
    "empty": lambda _, sidecar: _cut(sidecar, 0),
    "missing": lambda _, sidecar: sidecar.unlink(),
}
TARS: dict[str, Damage] = {
    "cut short": lambda tar, _: _cut(tar, tar.stat().st_size - 1),
    "too long": lambda tar, _: _cut(tar, tar.stat().st_size + 1),
    "missing": lambda tar, _: tar.unlink(),
    "a link": lambda tar, _: _link(tar),
    "a folder": lambda tar, _: (tar.unlink(), tar.mkdir()),
}


@pytest.mark.parametrize("damage", first_quick(INDEXES.values()), ids=INDEXES)
def test_damaged_index_is_made_again_from_the_tar(
    daemon: Daemon, source: str, damage: Damage
) -> None:
    """A reader goes on with right samples and no fetch, and the status counts the shards."""
    before_bytes = fetched(daemon)
    spoil(daemon, damage)
    assert read(daemon, source) == VALUES
    assert fetched(daemon) == before_bytes
    assert daemon.status()["counters"]["corrupt"] == SHARDS
    assert read(daemon, source) == VALUES
    assert daemon.status()["counters"]["corrupt"] == SHARDS


@pytest.mark.slow
def test_damaged_index_is_made_again_while_the_object_store_is_away(
    daemon: Daemon, source: str, tmp_path: Path
) -> None:
    """The tar in the cache, whose checksums are known, is all that it takes."""
    urls = [f"file://{tmp_path}/data/{number}.tar" for number in range(SHARDS)]
    assert read(daemon, urls) == VALUES
    (tmp_path / "data").rename(tmp_path / "away")
    spoil(daemon, INDEXES["a byte of the tables"])
    assert read(daemon, urls) == VALUES


@pytest.mark.slow
@pytest.mark.parametrize("damage", first_quick(INDEXES.values()), ids=INDEXES)
def test_index_damaged_before_a_restart_is_made_whole(
    daemon: Daemon, source: str, damage: Damage
) -> None:
    """A daemon that never saw the sidecar whole does so, too, by fetching again if need be."""
    spoil(daemon, damage)
    daemon.restart()
    assert read(daemon, source) == VALUES
    assert read(daemon, source) == VALUES


@pytest.mark.parametrize("damage", first_quick(TARS.values()), ids=TARS)
def test_damaged_tar_is_fetched_again(daemon: Daemon, source: str, damage: Damage) -> None:
    """Whatever a reader can find wrong with the file, it gets the right samples."""
    before_bytes = fetched(daemon)
    spoil(daemon, damage)
    assert read(daemon, source) == VALUES
    assert fetched(daemon) > before_bytes
    assert daemon.status()["counters"]["corrupt"] == SHARDS


@pytest.mark.slow
def test_index_is_not_made_of_a_damaged_tar(daemon: Daemon, source: str) -> None:
    """If both files of a shard are damaged, it is fetched."""
    before_bytes = fetched(daemon)
    spoil(daemon, lambda tar, sidecar: (flip(tar, 700), flip(sidecar, 100)))
    assert read(daemon, source) == VALUES
    assert fetched(daemon) > before_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replace", "error"),
    [(Path.unlink, NotFoundError), pytest.param(None, NotATarError, marks=pytest.mark.slow)],
)
def test_training_stops_if_the_copy_from_the_store_is_wrong_too(
    daemon: Daemon,
    tmp_path: Path,
    replace: Callable[[Path], object] | None,
    error: type[ShardcacheError],
) -> None:
    """The error is the one of the object in the store."""
    url = f"file://{tmp_path}/data/0.tar"
    assert read(daemon, url) == VALUES[:SAMPLES]
    spoil(daemon, TARS["too long"])
    object_in_store = tmp_path / "data" / "0.tar"
    if replace is not None:
        replace(object_in_store)
    else:
        times = object_in_store.stat()
        object_in_store.write_bytes(b"<html>404</html>" * (times.st_size // 16))
        os.utime(object_in_store, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(error):
        read(daemon, url)


@pytest.mark.parametrize("door", first_quick(DOORS))
def test_every_reader_of_samples_goes_on_after_damage(
    daemon: Daemon, source: str, door: str
) -> None:
    """Each finds the damaged index itself, for no two of them share what they have mapped."""
    spoil(daemon, INDEXES["a byte of the tables"])
    assert sorted(DOORS[door](source, daemon.socket)) == sorted(VALUES)
    assert daemon.status()["counters"]["corrupt"] == SHARDS


def _paths(url: str, daemon: Daemon, _folder: Path) -> bytes:
    with cached_paths(url, socket=daemon.socket) as (path,):
        return Path(path).read_bytes()


def _opened(url: str, daemon: Daemon, _folder: Path) -> bytes:
    with open_cached(url, socket=daemon.socket) as file:
        return file.read()


def _filesystem(url: str, daemon: Daemon, _folder: Path) -> bytes:
    options = {"socket": str(daemon.socket), "skip_instance_cache": True}
    with fsspec.open(f"shardcache::file://{url}", shardcache=options) as file:
        return bytes(file.read())


def _command(url: str, daemon: Daemon, folder: Path) -> bytes:
    ran = shardcache("get", url, folder / "copy.bin", "--copy", socket=daemon.socket)
    assert ran.code == 0, ran.err
    return (folder / "copy.bin").read_bytes()


@pytest.mark.parametrize("door", first_quick([_paths, _opened, _filesystem, _command]))
@pytest.mark.parametrize("size_bytes", first_quick([999, 1001]))
def test_every_reader_of_files_goes_on_after_damage(
    tmp_path: Path, door: Callable[[str, Daemon, Path], bytes], size_bytes: int
) -> None:
    """A cached file of another size is fetched again."""
    body = os.urandom(1000)
    (tmp_path / "weights.bin").write_bytes(body)
    url = f"{tmp_path}/weights.bin"
    with Daemon(tmp_path, "--scrub-rate", "0") as daemon:
        assert _paths(url, daemon, tmp_path) == body
        for tar, _ in cached(daemon):
            _cut(tar, size_bytes)
        assert door(url, daemon, tmp_path) == body
        assert daemon.status()["counters"]["corrupt"] == 1


@pytest.mark.slow
def test_damaged_tokens_are_fetched_again(tmp_path: Path) -> None:
    """A flipped byte in an array's header is found by readers of its tokens and the counter."""
    documents = [[list(range(20)), list(range(30))]]
    url = write_token_shards(tmp_path / "text", documents)

    def tokens(daemon: Daemon) -> list[int]:
        blocks = ShardReader(url, tokens=TokenBlocks(10), socket=daemon.socket)
        found = np.concatenate([block["tokens"] for block in blocks]).tolist()
        daemon.await_publication()
        return found

    with Daemon(tmp_path, "--scrub-rate", "0") as daemon:
        wanted = tokens(daemon)
        ((tar, _),) = cached(daemon)
        flip(tar, tar.read_bytes().index(b"NUMPY"))
        assert tokens(daemon) == wanted
        ((tar, _),) = cached(daemon)
        flip(tar, tar.read_bytes().index(b"NUMPY"))
        out = tmp_path / "again.json"
        ran = shardcache(
            "index",
            f"file://{tmp_path}/text/*.tar",
            "-o",
            out,
            "--tokens",
            "npy",
            socket=daemon.socket,
        )
        assert ran.code == 0, ran.err
        assert daemon.status()["counters"]["corrupt"] == 2


@pytest.mark.slow
def test_file_damaged_in_the_cache_is_not_indexed(tmp_path: Path) -> None:
    """A tar that was fetched as a file is fetched again once its samples are wanted."""
    samples = random_samples(SAMPLES, {"jpg": 50})
    (tmp_path / "0.tar").write_bytes(make_tar(samples))
    url = f"file://{tmp_path}/0.tar"
    with Daemon(tmp_path, "--scrub-rate", "0") as daemon:
        with open_cached(url, socket=daemon.socket) as file:
            file.read()
        ((tar, _),) = cached(daemon)
        flip(tar, 0)
        assert read(daemon, url) == [sample["jpg"] for sample in samples]


def test_false_alarm_costs_a_check_and_no_more(daemon: Daemon, source: str) -> None:
    """A shard that a reader reports in vain stays, and is granted again."""
    before_bytes = fetched(daemon)
    url = next(shard["url"] for shard in daemon.shards())
    with RawSession(daemon) as session:
        session.plan([url], [0])
        first = session.take(0)
        session.send(type="release", lease=first["lease"], read=False, damage="it looks odd")
        again = session.take(0)
    assert again["path"] == first["path"]
    assert fetched(daemon) == before_bytes
    assert daemon.status()["counters"]["corrupt"] == 0
    assert "it looks odd" in daemon.log.read_text()
