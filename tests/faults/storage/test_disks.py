"""Disks that fail: typed errors with remedies, cached bytes, and recovery without a restart."""

import asyncio
import errno
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from campaign import disks
from campaign.disks import CacheRig
from campaign.harness import Row, rows
from shardcache.cache import disk_health
from shardcache.cache.waiting.stages import Stage
from shardcache.errors import CacheDirError, CorruptShardError, DiskFailedError, DiskFullError
from shardcache.shared.tarindex.tables import Samples, write
from shardcache.store.catalogue import Catalogue
from shardcache.store.disk.disk_errors import disk_errors
from shardcache.store.folder.cache_folder import CacheFolder
from shardcache.store.folder.layout import SIDECAR, TAR, Layout
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.disks.mounts import Bind, Tmpfs, may_mount
from support.disks.shim import CHANGES, FOR_EVER, HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.shards.stores import health_of, open_store, publish
from support.shards.tars import make_tar, random_samples
from support.stores.canary import GatedStore

needs_cc = pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")
needs_mounts = pytest.mark.skipif(not may_mount(), reason="needs root, who may mount")


@pytest.mark.slow
@rows(disks.ROWS)
def test_failing_disk_costs_typed_errors_at_most(row: Row, tmp_path: Path) -> None:
    """Shards are right or errors typed, cached ones are served, and no restart is needed."""
    row.check(tmp_path)


@pytest.fixture
def ill(tmp_path: Path) -> Iterator[tuple[CacheRig, Shim]]:
    """A daemon with one shard cached, whose disk fails at every change from now on."""
    shim = Shim(tmp_path / "shim", root=tmp_path / "cache")
    with CacheRig(tmp_path, env=shim.env()) as rig:
        assert rig.read(0)
        shim.arm(Action.FAIL, times=FOR_EVER, ops=CHANGES, error=errno.EIO)
        yield rig, shim


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[CacheRig, Shim]]:
    """A daemon with two shards cached, and a disk that is well."""
    shim = Shim(tmp_path / "shim", root=tmp_path / "cache")
    with CacheRig(tmp_path, env=shim.env()) as rig:
        assert rig.read(0)
        assert rig.read(1)
        yield rig, shim


@needs_cc
def test_status_and_health_tell_of_a_bad_disk_and_its_end(ill: tuple[CacheRig, Shim]) -> None:
    """HTTP 200 and the page show `degraded` with cause and remedy, then `ok` once mended."""
    rig, shim = ill
    with pytest.raises(DiskFailedError) as caught:
        rig.read(1)
    assert caught.value.url == rig.urls[1]
    assert "dmesg" in caught.value.remedy
    told = json.loads(rig.daemon.request("GET", "/v1/health"))
    assert told["status"] == "degraded"
    assert told["disk"]["state"] == "disk_failed"
    assert told["disk"]["error"]["code"] == "disk_failed"
    assert rig.disk()["since_s"] >= 0
    shim.disarm()
    rig.await_state("ok")
    assert rig.health() == "ok"
    assert rig.disk()["error"] is None
    assert rig.read(1)


@pytest.mark.slow
@needs_cc
def test_a_bad_disk_is_logged_once_and_leaves_the_store_alone(ill: tuple[CacheRig, Shim]) -> None:
    """The log has one line and nothing is fetched, however often readers ask."""
    rig, shim = ill
    with pytest.raises(DiskFailedError):
        rig.read(1)
    fetched = rig.daemon.status()["counters"]["origin_bytes"]
    for number in (1, 2, 3, 1, 2, 3):
        with pytest.raises(DiskFailedError):
            rig.read(number)
        assert rig.read(0), "what is cached is served"
    assert rig.daemon.status()["counters"]["origin_bytes"] == fetched
    assert rig.daemon.log.read_text().count("cache disk error") == 1
    shim.disarm()
    rig.await_state("ok")
    assert rig.daemon.log.read_text().count("disk has recovered") == 1


@pytest.mark.slow
@needs_cc
@pytest.mark.parametrize("suffix", first_quick([TAR, SIDECAR]))
def test_verify_sets_aside_what_the_disk_cannot_read(
    two: tuple[CacheRig, Shim], suffix: str
) -> None:
    """A bad sector under one file damages that shard, not the disk, and it is fetched again."""
    rig, shim = two
    bad = min((rig.daemon.cache_dir / "shards").rglob(f"*{suffix}"))
    shim.arm(Action.FAIL, times=FOR_EVER, ops=(Op.READ,), match=bad.name, error=errno.EIO)
    events = [
        json.loads(line)
        for line in rig.daemon.request("POST", "/v1/verify", {"prefix": ""}).splitlines()
    ]
    assert [event["error"]["code"] for event in events if event.get("ok") is False] == [
        "corrupt"
    ], events
    assert rig.disk()["state"] == "ok"
    assert len(rig.daemon.shards()) == 1
    shim.disarm()
    assert rig.read(0)
    assert rig.read(1)
    assert len(rig.daemon.shards()) == 2


@needs_cc
@pytest.mark.parametrize("suffix", [TAR, SIDECAR])
@pytest.mark.slow
def test_lack_of_resources_condemns_no_shard(two: tuple[CacheRig, Shim], suffix: str) -> None:
    """Errors of the process or the system say nothing about the file that it wanted to open."""
    rig, shim = two
    rig.daemon.restart()  # sidecars are read again
    file = min((rig.daemon.cache_dir / "shards").rglob(f"*{suffix}"))
    for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN):
        shim.arm(Action.FAIL, ops=(Op.OPEN,), match=file.name, error=number)
        events = map(
            json.loads, rig.daemon.request("POST", "/v1/verify", {"prefix": ""}).splitlines()
        )
        errors = [event["error"]["code"] for event in events if "error" in event]
        assert errors == ([] if number == errno.EINTR else ["exhausted"]), errno.errorcode[number]
        assert shim.acted == 1
        status = rig.daemon.status()
        assert status["counters"]["corrupt"] == 0
        assert status["cache"]["shards"] == 2
        assert status["disk"]["state"] == "ok"
    assert rig.read(0)
    assert rig.read(1)


@pytest.mark.slow
@needs_cc
def test_list_that_lack_of_resources_ends_says_so(two: tuple[CacheRig, Shim]) -> None:
    """Its last line is the error, even after its first lines, and not that of a complete list."""
    rig, shim = two
    rig.daemon.restart()
    shim.arm(Action.FAIL, at=2, ops=(Op.OPEN,), match=SIDECAR, error=errno.EMFILE)
    first, last = map(json.loads, rig.daemon.request("GET", "/v1/shards").splitlines())
    assert ("url" in first) is True
    assert last["event"] == "failed"
    assert last["error"]["code"] == "exhausted"


@needs_cc
def test_a_sidecar_that_cannot_be_read_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    """Its tables are read before they are mapped, where a bad sector would kill the process."""
    sidecar = tmp_path / "sidecar"
    shim = Shim(tmp_path / "shim", root=tmp_path)
    write(sidecar, {"size_bytes": 0}, Samples(keys=bytearray(10_000_000)))
    shim.arm(Action.FAIL, at=2, times=FOR_EVER, ops=(Op.READ,), match=sidecar.name, error=errno.EIO)
    program = """
import pathlib, sys
from shardcache.shared.tarindex.tables import TarIndex
TarIndex.open(pathlib.Path(sys.argv[1]))
"""
    env = {**os.environ, **shim.env()}
    run = subprocess.run(
        [sys.executable, "-c", program, str(sidecar)], env=env, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "Input/output error" in run.stderr


@pytest.mark.slow
def test_a_shard_that_is_fetched_again_during_a_slow_removal_stays(tmp_path: Path) -> None:
    """`evict` removes the shard that it found, and never the files of the next one of that name."""
    with CacheRig(tmp_path) as rig:
        assert rig.read(0)
        (tar,) = (tmp_path / "cache" / "shards").rglob("*.tar")
        slow = tmp_path / "slow"
        os.mkfifo(slow)
        pipe = os.open(slow, os.O_PATH)
        slow.replace(tar)  # to look at it takes as long as nobody writes there
        with ThreadPoolExecutor(1) as threads:
            evicting = threads.submit(
                rig.daemon.request, "POST", "/v1/evict", {"urls": rig.urls[:1]}
            )
            eventually(lambda: rig.daemon.status()["cache"]["shards"] == 0)
            reading = rig.reading(0)
            # It waits for the removal, as one that has begun with a range does at the network.
            eventually(
                lambda: reading.done() or bool({Stage.SPACE, Stage.NETWORK} & set(stages(rig)))
            )
            os.close(os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY))
            os.close(pipe)
            evicting.result()
            assert reading.result()
        assert tar.exists()
        assert tar.with_suffix(SIDECAR).exists()
        assert rig.read(0)
        assert rig.daemon.status()["counters"]["misses"] == 2


@needs_cc
def test_arriving_shard_is_read_on_after_a_transient_disk_error(tmp_path: Path) -> None:
    """Its index cannot be written at first. The reader of its beginning gets the later rest."""
    written = random_samples(50, {"jpg": 9_000})
    shim = Shim(tmp_path / "shim", root=tmp_path / "cache")
    with (
        GatedStore() as store,
        Daemon(tmp_path, "--part-size", str(disks.PART_BYTES), env=shim.env()) as daemon,
    ):
        url = store.put("a.tar", make_tar(written))
        shim.arm(Action.FAIL, ops=(Op.CREATE,), match=SIDECAR, error=errno.EIO)
        samples = iter(ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S))
        store.let("a.tar", 3 * disks.PART_BYTES)
        found = [sample["jpg"] for sample in islice(samples, 10)]
        store.let("a.tar")
        found += [sample["jpg"] for sample in samples]
        assert found == [sample["jpg"] for sample in written]
        assert shim.acted == 1


def stages(rig: CacheRig) -> list[str]:
    """Return what the transfers under way are at."""
    return [row["stage"] for row in rig.daemon.status()["transfers"]]


@needs_mounts
@pytest.mark.parametrize("how", ["fill", "use_up_inodes", "turn_read_only"])
@pytest.mark.slow
def test_a_daemon_starts_on_a_bad_disk_and_serves_what_it_holds(tmp_path: Path, how: str) -> None:
    """A restart in the middle of the trouble makes nothing worse, and loses no sample count."""
    with (
        Tmpfs(tmp_path / "cache", size_bytes=8_000_000, inodes=600) as disk,
        CacheRig(tmp_path) as rig,
    ):
        assert rig.read(0)
        rig.daemon.stop()
        tar = next((tmp_path / "cache" / "shards").rglob("*.tar"))
        with tar.open("rb"):  # in use, so that it cannot make room
            getattr(disk, how)()
            rig.daemon.start()
            rig.await_state("disk_full", "disk_failed")
            assert rig.read(0)
        if how == "turn_read_only":
            disk.turn_writable()
        else:
            disk.relieve()
        rig.await_state("ok")
        assert rig.read(1)
        assert [shard["samples"] for shard in rig.daemon.shards()] == [6, 6]


@needs_mounts
def test_a_folder_is_never_made_on_the_filesystem_below(tmp_path: Path) -> None:
    """An unmounted cache would fill it, so that is an error whose remedy names the mount."""
    with (
        Tmpfs(tmp_path / "disk", size_bytes=8_000_000),
        Bind(tmp_path / "disk", tmp_path / "mnt") as mount,
    ):
        folder = CacheFolder.take(Layout(tmp_path / "mnt" / "cache"), None)
        assert not folder.probe()
        mount.detach()
        with pytest.raises(CacheDirError, match="its path now leads") as caught:
            folder.probe()
        assert f"mount {tmp_path / 'mnt'} again" in caught.value.remedy
        assert not list((tmp_path / "mnt").iterdir())
        mount.attach()
        assert not folder.probe(), "it is the very folder that it was"
        folder.close()


class SlowCatalogue(Catalogue):
    """A catalogue whose reopening lasts until the test ends it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entered = threading.Event()
        self.leave = threading.Event()

    def reopen(self) -> None:
        """Wait until the test lets go."""
        self.entered.set()
        self.leave.wait(GUARD_S)


async def test_a_look_that_began_before_the_failure_says_nothing_of_it(tmp_path: Path) -> None:
    """The disk fails during a look, and whoever asks then is told what the next one finds."""
    store = open_store(tmp_path / "cache")
    store.catalogue.close()
    store.catalogue = slow = SlowCatalogue(store.layout.catalogue)
    health = health_of(store)
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        watching = group.create_task(health.run())
        await asyncio.to_thread(slow.entered.wait, GUARD_S)
        (tmp_path / "cache").rename(tmp_path / "aside")
        (tmp_path / "cache").touch()
        found = group.create_task(health.examine())
        await asyncio.sleep(0)
        slow.leave.set()
        assert not await found
        watching.cancel()
    store.close()


async def test_a_check_without_descriptors_says_nothing_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that seems damaged stays in service until a repeated check of the disk ends."""
    monkeypatch.setattr(disk_health, "_CHECK_S", 0.05)
    store = open_store(tmp_path / "cache")
    shard = await publish(store, "s3://bucket/a.tar")
    health = health_of(store)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            watching = group.create_task(health.run())
            with capture_logs() as logs:
                taking = group.create_task(health.take_out(shard, CorruptShardError("damaged")))
                while len(logs) < 3 and not taking.done():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [log["event"] for log in logs] == ["cannot check the cache disk"] * 3
            assert store.shards.get(shard.key) is shard
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert await taking
        watching.cancel()
    assert shard.key not in store.shards
    store.close()


def test_a_folder_that_was_deleted_is_made_and_held_again(tmp_path: Path) -> None:
    """The new one is as exclusive as the old one was."""
    layout = Layout(tmp_path / "cache")
    folder = CacheFolder.take(layout, None)
    layout.root.rename(tmp_path / "aside")
    with pytest.raises(CacheDirError, match="deleted or replaced"):
        folder.check()
    assert folder.probe()
    folder.check()
    with pytest.raises(CacheDirError, match="another daemon holds"):
        CacheFolder.take(layout, None)
    folder.close()


@pytest.mark.parametrize(
    ("number", "kind", "remedy"),
    [
        (errno.ENOSPC, DiskFullError, "free space"),
        (errno.EDQUOT, DiskFullError, "free space"),
        (errno.EFBIG, DiskFullError, "ulimit -f unlimited"),
        (errno.EIO, DiskFailedError, "dmesg"),
        (errno.EROFS, DiskFailedError, "remount,rw"),
        (errno.ESTALE, DiskFailedError, "dmesg"),
        (errno.ENOENT, CacheDirError, "mounted"),
        (errno.EACCES, CacheDirError, "writable"),
    ],
)
def test_every_cause_has_its_class_and_its_remedy(
    tmp_path: Path, number: int, kind: type, remedy: str
) -> None:
    """The kernel's error becomes a remedy for the user."""
    with pytest.raises(kind, match=str(tmp_path)) as caught, disk_errors(tmp_path / "x"):
        raise OSError(number, "as the kernel has it")
    assert remedy in caught.value.remedy
    assert caught.value.retryable


@pytest.mark.slow
def test_full_disk_under_the_log_ends_no_process(tmp_path: Path) -> None:
    """Lines that cannot be written are lost, and nothing else."""
    with CacheRig(tmp_path) as rig:
        rig.daemon.stop()
        rig.daemon.log.unlink()
        rig.daemon.log.symlink_to("/dev/full")
        rig.daemon.start()
        assert rig.read(0)
        (tmp_path / "cache" / "shards").rename(tmp_path / "aside")
        assert rig.read(1), "after a change that is logged"
        assert rig.daemon.stop() == 0
