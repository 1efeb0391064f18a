"""A disk that is slow to sync: readers get a checked shard before its publication."""

import errno
import gzip
import logging
import random
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardcache.errors import TruncatedShardError
from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.disks.shim import FOR_EVER, HAS_CC, Action, Op, Shim
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.programs.raw_session import RawSession
from support.shards.doors import DOORS
from support.shards.reading import write_index
from support.shards.tars import Sample, make_tar, random_samples
from support.stores.canary import GatedStore

pytestmark = pytest.mark.skipif(not HAS_CC, reason="needs a C compiler")

SAMPLES = 6
SHARDS = 2
SIZES = {"jpg": 5_000}  # large enough to be passed from a worker to its trainer without a copy
PART_BYTES = 64 * 1024
# More than the daemon has threads for its disk.
MANY = 40


def samples_of(number: int) -> Sequence[Sample]:
    """Return the samples of a shard."""
    return random_samples(SAMPLES, SIZES, first=number * SAMPLES)


def shard(number: int) -> bytes:
    """Return a shard's tar."""
    return make_tar(samples_of(number))


def values(shards: int = SHARDS) -> list[Any]:
    """Return what the samples of the first shards hold, in order."""
    return [sample["jpg"] for number in range(shards) for sample in samples_of(number)]


def write_source(folder: Path, shards: int) -> str:
    """Write shards and their index file; return its url."""
    folder.mkdir()
    for number in range(shards):
        (folder / f"{number}.tar").write_bytes(shard(number))
    return write_index(folder, [SAMPLES] * shards)


@pytest.fixture
def source(tmp_path: Path) -> str:
    """The url of the index file of two shards."""
    return write_source(tmp_path / "data", SHARDS)


@contextmanager
def holding(
    folder: Path, *flags: str, capacity: str = "1GB", **what: Any
) -> Iterator[tuple[Daemon, Shim]]:
    """Run a daemon whose disk holds each sync, or as `what` says, until the shim releases it."""
    shim = Shim(folder / "shim", root=folder / "cache")
    with Daemon(folder, "--scrub-rate", "0", *flags, capacity=capacity, env=shim.env()) as daemon:
        shim.arm(Action.HOLD, **({"times": FOR_EVER, "ops": (Op.FSYNC,)} | what))
        yield daemon, shim


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Daemon, Shim]]:
    """A daemon whose disk holds each sync."""
    with holding(tmp_path) as running:
        yield running


def read(daemon: Daemon, url: str | Sequence[str], **options: Any) -> list[bytes]:
    """Return the values of a dataset's samples."""
    dataset = ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S, **options)
    return [sample["jpg"] for sample in dataset]


def idle(daemon: Daemon) -> bool:
    """Return whether nothing is on its way, and nobody reads."""
    return not (daemon.status()["transfers"] or daemon.sessions())


def fetched_bytes(daemon: Daemon) -> int:
    """Return how many bytes have come from the origin."""
    return int(daemon.status()["counters"]["origin_bytes"])


def files(daemon: Daemon, folder: str) -> dict[str, Path]:
    """Return the files in a folder of the cache, by suffix."""
    return {path.suffix: path for path in (daemon.cache_dir / folder).rglob("*.*")}


def kept_bytes(daemon: Daemon) -> int:
    """Return what the files of shards take."""
    folders = (daemon.cache_dir / name for name in ("shards", "partial", "quarantine"))
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*.*"))


@pytest.mark.parametrize("door", first_quick(DOORS))
def test_every_reader_gets_all_samples_before_they_are_synced(
    held: tuple[Daemon, Shim], source: str, door: str
) -> None:
    """Nothing is published until the disk has synced it; no byte is fetched again after that."""
    daemon, shim = held
    assert sorted(DOORS[door](source, daemon.socket)) == sorted(values())
    assert not daemon.shards()
    shim.release()
    eventually(lambda: len(daemon.shards()) == SHARDS and idle(daemon))
    before_bytes = fetched_bytes(daemon)
    assert sorted(DOORS[door](source, daemon.socket)) == sorted(values())
    assert fetched_bytes(daemon) == before_bytes
    assert daemon.status()["cache"]["used_bytes"] == kept_bytes(daemon)


@pytest.mark.slow
@pytest.mark.parametrize("zero_copy", first_quick([False, True]))
def test_workers_pass_on_samples_of_files_that_move(
    tmp_path: Path, source: str, zero_copy: bool
) -> None:
    """A trainer takes batches from its workers before the files get their names, and after."""
    with holding(tmp_path) as (daemon, shim):
        dataset = ShardDataset(source, socket=daemon.socket, timeout_s=GUARD_S, zero_copy=zero_copy)
        batches = iter(dataset.loader(batch_size=2, num_workers=2))
        found = [bytes(value) for batch in islice(batches, 2) for value in batch["jpg"]]
        shim.release()
        eventually(lambda: len(daemon.shards()) == SHARDS)
        found += [bytes(value) for batch in batches for value in batch["jpg"]]
    assert sorted(found) == sorted(values())


@pytest.mark.slow
def test_inflated_shard_is_read_before_it_is_synced(
    held: tuple[Daemon, Shim], tmp_path: Path
) -> None:
    """Its beginning cannot be read as it arrives; its whole can."""
    daemon, shim = held
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(shard(0)))
    assert read(daemon, f"file://{path}") == values(1)
    assert not daemon.shards()
    shim.release()
    eventually(lambda: len(daemon.shards()) == 1 and idle(daemon))
    assert read(daemon, f"file://{path}") == values(1)
    assert daemon.status()["cache"]["used_bytes"] == kept_bytes(daemon)


def test_arriving_shard_is_read_to_its_end_before_it_is_synced(tmp_path: Path) -> None:
    """Its reader has begun while the rest was still to come."""
    written = random_samples(50, {"jpg": 9_000})
    with GatedStore() as store, holding(tmp_path, "--part-size", str(PART_BYTES)) as (daemon, shim):
        url = store.put("a.tar", make_tar(written))
        samples = iter(ShardDataset(url, socket=daemon.socket, timeout_s=GUARD_S))
        store.let("a.tar", 3 * PART_BYTES)
        found = [sample["jpg"] for sample in islice(samples, 10)]
        store.let("a.tar")
        found += [sample["jpg"] for sample in samples]
        assert found == [sample["jpg"] for sample in written]
        assert not daemon.shards()
        shim.release()
        eventually(lambda: len(daemon.shards()) == 1)


@pytest.mark.slow
def test_reader_that_comes_during_the_sync_does_not_wait(
    held: tuple[Daemon, Shim], source: str
) -> None:
    """Two readers have the same files, and each shard is fetched once."""
    daemon, _ = held
    assert read(daemon, source) == values()
    assert read(daemon, source, shuffle=True, seed=1) != values()
    size_bytes = sum(len(shard(number)) for number in range(SHARDS))
    assert fetched_bytes(daemon) == size_bytes


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", first_quick([1000, 3 * PART_BYTES + 1000]))
def test_file_is_read_by_ranges_before_it_is_synced(tmp_path: Path, size_bytes: int) -> None:
    """Other bytes may still be to come when its first are read, or not; and it is billed."""
    body = random.Random(7).randbytes(size_bytes)
    (tmp_path / "weights.bin").write_bytes(body)
    url = f"shardcache::file://{tmp_path}/weights.bin"
    with holding(tmp_path, "--part-size", str(PART_BYTES)) as (daemon, shim):
        options = {"socket": str(daemon.socket), "skip_instance_cache": True}
        for _ in range(2):
            with fsspec.open(url, shardcache=options) as file:
                assert file.read() == body
        eventually(lambda: daemon.status()["bill"]["read_bytes"] == 2 * size_bytes)
        assert not daemon.shards()
        shim.release()
        eventually(lambda: len(daemon.shards()) == 1)
        with fsspec.open(url, shardcache=options) as file:
            assert file.read() == body


@pytest.mark.slow
def test_shards_read_before_their_publication_are_billed(
    held: tuple[Daemon, Shim], source: str
) -> None:
    """They count as read and done once released, whatever becomes of the files."""
    daemon, _ = held
    assert read(daemon, source) == values()
    eventually(lambda: not daemon.sessions())
    (job,) = daemon.status()["jobs"]
    assert job["shards_done"] == SHARDS
    assert job["bill"]["read_bytes"] == sum(len(shard(number)) for number in range(SHARDS))


def test_reader_waits_while_names_are_synced_and_gets_the_published_files(
    tmp_path: Path, source: str
) -> None:
    """A reader that does not find the moved files waits for the publication to end."""
    with holding(tmp_path, match="/shards/") as (daemon, shim), RawSession(daemon) as session:
        session.plan([source.replace("index.json", "0.tar")], [0])
        early = session.take(0, unpublished=True)
        eventually(lambda: shim.acted == 1)
        assert not Path(early["path"]).exists()
        more = session.request("more", lease=early["lease"], beyond=early["size_bytes"])
        shim.release()
        published = session.answer(more)
    assert "inode" not in published
    assert Path(published["path"]).read_bytes() == shard(0)


@pytest.mark.slow
def test_client_of_an_earlier_release_waits_for_the_published_files(
    tmp_path: Path, source: str
) -> None:
    """It does not ask for unpublished files, and would look in vain once they have moved."""
    with holding(tmp_path) as (daemon, shim), RawSession(daemon) as session:
        assert read(daemon, source) == values()
        session.plan([source.replace("index.json", "0.tar")], [0])
        lease = session.request("lease", position=0, partial=True)
        session.send(type="need", of=lease)
        assert session.answer(session.request("explain", of=lease))["type"] == "waiting"
        shim.release()
        published = session.answer(lease)
    assert Path(published["path"]).parent.parent.name == "shards"


@pytest.mark.slow
def test_unpublished_files_may_be_read_by_those_who_may_read_published_ones(
    held: tuple[Daemon, Shim], source: str
) -> None:
    """Mode and group are those of the published files."""
    daemon, shim = held
    assert read(daemon, source) == values()
    before = {suffix: path.stat() for suffix, path in files(daemon, "partial").items()}
    assert [stat.S_IMODE(before[suffix].st_mode) for suffix in (".part", ".idx")] == [0o440, 0o440]
    shim.release()
    eventually(lambda: len(daemon.shards()) == SHARDS)
    after = files(daemon, "shards")
    assert {path.stat().st_gid for path in after.values()} == {before[".part"].st_gid}


@pytest.mark.slow
def test_daemon_killed_during_the_sync_serves_the_right_bytes_again(
    held: tuple[Daemon, Shim], source: str
) -> None:
    """The next one makes the index again, and fetches no part that the disk has."""
    daemon, shim = held
    assert read(daemon, source) == values()
    daemon.kill()
    shim.release()
    daemon.start()
    assert not daemon.shards()
    assert read(daemon, source) == values()
    eventually(lambda: len(daemon.shards()) == SHARDS)
    assert fetched_bytes(daemon) == 0


@pytest.mark.slow
def test_reader_keeps_what_it_has_when_the_daemon_is_killed_during_the_sync(
    tmp_path: Path, source: str
) -> None:
    """It reads on in its files while the next daemon publishes them."""
    with holding(tmp_path) as (daemon, shim):
        samples = iter(ShardDataset(source, socket=daemon.socket, timeout_s=GUARD_S))
        found = [sample["jpg"] for sample in islice(samples, 3)]
        daemon.kill()
        shim.release()
        daemon.start()
        found += [sample["jpg"] for sample in samples]
        assert found == values()
        eventually(lambda: len(daemon.shards()) == SHARDS)
        assert read(daemon, source) == values()


@pytest.mark.slow
def test_inflated_shard_that_is_still_read_stays_counted_after_a_kill(tmp_path: Path) -> None:
    """The next daemon inflates it again, next to the file that the reader has open."""
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(shard(0)))
    with holding(tmp_path) as (daemon, shim):
        samples = iter(ShardDataset(f"file://{path}", socket=daemon.socket, timeout_s=GUARD_S))
        found = [next(samples)["jpg"]]
        daemon.kill()
        shim.release()
        daemon.start()
        assert read(daemon, f"file://{path}") == values(1)
        eventually(lambda: len(daemon.shards()) == 1 and not daemon.status()["transfers"])
        assert files(daemon, "quarantine").keys() == {".tar"}
        assert daemon.status()["cache"]["used_bytes"] == kept_bytes(daemon)
        found += [sample["jpg"] for sample in samples]
        assert found == values(1)


@pytest.mark.slow
def test_shard_that_could_not_be_synced_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reader has all samples, and is warned with its next shard.

    The kernel takes lost pages for clean after a failed sync: the same file must not be synced
    again.
    """
    source = write_source(tmp_path / "data", 4)
    others = [f"file://{tmp_path}/data/{number}.tar" for number in (1, 2, 3)]
    dataset_bytes = sum(len(shard(number)) for number in range(4))
    caplog.set_level(logging.WARNING, logger="shardcache")
    with holding(tmp_path, at=4, times=1, match=".part") as (daemon, shim):
        read(daemon, others)
        eventually(lambda: len(daemon.shards()) == 3)
        samples = iter(ShardDataset(source, socket=daemon.socket, timeout_s=GUARD_S))
        found = [sample["jpg"] for sample in islice(samples, 3)]
        eventually(lambda: shim.acted == 1)
        shim.release(error=errno.EIO)
        eventually(lambda: fetched_bytes(daemon) == dataset_bytes + len(shard(0)))
        found += [sample["jpg"] for sample in samples]
        assert found == values(4)
        assert "could not be written to disk" in caplog.text
        eventually(lambda: len(daemon.shards()) == 4 and idle(daemon))
        assert read(daemon, source) == values(4)
        assert daemon.status()["cache"]["used_bytes"] == kept_bytes(daemon)


@pytest.mark.slow
def test_shard_that_could_not_be_synced_costs_a_waiting_reader_no_error(
    tmp_path: Path, source: str
) -> None:
    """One that waits for the published file gets it from the second attempt."""
    with holding(tmp_path, times=1, match=".part") as (daemon, shim), RawSession(daemon) as session:
        session.plan([source.replace("index.json", "0.tar")], [0])
        lease = session.request("lease", position=0)
        session.send(type="need", of=lease)
        eventually(lambda: shim.acted == 1)
        shim.release(error=errno.EIO)
        assert Path(session.answer(lease)["path"]).read_bytes() == shard(0)


@pytest.mark.slow
def test_reader_goes_on_through_more_shards_than_are_synced_at_a_time(tmp_path: Path) -> None:
    """Those that wait for the disk keep no thread that other work needs."""
    source = write_source(tmp_path / "data", MANY)
    with holding(tmp_path) as (daemon, shim):
        assert read(daemon, source) == values(MANY)
        assert len(daemon.status()["transfers"]) == MANY
        shim.release()
        eventually(lambda: len(daemon.shards()) == MANY)


@pytest.mark.slow
def test_unpublished_shards_count_against_the_capacity(tmp_path: Path) -> None:
    """A reader that is ahead of the disk waits for space, and goes on when there is some."""
    source = write_source(tmp_path / "data", MANY)
    capacity_bytes = 10 * (len(shard(0)) + 70_000)
    with holding(tmp_path, capacity=str(capacity_bytes)) as (daemon, shim):
        samples = iter(ShardDataset(source, socket=daemon.socket, timeout_s=GUARD_S))
        found = [sample["jpg"] for sample in islice(samples, 5 * SAMPLES)]
        assert daemon.status()["cache"]["used_bytes"] <= capacity_bytes
        shim.release()
        found += [sample["jpg"] for sample in samples]
        assert found == values(MANY)


@pytest.mark.slow
def test_truncated_shard_is_refused_before_it_is_synced(
    held: tuple[Daemon, Shim], tmp_path: Path
) -> None:
    """It fails its checks, so none of it is handed out."""
    daemon, _ = held
    path = tmp_path / "cut.tar"
    path.write_bytes(shard(0)[:20_000])
    with pytest.raises(TruncatedShardError):
        read(daemon, f"file://{path}", partial_reads=False)
