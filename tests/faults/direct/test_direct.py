"""`fallback="direct"`: jobs that read on without a daemon, with another, and with one whose disk is bad."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from campaign import harness
from shardcache.errors import (
    CacheDirError,
    ConfigError,
    DiskFullError,
    NoDaemonError,
    NotAllowedError,
    NotFoundError,
    OutdatedError,
    TrailingDataError,
    TruncatedShardError,
)
from shardcache_client import ShardDataset, ignore_and_continue
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.tars import make_tar, random_samples
from support.stores.buckets import Bucket

SHARDS, SAMPLES = 6, 10

Samples = list[tuple[str, str, bytes]]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for what is read past the daemon; nothing of its filesystem need stay free."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setenv("SHARDCACHE_DIRECT_DIR", str(folder))
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "0")
    return folder


@pytest.fixture
def index(moto: Bucket, scratch: Path) -> str:
    """The url of an index over six shards of ten samples each, so that their order does not depend on who counted."""
    rows = []
    for number in range(SHARDS):
        tar = make_tar(random_samples(SAMPLES, {"jpg": 5000, "cls": 1}, first=number * SAMPLES))
        moto.put(f"{number}.tar", tar)
        rows.append({"url": f"{number}.tar", "nsamples": SAMPLES})
    return moto.put("index.json", json.dumps({"wids_version": 1, "shardlist": rows}).encode())


@pytest.fixture
def daemon(index: str) -> Iterator[Daemon]:
    """A daemon that has not been started, over a folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="shardcache-direct-") as folder:
        prepared = Daemon(Path(folder))
        yield prepared
        prepared.kill()


def dataset(daemon: Daemon, urls: str | list[str], **options: Any) -> ShardDataset:
    """A dataset that may do without the daemon."""
    chosen: dict[str, Any] = {"socket": daemon.socket, "timeout_s": GUARD_S, "fallback": "direct"}
    return ShardDataset(urls, **chosen | options)


def plain(samples: Iterable[dict[str, Any]]) -> Samples:
    """Samples, their bytes copied."""
    return [(sample["__key__"], sample["__url__"], bytes(sample["jpg"])) for sample in samples]


def by_daemon(daemon: Daemon, urls: str | list[str], **options: Any) -> Samples:
    """An epoch in this process, as the daemon gives it."""
    daemon.start()
    read = plain(dataset(daemon, urls, fallback="error", **options))
    daemon.kill()
    return read


def scratch_files(scratch: Path) -> set[str]:
    """The nameless files of this process in the folder, open or mapped; there must be none with a name."""
    assert not list(scratch.iterdir())
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was that of this very listing, or another thread's
            found.add(str(fd.readlink()))
    return {path for path in found if path.startswith(str(scratch))}


def all_gone(scratch: Path) -> bool:
    """Return whether nothing is left there, once the thread that fetched it has let go of it, too."""
    eventually(lambda: not scratch_files(scratch))
    return True


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True, "shuffle_window": 3, "seed": 7}, {"zero_copy": True, "shuffle": True, "shuffle_window": 0}],
    ids=["in_order", "mixed", "zero_copy"],
)
def test_samples_without_a_daemon_are_those_that_it_gives(
    daemon: Daemon, index: str, scratch: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """No daemon from the start: the same bytes in the same order, said once, and nothing is left on the disk."""
    expected = by_daemon(daemon, index, **options)
    caplog.clear()
    assert plain(dataset(daemon, index, **options)) == expected and len(expected) == SHARDS * SAMPLES
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [
        ("reading directly from the object store" in text, f"{SHARDS} shards were read" in text) for text in said[1:]
    ] == [(True, False), (False, True)]
    assert all_gone(scratch)


@pytest.mark.parametrize("zero_copy", [False, True])
def test_workers_without_a_daemon(daemon: Daemon, index: str, zero_copy: bool) -> None:
    """DataLoader's workers read each for itself; values that are never copied elsewhere come by value."""
    options: dict[str, Any] = {"shuffle": True, "seed": 3, "zero_copy": zero_copy}
    daemon.start()
    expected = plain(DataLoader(dataset(daemon, index, fallback="error", **options), batch_size=None, num_workers=2))
    daemon.kill()
    loader = DataLoader(dataset(daemon, index, **options), batch_size=None, num_workers=2)
    for _ in range(2):
        assert sorted(plain(loader)) == sorted(expected)
    loader.dataset.set_epoch(0)  # type: ignore[attr-defined]
    assert plain(loader) == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_in_the_middle_of_an_epoch(daemon: Daemon, index: str, workers: int) -> None:
    """No daemon comes back: after a time of grace the rest of the epoch is read from the store, in order."""
    options: dict[str, Any] = {"shuffle": True, "shuffle_window": 2, "seed": 5}
    loader = DataLoader(dataset(daemon, index, **options), batch_size=None, num_workers=workers)
    daemon.start()
    expected = plain(DataLoader(dataset(daemon, index, **options), batch_size=None, num_workers=workers))
    daemon.restart()
    samples = iter(loader)
    read = list(islice(samples, 15))
    daemon.kill()
    assert plain(read + list(samples)) == expected


def test_run_resumes_without_the_daemon_that_it_began_with(daemon: Daemon, index: str) -> None:
    """A state that was taken while the daemon lent is as good without it."""
    options: dict[str, Any] = {"shuffle": True, "shuffle_window": 3, "seed": 11}
    expected = by_daemon(daemon, index, **options)
    daemon.start()
    before = dataset(daemon, index, **options)
    samples = iter(before)
    read = plain(islice(samples, 23))
    state = before.state_dict()
    del samples
    daemon.kill()
    after = dataset(daemon, index, **options)
    after.load_state_dict(state)
    assert read + plain(after) == expected


def test_compressed_shards_are_inflated(daemon: Daemon, moto: Bucket, scratch: Path) -> None:
    """Shards that the daemon decompresses are decompressed by this, too."""
    url = moto.put("z.tar.gz", gzip.compress(make_tar(random_samples(SAMPLES))))
    expected = by_daemon(daemon, url)
    assert plain(dataset(daemon, url)) == expected and len(expected) == SAMPLES
    assert all_gone(scratch)


def test_the_disk_holds_what_is_in_hand_and_the_next(daemon: Daemon, index: str, scratch: Path) -> None:
    """Tar and sidecar of one shard in hand and of one ahead: four nameless files at most, and none when all is read."""
    samples = iter(dataset(daemon, index))
    most = max(len(scratch_files(scratch)) for _ in samples)
    assert 2 <= most <= 4
    assert all_gone(scratch)


def test_a_forked_child_holds_none_of_its_parents_shards(daemon: Daemon, index: str, scratch: Path) -> None:
    """Workers that fork while their parent reads from the store leave its files to it, and read for themselves."""
    samples = iter(dataset(daemon, index))
    next(samples)
    eventually(lambda: len(scratch_files(scratch)) == 4)
    mapped = 2  # those of the shard that the parent reads: what is mapped is the child's as well
    assert list(DataLoader(_Inherited(scratch), batch_size=None, num_workers=1)) == [mapped]
    loader = DataLoader(dataset(daemon, index), batch_size=None, num_workers=2)
    assert len(list(loader)) == SHARDS * SAMPLES
    assert len(list(samples)) == SHARDS * SAMPLES - 1


class _Inherited(Dataset[int]):
    """A dataset of one number: how many files of the scratch folder a worker has from its parent."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _number: int) -> int:
        return len(scratch_files(self._scratch))


def test_a_shard_that_the_cache_cannot_hold(daemon: Daemon, index: str, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that is too small for a single shard says so, and the job reads past it."""
    expected = by_daemon(daemon, index)
    (daemon.root / "small").mkdir()
    with Daemon(daemon.root / "small", capacity="66KB") as small:
        assert plain(dataset(small, index)) == expected
        assert small.leases() == 0
    assert "the cache's capacity is" in caplog.text and "epoch 0: 6 shards were read directly" in caplog.text


def test_refusals_of_the_daemon_are_not_bypassed(daemon: Daemon, index: str, moto: Bucket) -> None:
    """A url outside --allow stays refused, whatever this process could read by itself."""
    with Daemon(daemon.root, "--allow", "s3://elsewhere/") as strict, pytest.raises(NotAllowedError):
        dataset(strict, index)


def test_errors_of_the_store_are_typed(daemon: Daemon, moto: Bucket, index: str) -> None:
    """A missing shard or bucket, a tar that was cut or joined and an outdated version raise what the daemon raises."""
    cut = moto.put("cut.tar", make_tar(random_samples(3))[:2000])
    joined = moto.put("joined.tar", make_tar(random_samples(3)) * 2)
    with pytest.raises(NotFoundError):
        list(dataset(daemon, f"{moto.url}/nowhere.tar"))
    with pytest.raises(NotFoundError):
        dataset(daemon, "s3://there-is-no-such-bucket-at-all/x/")
    with pytest.raises(TruncatedShardError, match=r"cut\.tar"):
        list(dataset(daemon, cut))
    with pytest.raises(TrailingDataError, match=r"joined\.tar"):
        list(dataset(daemon, joined))
    ds = dataset(daemon, f"{moto.url}/?.tar")
    moto.put("3.tar", make_tar(random_samples(2)))
    with pytest.raises(OutdatedError):
        list(ds)


def test_handler_continues_after_a_bad_shard(daemon: Daemon, moto: Bucket, index: str) -> None:
    """Errors of one shard reach the handler, and the others are read."""
    cut = moto.put("cut.tar", make_tar(random_samples(3))[:2000])
    good = f"{moto.url}/0.tar"
    assert len(list(dataset(daemon, [cut, good], on_error=ignore_and_continue))) == SAMPLES


def test_a_scratch_folder_without_room(daemon: Daemon, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a full disk nor a missing folder ends otherwise than in an error that names folder, shard and option."""
    monkeypatch.setenv("SHARDCACHE_MIN_FREE", "100%")
    with pytest.raises(DiskFullError, match="SHARDCACHE_DIRECT_DIR") as full:
        list(dataset(daemon, index))
    monkeypatch.setenv("SHARDCACHE_DIRECT_DIR", "/nowhere/at/all")
    with pytest.raises(CacheDirError, match="SHARDCACHE_DIRECT_DIR") as missing:
        list(dataset(daemon, index))
    assert full.value.url == missing.value.url and str(full.value.url).endswith("0.tar")
    assert "/nowhere/at/all" in missing.value.message


def test_without_being_asked_for_it_does_not_happen(daemon: Daemon, index: str) -> None:
    """The default is to raise; any third value is an error."""
    with pytest.raises(NoDaemonError):
        dataset(daemon, index, fallback="error")
    with pytest.raises(ConfigError, match='"direct"'):
        dataset(daemon, index, fallback="maybe")


def test_base_install_names_the_missing_packages(daemon: Daemon, index: str) -> None:
    """Without the daemon's packages the reader says at the start which to install, and not when the daemon dies."""
    script = (
        "import sys\n"
        "for name in ('aiohttp', 'awscrt', 'fsspec', 'pydantic', 'pydantic_settings', 'structlog'):\n"
        "    sys.modules[name] = None\n"
        "from shardcache_client import ShardReader\n"
        "ShardReader(sys.argv[1], socket=sys.argv[2], fallback='direct')\n"
    )
    daemon.start()
    ran = subprocess.run(
        [sys.executable, "-c", script, index, str(daemon.socket)], capture_output=True, text=True, timeout=GUARD_S
    )
    assert "ConfigError" in ran.stderr and "pip install 'shardcache[daemon]'" in ran.stderr


def test_a_killed_reader_leaves_nothing(daemon: Daemon, index: str, scratch: Path) -> None:
    """kill -9 while shards are in hand: no file of them remains, for none ever had a name."""
    script = (
        "import os, signal, sys\n"
        "from shardcache_client import ShardReader\n"
        "samples = iter(ShardReader(sys.argv[1], socket=sys.argv[2], fallback='direct'))\n"
        "next(samples)\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(maps.count(os.environ['SHARDCACHE_DIRECT_DIR']), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, index, str(daemon.socket)], capture_output=True, text=True, timeout=GUARD_S
    )
    assert int(ran.stdout) >= 2
    assert not list(scratch.iterdir())


@pytest.mark.slow
def test_a_short_campaign(scratch: Path) -> None:
    """Daemons killed and frozen at random samples, and back at later ones: every sample once, in order, as it was."""
    with tempfile.TemporaryDirectory(prefix="shardcache-direct-") as folder:
        results = list(harness.run("direct", 0.001, Path(folder)))
    assert [(result.injected, result.first_failure) for result in results] == [(2, ""), (2, "")]
    assert all(result.passed for result in results)
