"""The catalogue is disposable: the daemon starts without it, and fetches nothing twice."""

import asyncio
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from shardcache.shared.lists.shard_columns import Shards
from shardcache.store.catalogue import Catalogue
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import make_tar, random_samples
from support.stores.faulty_s3 import FaultyS3
from support.stores.mischief import Mischief

pytestmark = pytest.mark.slow

SHARDS = 3
SAMPLES = 5


def tar(number: int) -> bytes:
    """Return one of the shards."""
    return make_tar(random_samples(SAMPLES, seed=number))


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """A store in a folder."""
    folder = tmp_path / "store"
    folder.mkdir()
    for number in range(SHARDS):
        (folder / f"{number}.tar").write_bytes(tar(number))
    return [f"file://{folder}/{number}.tar" for number in range(SHARDS)]


@pytest.fixture
def daemon(tmp_path: Path, urls: list[str]) -> Iterator[Daemon]:
    """A daemon that was killed after reading, so the catalogue's log is not folded in."""
    daemon = Daemon(tmp_path, "--listing-ttl-s", "0")
    with daemon:
        assert read(daemon, urls) == [tar(number) for number in range(SHARDS)]
    yield daemon
    daemon.kill()


def read(daemon: Daemon, urls: list[str]) -> list[bytes]:
    """Return what the leased files hold."""
    with RawSession(daemon) as session:
        session.plan(urls, list(range(len(urls))))
        return [Path(session.take(position)["path"]).read_bytes() for position in range(len(urls))]


def counts(daemon: Daemon, urls: list[str]) -> list[int | None]:
    """Return the manifest's numbers of samples."""
    with RawSession(daemon) as session:
        return [ref.samples for ref in Shards.unpack(session.ask("resolve", urls=urls)["packed"])]


def _delete(catalogue: Path) -> None:
    shutil.rmtree(catalogue)


def _overwritten(data: bytes) -> Callable[[Path], None]:
    """Return how to make other files of all those that there are."""

    def lose(catalogue: Path) -> None:
        with suppress(FileNotFoundError):  # the daemon has noticed, and removed the folder
            for path in catalogue.iterdir():
                path.write_bytes(data)

    return lose


def _empty_folder(catalogue: Path) -> None:
    shutil.rmtree(catalogue)
    catalogue.mkdir()


def _garbage_log(catalogue: Path) -> None:
    (catalogue / "cache.db-wal").write_bytes(b"\x37\x7f\x06\x82" + b"\xa5" * 9000)


def _truncated(catalogue: Path) -> None:
    (catalogue / "cache.db-wal").unlink(missing_ok=True)
    database = catalogue / "cache.db"
    database.write_bytes(database.read_bytes()[: database.stat().st_size // 2 + 100])


def _a_file_in_its_place(catalogue: Path) -> None:
    shutil.rmtree(catalogue)
    catalogue.write_text("no folder")


def _a_folder_in_its_place(catalogue: Path) -> None:
    shutil.rmtree(catalogue)
    (catalogue / "cache.db" / "more").mkdir(parents=True)


def _another_schema(catalogue: Path) -> None:
    """A database of some other release: the same tables, other columns."""
    _empty_folder(catalogue)
    with closing(sqlite3.connect(catalogue / "cache.db")) as database:
        database.execute("CREATE TABLE Cache (name TEXT, content BLOB)")
        database.execute("CREATE TABLE Settings (name TEXT)")
        database.commit()


WHILE_IT_RUNS = (
    _delete,
    _empty_folder,
    _overwritten(b""),
    _overwritten(b"\x00garbage\xff" * 5000),
    _garbage_log,
)
LOSSES = (*WHILE_IT_RUNS, _truncated, _a_file_in_its_place, _a_folder_in_its_place, _another_schema)


FOLDERS = {"shards", "names", "partial", "quarantine", "catalogue"}
FILES = FOLDERS | {"format", "format.copy"}


def test_a_lost_catalogue_costs_no_download(daemon: Daemon, urls: list[str]) -> None:
    """Sidecars give back versions and counts, so nothing is fetched or counted again."""
    for lose in LOSSES:
        lose(daemon.cache_dir / "catalogue")
        with daemon:
            assert counts(daemon, urls) == [SAMPLES] * SHARDS, lose
            assert read(daemon, urls) == [tar(number) for number in range(SHARDS)], lose
            assert daemon.status()["counters"]["origin_bytes"] == 0, lose
        names = {path.name for path in daemon.cache_dir.iterdir()}
        assert names == FILES, lose


@pytest.mark.parametrize("row", ["5", '[1, {"a": 2}]', '{"0": "v"}', "[" * 10_000 + "]" * 10_000])
def test_rows_of_another_form_cost_no_count_and_no_download(
    daemon: Daemon, urls: list[str], row: str
) -> None:
    """Readers of cached shards get every count and shard, at once; the listings are made again."""
    with closing(sqlite3.connect(daemon.cache_dir / "catalogue" / "cache.db")) as database:
        database.execute("UPDATE Cache SET value = ?", (zlib.compress(row.encode()),))
        database.commit()
    with daemon:
        assert counts(daemon, urls) == [SAMPLES] * SHARDS
        assert read(daemon, urls) == [tar(number) for number in range(SHARDS)]
        assert daemon.status()["counters"]["origin_bytes"] == 0


def test_catalogue_lost_under_the_daemon_disturbs_no_reader(
    daemon: Daemon, urls: list[str]
) -> None:
    """It continues serving and fetching, even new shards, and a restart finds all of it."""
    daemon.start()
    for lose in WHILE_IT_RUNS:
        pid = daemon.pid
        assert read(daemon, urls[:1]) == [tar(0)]
        lose(daemon.cache_dir / "catalogue")
        assert read(daemon, urls) == [tar(number) for number in range(SHARDS)], lose
        daemon.request("POST", "/v1/evict", {"urls": urls[:1]})
        assert read(daemon, urls) == [tar(number) for number in range(SHARDS)], lose
        assert daemon.status()["pid"] == pid
        daemon.restart()
        assert counts(daemon, urls) == [SAMPLES] * SHARDS, lose
        assert read(daemon, urls) == [tar(number) for number in range(SHARDS)], lose
        assert daemon.status()["counters"]["origin_bytes"] == 0, lose


async def test_cached_shards_are_served_without_catalogue_and_store(
    tmp_path: Path, faulty: FaultyS3
) -> None:
    """A cached shard's version is known from its sidecar, though the origin does not say."""
    urls = [faulty.put("0.tar", tar(0))]
    with Daemon(tmp_path, "--listing-ttl-s", "0", "--attempts", "2", env=faulty.env()) as daemon:
        assert await asyncio.to_thread(read, daemon, urls) == [tar(0)]
        await asyncio.to_thread(daemon.kill)
        _delete(daemon.cache_dir / "catalogue")
        faulty.fail(Mischief.INTERNAL_ERROR, key="0.tar", method="HEAD")
        await asyncio.to_thread(daemon.start)
        assert await asyncio.to_thread(read, daemon, urls) == [tar(0)]


def test_counts_of_what_is_no_longer_cached_are_lost_with_it(
    daemon: Daemon, urls: list[str]
) -> None:
    """They live in the catalogue alone: kept after an eviction, gone with the catalogue."""
    with daemon:
        eventually(lambda: _is_evicted(daemon, urls[0]))
        daemon.restart()
        assert counts(daemon, urls) == [SAMPLES] * SHARDS
        daemon.kill()
        _delete(daemon.cache_dir / "catalogue")
        daemon.start()
        assert counts(daemon, urls) == [None, SAMPLES, SAMPLES]


def _is_evicted(daemon: Daemon, url: str) -> bool:
    """Evict a shard, unless a process still has its file open, perhaps another test's child."""
    daemon.request("POST", "/v1/evict", {"urls": [url]})
    return url not in {shard["url"] for shard in daemon.shards()}


async def test_damage_that_shows_while_it_runs_is_mended(tmp_path: Path) -> None:
    """A database that turns out damaged in use is made again at once, not at the next start."""
    catalogue = Catalogue(tmp_path / "catalogue")
    for number in range(100):
        await catalogue.put("x" * 3000, str(number))
    catalogue.close()
    catalogue = Catalogue(tmp_path / "catalogue")
    database = tmp_path / "catalogue" / "cache.db"
    database.write_bytes(b"\xa5" * database.stat().st_size)
    assert await catalogue.get("50") is None
    await catalogue.put(1, "b")
    assert await catalogue.get("b") == 1
    catalogue.close()
