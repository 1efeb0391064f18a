"""Any file through the cache: fetched once, verified and kept like shards, indexed on demand."""

import gzip
import json
import mmap
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardcache.errors import NotATarError, NotFoundError, ShardChangedError, TruncatedShardError
from shardcache.shared.protocol import ShardRef
from shardcache_client.daemon.choice import DaemonChoice
from shardcache_client.daemon.connection import ReaderIdentity
from shardcache_client.daemon.patience import Patience
from shardcache_client.files.cached_file import CachedFile, session_of
from shardcache_client.files.paths import cached_paths, open_cached
from shardcache_client.files.range_file import RangeFile
from shardcache_client.order.shards.manifest import Manifest
from shardcache_client.reader import ShardReader
from support.cases import first_quick
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.reading import keys_of
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

PART_BYTES = 64 * 1024
WEIGHTS = random.Random(7).randbytes(5 * PART_BYTES + 1000)
SAMPLES = random_samples(20, {"bin": 9_000})
TAR = make_tar(SAMPLES)
KEYS = [sample["__key__"] for sample in SAMPLES]


class EndFirst(GatedStore):
    """Holds back all of a file but its first byte, which tells the version, and last part."""

    def wait(self, path: str, stop: int) -> int:
        return stop if stop in (1, len(self.files[path])) else super().wait(path, stop)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    with EndFirst() as running:
        yield running


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    sizes = ("--part-size", str(PART_BYTES), "--range-part-size", str(PART_BYTES))
    flags = (*sizes, "--shard-connections", "2", "--attempts", "1", "--scrub-rate", "0")
    with (
        tempfile.TemporaryDirectory(prefix="shardcache-e2e-") as name,
        Daemon(Path(name), *flags) as running,
    ):
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's files, and a folder of another one."""
    for name, body in {
        "config.json": b'{"layers": 2}',
        "model.safetensors": WEIGHTS,
        "sub/empty": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(body)
    return tmp_path


def read(url: str, daemon: Daemon) -> list[str]:
    return keys_of(ShardReader(url, socket=daemon.socket, epochs=1, timeout_s=GUARD_S))


def content(url: str, daemon: Daemon) -> bytes:
    with open_cached(url, socket=daemon.socket, timeout_s=GUARD_S) as file:
        return file.read()


@contextmanager
def unopened(url: str, daemon: Daemon) -> Iterator[CachedFile]:
    """Provide a file that can be waited for as a whole."""
    place = (DaemonChoice.of(daemon.socket), ReaderIdentity("j"))
    one = Manifest.of([ShardRef(url)])
    with (
        session_of(*place, one, "files", Patience(GUARD_S)) as session,
        closing(CachedFile(session, 0)) as file,
    ):
        yield file


def whole_content(url: str, daemon: Daemon) -> bytes:
    """Return a file's bytes, once it is cached as a whole."""
    with unopened(url, daemon) as file:
        return file.wait_whole().read_bytes()


@contextmanager
def arriving(url: str, daemon: Daemon) -> Iterator[RangeFile]:
    """Provide a file of which ranges can be read as they arrive."""
    place = (DaemonChoice.of(daemon.socket), ReaderIdentity("j"))
    one = Manifest.of([ShardRef(url)])
    with (
        session_of(*place, one, "ranges", Patience(GUARD_S)) as session,
        closing(RangeFile(session, 0)) as file,
    ):
        yield file


def samples_of(daemon: Daemon) -> list[int | None]:
    daemon.await_publication()
    return [row["samples"] for row in daemon.shards()]


def fetched(daemon: Daemon) -> int:
    return int(daemon.status()["counters"]["origin_bytes"])


def spoil(daemon: Daemon) -> None:
    """Flip a bit of the only cached file."""
    (path,) = daemon.cache_dir.glob("shards/*/*.tar")
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.chmod(0o640)
    path.write_bytes(body)


def test_any_file_is_warmed_listed_pinned_verified_and_evicted(
    folder: Path, daemon: Daemon
) -> None:
    """Weights, a config and an empty file: a prefix without shards stands for all of them."""
    warmed = shardcache("warm", folder, "--json", socket=daemon.socket)
    assert warmed.code == 0
    assert warmed.events[-1]["fetched"] == 3
    again = shardcache("warm", folder / "config.json", "--json", socket=daemon.socket)
    assert again.events[-1]["cached"] == 1
    listed = shardcache("ls", "--json", socket=daemon.socket).events
    assert {Path(row["url"]).name: row["size_bytes"] for row in listed} == {
        "config.json": 13, "model.safetensors": len(WEIGHTS), "empty": 0
    }  # fmt: skip
    assert "model.safetensors" in shardcache("ls", socket=daemon.socket).out
    assert shardcache("verify", socket=daemon.socket).code == 0
    assert shardcache("pin", folder / "model.safetensors", socket=daemon.socket).code == 0
    kept = shardcache("evict", f"{folder}/**", "--json", socket=daemon.socket).json
    assert len(kept["evicted"]) == 2
    assert [Path(row["url"]).name for row in kept["kept"]] == ["model.safetensors"]


@pytest.mark.slow
def test_shards_below_a_prefix_hide_other_files(folder: Path, daemon: Daemon) -> None:
    """A dataset's prefix stands for its shards alone, and without shards it is an error."""
    (folder / "a.tar").write_bytes(TAR)
    assert shardcache("warm", folder, "--json", socket=daemon.socket).events[-1]["fetched"] == 1
    with pytest.raises(NotFoundError):
        read(f"{folder}/sub/", daemon)


@pytest.mark.slow
def test_damaged_file_is_found_and_fetched_again(folder: Path, daemon: Daemon) -> None:
    """`verify` compares every byte with the checksums of its arrival."""
    url = str(folder / "model.safetensors")
    assert content(url, daemon) == WEIGHTS
    eventually(lambda: daemon.leases() == 0)
    spoil(daemon)
    assert shardcache("verify", socket=daemon.socket).code == 1
    assert content(url, daemon) == WEIGHTS
    assert fetched(daemon) == 2 * len(WEIGHTS)


@pytest.mark.slow
def test_tar_fetched_as_a_file_is_indexed_once_when_samples_are_asked_for(
    folder: Path, daemon: Daemon
) -> None:
    """It is not fetched again, also after kill -9, and its size with the index is accounted for."""
    path = folder / "a.tar"
    path.write_bytes(TAR)
    assert content(str(path), daemon) == TAR
    assert samples_of(daemon) == [None]
    daemon.restart()
    assert read(str(path), daemon) == KEYS
    assert read(str(path), daemon) == KEYS
    assert samples_of(daemon) == [20]
    assert fetched(daemon) == 0
    on_disk = sum(path.stat().st_size for path in daemon.cache_dir.glob("shards/*/*"))
    assert daemon.status()["cache"]["used_bytes"] == on_disk
    assert content(str(path), daemon) == TAR
    assert samples_of(daemon) == [20]


@pytest.mark.slow
def test_truncated_tar_is_a_whole_file(folder: Path, daemon: Daemon) -> None:
    """As a shard it is refused, before and after, and stays in the cache as a file."""
    path = folder / "a.tar"
    path.write_bytes(TAR[:-20_000])
    for _ in range(2):
        with pytest.raises(TruncatedShardError):
            read(str(path), daemon)
        assert content(str(path), daemon) == TAR[:-20_000]
    with pytest.raises(NotATarError):
        read(str(folder / "model.safetensors"), daemon)


@pytest.mark.slow
def test_compressed_tar_is_a_file_of_its_own_bytes_and_a_shard_that_is_inflated(
    folder: Path, daemon: Daemon
) -> None:
    """They are cached side by side, whichever comes first, and also after a restart."""
    path = folder / "a.tar.gz"
    path.write_bytes(gzip.compress(TAR))
    for _ in range(2):
        assert content(str(path), daemon) == path.read_bytes()
        assert read(str(path), daemon) == KEYS
        with cached_paths(str(path), socket=daemon.socket) as (inflated,):
            assert Path(inflated).read_bytes() == TAR
        daemon.restart()
    assert sorted(samples_of(daemon), key=str) == [20, None]


def both(first: Callable[[], Any], then: Callable[[], Any]) -> list[Any]:
    """Return what two calls return or raise that are under way at the same time."""
    found: list[Any] = [None, None]

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            found[number] = call()
        except Exception as exn:  # noqa: BLE001
            found[number] = exn

    threads = [threading.Thread(target=run, args=each) for each in enumerate((first, then))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    return found


@pytest.mark.parametrize("cut", first_quick([0, 20_000]))
def test_file_and_samples_wanted_at_the_same_time_cost_one_fetch(
    store: GatedStore, daemon: Daemon, cut: int
) -> None:
    """A tar refused as a shard is still read as a file, while its samples are an error."""
    body = TAR[: len(TAR) - cut]
    url = store.put("a.tar", body)

    def let() -> None:
        eventually(lambda: [row["waiters"] for row in daemon.status()["transfers"]] == [2])
        store.let("a.tar")

    letting = threading.Thread(target=let)
    letting.start()
    reader = ShardReader(
        url, socket=daemon.socket, epochs=1, timeout_s=GUARD_S, partial_reads=False
    )
    file, keys = both(lambda: whole_content(url, daemon), lambda: keys_of(reader))
    letting.join()
    assert file == body
    assert (keys == KEYS) if not cut else isinstance(keys, TruncatedShardError)
    assert fetched(daemon) == len(body)


@pytest.mark.slow
def test_samples_are_read_while_a_file_arrives(store: GatedStore, daemon: Daemon) -> None:
    """The file begins as ranges, and is indexed at its end for readers of its samples."""
    url = store.put("a.tar", TAR)
    index = store.put(
        "index.json", json.dumps({"shardlist": [{"url": "a.tar", "nsamples": len(KEYS)}]}).encode()
    )
    store.let("index.json")
    store.let("a.tar", 2 * PART_BYTES)
    with arriving(url, daemon) as file, ThreadPoolExecutor(1) as pool:
        assert file.read(0, 2 * PART_BYTES) == TAR[: 2 * PART_BYTES]
        rest = pool.submit(file.read, 0, len(TAR))
        eventually(
            lambda: [row["total_bytes"] for row in daemon.status()["transfers"]] == [len(TAR)]
        )
        samples = iter(ShardReader(index, socket=daemon.socket, epochs=1, timeout_s=GUARD_S))
        assert next(samples)["__key__"] == KEYS[0]
        store.let("a.tar")
        assert keys_of(samples) == KEYS[1:]
        assert rest.result() == TAR


@pytest.mark.slow
def test_reader_of_ranges_of_a_refused_tar_keeps_its_file(
    store: GatedStore, daemon: Daemon
) -> None:
    """It waits for nothing at the moment when the tar turns out to be none for another reader."""
    body = TAR[:-20_000]
    url = store.put("a.tar", body)
    reader = ShardReader(
        url, socket=daemon.socket, epochs=1, timeout_s=GUARD_S, partial_reads=False
    )
    with arriving(url, daemon) as file, ThreadPoolExecutor(1) as pool:
        assert file.read(len(body) - 8, len(body)) == body[-8:]
        keys = pool.submit(keys_of, reader)
        eventually(lambda: [row["waiters"] for row in daemon.status()["transfers"]] == [1])
        store.let("a.tar")
        with pytest.raises(TruncatedShardError):
            keys.result()
        assert file.read(0, len(body)) == body
    assert fetched(daemon) == len(body)


@pytest.mark.slow
def test_interrupted_file_resumes_after_a_kill(store: GatedStore, daemon: Daemon) -> None:
    """The parts that had arrived are not fetched again."""
    url = store.put("weights", WEIGHTS)
    store.let("weights", 2 * PART_BYTES)
    waiting = threading.Thread(
        target=shardcache, args=("warm", url), kwargs={"socket": daemon.socket}
    )
    waiting.start()

    def has_two_parts() -> bool:
        rows = daemon.status()["transfers"]
        return bool(rows) and rows[0]["done_bytes"] >= 2 * PART_BYTES

    eventually(has_two_parts)
    daemon.restart()
    waiting.join()
    store.let("weights")
    assert content(url, daemon) == WEIGHTS
    assert fetched(daemon) <= len(WEIGHTS) - 2 * PART_BYTES


@pytest.mark.slow
def test_range_of_an_arriving_file_is_fetched_first(store: GatedStore, daemon: Daemon) -> None:
    """Its end is read while the store holds back the rest: one part crossed the network."""
    url = store.put("table.parquet", WEIGHTS)
    with arriving(url, daemon) as file:
        assert file.read(len(WEIGHTS) - 8, len(WEIGHTS)) == WEIGHTS[-8:]
        ranges = [
            headers["range"]
            for method, _, headers in store.requests
            if method == "GET" and headers["range"] != "bytes=0-0"
        ]
        assert f"bytes={5 * PART_BYTES}-{len(WEIGHTS) - 1}" in ranges[:2], (
            "one of the first of its two connections"
        )
        assert not daemon.whole()
        store.let("table.parquet", 2 * PART_BYTES)
        assert file.read(10, 2 * PART_BYTES) == WEIGHTS[10 : 2 * PART_BYTES]
        store.let("table.parquet")
        assert file.read(0, len(WEIGHTS) + 100) == WEIGHTS
        eventually(lambda: daemon.whole() == [url])
        daemon.restart()
        assert file.read(100, 200) == WEIGHTS[100:200]
    assert fetched(daemon) == 0


@pytest.mark.slow
def test_replaced_file_is_not_read_on(store: GatedStore, daemon: Daemon) -> None:
    """No reader gets bytes of two versions; the next one gets the new version."""
    url = store.put("weights", WEIGHTS)
    with arriving(url, daemon) as file:
        assert file.read(len(WEIGHTS) - 8, len(WEIGHTS)) == WEIGHTS[-8:]
        store.put("weights", WEIGHTS[::-1])
        store.let("weights")
        with pytest.raises(ShardChangedError):
            file.read(0, 1000)
    assert content(url, daemon) == WEIGHTS[::-1]


@pytest.mark.slow
def test_linked_file_stays_cached_and_counted(folder: Path, daemon: Daemon) -> None:
    """`evict` names the reason, and removes it once the link is gone."""
    with cached_paths(str(folder / "model.safetensors"), socket=daemon.socket) as (path,):
        link = folder / "link"
        os.link(Path(path).resolve(), link)  # `path` is a symbolic link with the object's name
    eventually(lambda: daemon.leases() == 0)
    pattern = f"{folder}/**"
    kept = json.loads(daemon.request("POST", "/v1/evict", {"urls": [pattern]}))["kept"]
    assert "hard link" in kept[0]["reason"]
    assert daemon.status()["cache"]["used_bytes"] > len(WEIGHTS)
    link.unlink()
    eventually(
        lambda: bool(
            json.loads(daemon.request("POST", "/v1/evict", {"urls": [pattern]}))["evicted"]
        )
    )


def test_open_file_is_mapped_and_stays_while_it_is_open(folder: Path, daemon: Daemon) -> None:
    """It is read-only, has a path for other libraries, and ends its session when it is closed."""
    with open_cached(str(folder / "model.safetensors"), socket=daemon.socket) as file:
        daemon.request("POST", "/v1/evict", {"urls": [f"{folder}/**"]})
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[-100:] == WEIGHTS[-100:]
        assert isinstance(file.name, str)
        assert Path(file.name).read_bytes() == WEIGHTS
        assert not file.writable()
        assert file.seek(-4, os.SEEK_END)
        assert file.read() == WEIGHTS[-4:]
    eventually(lambda: daemon.sessions() == 0)
    with open_cached(folder / "sub/empty", socket=daemon.socket) as file:
        assert file.read() == b""


@pytest.mark.slow
def test_pipe_is_no_file(folder: Path, daemon: Daemon) -> None:
    """By any door: it is not taken for an empty file."""
    pipe = folder / "pipe.bin"
    os.mkfifo(pipe)
    with pytest.raises(NotFoundError, match=r"pipe\.bin: this is a pipe, socket or device"):
        open_cached(pipe, socket=daemon.socket)
    with (
        pytest.raises(NotFoundError, match="not a regular file"),
        cached_paths(pipe, socket=daemon.socket),
    ):
        pass
    got = shardcache("get", pipe, folder / "copy", socket=daemon.socket)
    assert got.code != 0
    assert "not a regular file" in got.out


@pytest.mark.slow
def test_files_are_refused_that_the_rules_do_not_allow(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files are under the rules of shards, by whatever way they are requested."""
    with Daemon(tmp_path_factory.mktemp("d"), "--allow", f"file://{folder}/sub/") as daemon:
        for ask in (
            content,
            lambda url, daemon: cached_paths(url, socket=daemon.socket).__enter__(),
        ):
            with pytest.raises(Exception, match="allow rules"):
                ask(str(folder / "config.json"), daemon)
        assert content(str(folder / "sub/empty"), daemon) == b""


def test_closed_file_is_held_again_when_it_is_waited_for(folder: Path, daemon: Daemon) -> None:
    """Once it is closed, the file may be evicted, so its former path would be wrong."""
    url = f"file://{folder}/model.safetensors"
    with unopened(url, daemon) as file:
        file.wait_whole()
        file.close()
        daemon.evict(url)
        assert file.wait_whole().read_bytes() == WEIGHTS
        assert daemon.leases() == 1


def test_file_that_is_closed_during_a_wait_is_closed_after_it(
    store: GatedStore, daemon: Daemon
) -> None:
    """The waiting thread gets the path, and nothing is held afterwards."""
    url = store.put("weights", WEIGHTS)
    with unopened(url, daemon) as file, ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(file.wait_whole)
        eventually(lambda: bool(daemon.status()["transfers"]))
        closing_file = threads.submit(file.close)
        store.let("weights")
        assert waiting.result(GUARD_S).name
        closing_file.result(GUARD_S)
        eventually(lambda: daemon.leases() == 0)
