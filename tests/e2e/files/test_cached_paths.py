"""`cached_paths`: shards as files for other programs, cached as long as somebody holds them."""

import gzip
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardcache.errors import CapacityError
from shardcache_client.files.paths import cached_paths, open_cached
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, write_shards

SHARDS = 8

HOLDER = """
import resource, os, sys
sys.modules["torch"] = None  # an import of torch fails
from shardcache_client import cached_paths, open_cached
if sys.argv[3:]:
    limit = len(os.listdir("/proc/self/fd")) + int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
with cached_paths(sys.argv[1], socket=sys.argv[2], job="holder") as paths:
    print(*paths, flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(urls: str, daemon: Daemon, *files: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process without torch that holds shards and may have `files` more files open."""
    command = [sys.executable, "-c", HOLDER, urls, str(daemon.socket), *files]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def evict(daemon: Daemon) -> None:
    """Evict what may be evicted."""
    daemon.request("POST", "/v1/evict", {"urls": ["file:///**", "/**"]})


def all_are_evicted(daemon: Daemon, paths: list[str]) -> bool:
    """Evict, and return whether no file is left, though one may be open for a moment."""
    evict(daemon)
    return not any(Path(path).exists() for path in paths)


def test_shards_stay_while_they_are_held_and_no_longer(
    folder: Path, urls: str, daemon: Daemon
) -> None:
    """The files are the shards, in the order of the urls; `evict` waits for the block's end."""
    sources = [folder / "source" / f"shard-{number:06d}.tar" for number in (3, 0, 5)]
    with cached_paths(sources, socket=daemon.socket, job="reader of tars") as paths:
        evict(daemon)
        assert [Path(path).read_bytes() for path in paths] == [
            source.read_bytes() for source in sources
        ]
        assert daemon.leases() == len(sources)
        assert "reader of tars" in [job["name"] for job in daemon.status()["jobs"]]
    eventually(lambda: daemon.leases() == 0)
    eventually(lambda: all_are_evicted(daemon, paths))


@pytest.mark.slow
def test_a_killed_holder_releases_its_shards(urls: str, daemon: Daemon) -> None:
    """kill -9 of a process that holds shards; it has no torch."""
    with holder(urls, daemon) as process:
        assert process.stdout is not None
        paths = process.stdout.readline().split()
        evict(daemon)
        assert len(paths) == SHARDS
        assert all(Path(path).exists() for path in paths) is True
        process.kill()
        process.wait()
        eventually(lambda: daemon.leases() == 0)
    eventually(lambda: all_are_evicted(daemon, paths))


@pytest.mark.slow
def test_shards_stay_across_a_restart_of_the_daemon(urls: str, daemon: Daemon) -> None:
    """The next daemon does not know the leases, yet spares files that a process has open."""
    with cached_paths(urls, socket=daemon.socket) as paths:
        daemon.restart()
        evict(daemon)
        assert all(Path(path).exists() for path in paths)
    eventually(lambda: all_are_evicted(daemon, paths))


@pytest.mark.slow
def test_shards_that_do_not_fit_together_are_an_error() -> None:
    """A CapacityError ends the wait, and the shards that were held by then are released."""
    with tempfile.TemporaryDirectory(prefix="shardcache-paths-") as name:
        source = Path(name) / "source"
        source.mkdir()
        shards = write_shards(source, 6, 25)
        with Daemon(Path(name), capacity=str(4 * shards[0].stat().st_size)) as daemon:
            with pytest.raises(CapacityError), cached_paths(source, socket=daemon.socket):
                pass
            eventually(lambda: daemon.leases() == 0)
            with cached_paths(shards[:2], socket=daemon.socket) as paths:
                assert len(paths) == 2


@pytest.mark.slow
def test_a_limit_on_open_files_is_named(urls: str, daemon: Daemon) -> None:
    """Each shard takes a file descriptor; the error for too few says how to get more."""
    with holder(urls, daemon, "6") as process:
        _, told = process.communicate()
    assert "Too many open files" in told
    assert "ulimit -n" in told


NAMES = ["cuts.000000.jsonl.gz", "model-1 of 2.safetensors", "table.parquet", "weights.tar.gz", "7"]


def test_paths_end_with_the_names_of_their_objects(folder: Path, daemon: Daemon) -> None:
    """Libraries go by a file's suffix, and other processes may open the held path."""
    files = [folder / name for name in NAMES]
    for file in files:
        file.write_bytes(file.name.encode())
    with open_cached(files[0], socket=daemon.socket) as first:
        assert Path(first.name).name == NAMES[0]
        assert Path(first.name).read_bytes() == NAMES[0].encode()
    named = [file for file in files if file.name != "weights.tar.gz"]
    with cached_paths(named, socket=daemon.socket) as paths:
        assert [Path(path).name for path in paths] == [file.name for file in named]
        assert [Path(path).read_bytes() for path in paths] == [file.name.encode() for file in named]
    with open_cached(files[3], socket=daemon.socket) as tar:
        assert Path(tar.name).name == "weights.tar.gz"


def test_inflated_shard_has_the_name_of_a_plain_tar(folder: Path, daemon: Daemon) -> None:
    """Its bytes are no longer those of the suffix."""
    tar = make_tar([{"__key__": "000", "txt": b"text"}])
    source = folder / "shard.TGZ"
    source.write_bytes(gzip.compress(tar))
    with cached_paths(source, socket=daemon.socket) as (path,):
        assert Path(path).name == "shard.tar"
        assert Path(path).read_bytes() == tar


@pytest.mark.parametrize("is_restarted", [False, True])
def test_names_end_with_their_files(folder: Path, daemon: Daemon, is_restarted: bool) -> None:
    """A file may be evicted, or be removed while no daemon is running."""
    source = folder / f"model-{is_restarted}.bin"
    source.write_bytes(b"weights")
    with cached_paths(source, socket=daemon.socket) as (path,):
        assert Path(path).is_symlink()
        file = Path(path).resolve()
    if is_restarted:
        daemon.stop()
        file.unlink()
        daemon.start()
    eventually(lambda: all_are_evicted(daemon, [path]))
    assert not Path(path).parent.exists()


def test_name_that_cannot_be_made_leaves_the_path_of_the_key(folder: Path, daemon: Daemon) -> None:
    """A disk that takes no further file still serves what is cached."""
    source = folder / "unnamed.bin"
    source.write_bytes(b"weights")
    names = daemon.cache_dir / "names"
    names.rename(names.with_name("aside"))
    names.write_bytes(b"")
    try:
        with cached_paths(source, socket=daemon.socket) as (path,):
            assert Path(path).suffix == ".tar"
            assert Path(path).read_bytes() == b"weights"
    finally:
        names.unlink()
        names.with_name("aside").rename(names)


def test_name_of_a_damaged_file_goes_with_it(folder: Path, daemon: Daemon) -> None:
    """Once `verify`, or the scrubber before it, has set the file aside, nothing has its name."""
    source = folder / "damaged.bin"
    source.write_bytes(b"weights")
    with cached_paths(source, socket=daemon.socket) as (path,):
        file = Path(path).resolve()
    file.chmod(0o600)
    file.write_bytes(b"WEIGHTS")
    shardcache("verify", socket=daemon.socket)
    assert (daemon.cache_dir / "quarantine" / file.name).exists()
    assert not Path(path).parent.exists()
