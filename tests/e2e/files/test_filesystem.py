"""The cache as a filesystem of fsspec: read-only, and ranges of files that are still arriving."""

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures
from fsspec.tests.abstract.get import AbstractGetTests

from shardcache.errors import ConfigError, NotAllowedError, NotFoundError, OriginUnavailableError
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.network.scripted_server import ScriptedServer, answer
from support.programs.daemon import Daemon, eventually
from support.stores.buckets import Bucket
from support.stores.canary import GatedStore

PART_BYTES = 64 * 1024
BODY = random.Random(7).randbytes(3 * PART_BYTES + 17)

# As the entry point of a wheel does.
fsspec.register_implementation("shardcache", ShardcacheFileSystem, clobber=True)


class EndFirst(GatedStore):
    """Holds back all of a file but its first byte, which tells the version, and its end."""

    def wait(self, path: str, stop: int) -> int:
        is_end = stop >= len(self.files[path]) - PART_BYTES
        return stop if is_end or stop == 1 else super().wait(path, stop)


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    sizes = ("--part-size", str(PART_BYTES), "--range-part-size", str(PART_BYTES))
    flags = (*sizes, "--shard-connections", "2", "--listing-ttl-s", "0", "--attempts", "1")
    with Daemon(folder, *flags) as running:
        yield running


@pytest.fixture
def options(daemon: Daemon) -> dict[str, Any]:
    return {"shardcache": {"socket": str(daemon.socket), "skip_instance_cache": True}}


@pytest.fixture
def table() -> bytes:
    """A parquet file of several parts, its footer in the last."""
    file = io.BytesIO()
    numbers = random.Random(7)
    values = {"n": list(range(40_000)), "x": [numbers.random() for _ in range(40_000)]}
    pyarrow.parquet.write_table(
        pyarrow.table(values), file, compression="none", row_group_size=10_000
    )
    return file.getvalue()


@pytest.mark.slow
class TestGet(AbstractFixtures, AbstractGetTests):  # type: ignore[misc]
    """fsspec's own tests of reading, on files that are made without it."""

    @pytest.fixture
    def fs(self, daemon: Daemon) -> ShardcacheFileSystem:
        fs = ShardcacheFileSystem("file", socket=str(daemon.socket), skip_instance_cache=True)
        local = LocalFileSystem()
        # one test makes its files by these
        fs.mkdir = local.mkdir
        fs.touch = local.touch
        return fs

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path)

    @pytest.fixture
    def fs_join(self) -> Any:
        return os.path.join

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, fs_join: Any, fs_path: str) -> str:
        return str(
            self._bulk_operations_scenario_0(LocalFileSystem(auto_mkdir=True), fs_join, fs_path)
        )

    @pytest.fixture
    def fs_glob_edge_cases_files(self, fs_join: Any, fs_path: str) -> str:
        return str(self._glob_edge_cases_files(LocalFileSystem(auto_mkdir=True), fs_join, fs_path))

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, fs_join: Any, fs_path: str) -> str:
        return str(
            self._dir_and_file_with_same_name_prefix(
                LocalFileSystem(auto_mkdir=True), fs_join, fs_path
            )
        )

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, fs_join: Any, fs_path: str) -> str:
        return str(
            self._10_files_with_hashed_names(LocalFileSystem(auto_mkdir=True), fs_join, fs_path)
        )


@pytest.mark.slow
def test_chained_url_is_read_through_the_cache(
    moto: Bucket, daemon: Daemon, options: dict[str, Any], folder: Path
) -> None:
    """From S3, with the daemon's credentials: whole, by ranges, and by text lines; fetched once."""
    (folder / "s3").mkdir()
    with Daemon(folder / "s3", env=moto.env()) as own:
        options["shardcache"]["socket"] = str(own.socket)
        moto.put("data/a.bin", BODY)
        moto.put("data/index.json", b'{"a": 1}\n')
        url = f"shardcache::{moto.url}/data/a.bin"
        with fsspec.open(url, **options) as file:
            assert file.read(10) == BODY[:10]
            assert file.seek(-5, os.SEEK_END)
            assert file.read() == BODY[-5:]
        with fsspec.open(url, **options) as file:
            assert file.read() == BODY
        with fsspec.open(f"shardcache::{moto.url}/data/index.json", "rt", **options) as file:
            assert file.readlines() == ['{"a": 1}\n']
        with fsspec.open(
            f"shardcache://{moto.url}/data/a.bin", "rb", **options["shardcache"]
        ) as file:
            assert file.read() == BODY, "without the store's own package"
        fs, path = fsspec.url_to_fs(f"shardcache::{moto.url}/data", **options)
        moto.put("data/sub/deep/b.txt", b"")
        assert fs.ls(path, detail=False) == [
            f"{moto.name}/data/{name}" for name in ("a.bin", "index.json", "sub")
        ]
        assert fs.find(path) == [
            f"{moto.name}/data/{name}" for name in ("a.bin", "index.json", "sub/deep/b.txt")
        ]
        assert fs.info(f"{path}/sub/deep") == {
            "name": f"{moto.name}/data/sub/deep",
            "size": 0,
            "type": "directory",
        }
        assert fs.isdir(path)
        found = fs.glob(f"{path}/*.bin")
        assert found == [f"shardcache://{moto.url}/data/a.bin"], (
            "libraries open what they find through the cache"
        )
        assert fs.info(found[0])["name"] == f"{moto.name}/data/a.bin"
        assert fs.info(f"{path}/a.bin")["size"] == len(BODY)
        assert not fs.exists(f"{path}/b.bin")
        with fsspec.open(fs.unstrip_protocol(f"{path}/a.bin"), **options["shardcache"]) as file:
            assert file.read(5) == BODY[:5], "a path in full is a url of this filesystem"
        assert own.status()["counters"]["origin_bytes"] == len(BODY) + 9


@pytest.mark.parametrize("ask", ["info", "ls", "open"])
def test_error_of_a_missing_path_takes_it_for_neither_a_file_nor_a_folder(
    ask: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Nobody said what it should be, so the error has the given path and where to look."""
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}", **options)
    with pytest.raises(
        NotFoundError, match=f"{path}/missing.bin: there is neither a file nor a folder"
    ) as caught:
        getattr(fs, ask)(f"{path}/missing.bin")
    assert f"ls {tmp_path}/" in caught.value.remedy


@pytest.mark.parametrize("ask", ["info", "ls", "find", "open", "exists", "isfile", "isdir"])
def test_failing_store_is_not_a_missing_file(ask: str, options: dict[str, Any]) -> None:
    """A program that asks first whether a file is there must not take an outage for its absence."""
    with ScriptedServer(answer(b"", status="500 Internal Server Error")) as server:
        fs, path = fsspec.url_to_fs(f"shardcache::{server.url('/a.bin')}", **options)
        with pytest.raises(OriginUnavailableError, match="500"):
            getattr(fs, ask)(path)


def test_missing_file_of_a_web_server_is_a_missing_file(options: dict[str, Any]) -> None:
    """Web servers have no folders, in which the url might be looked for."""
    with ScriptedServer(answer(b"", status="404 Not Found")) as server:
        fs, path = fsspec.url_to_fs(f"shardcache::{server.url('/a.bin')}", **options)
        with pytest.raises(FileNotFoundError):
            fs.info(path)
        assert not fs.exists(path)


def test_file_of_a_web_server_is_listed_as_itself(options: dict[str, Any]) -> None:
    """Web servers cannot list files, but whoever lists a file wants nothing else."""
    with GatedStore() as store:
        url = store.put("a.bin", BODY)
        store.let("a.bin")
        fs, path = fsspec.url_to_fs(f"shardcache::{url}", **options)
        (listed,) = fs.ls(path)
        assert listed["size"] == len(BODY)
        assert fs.find(path) == [listed["name"]]


def test_cached_file_is_there_while_its_store_fails(
    daemon: Daemon, options: dict[str, Any]
) -> None:
    """It is described and read from the cache. One not cached is the store's error."""
    with GatedStore() as store:
        for name in ("cached.bin", "other.bin"):
            store.put(name, BODY)
            store.let(name)
        fs, path = fsspec.url_to_fs(f"shardcache::{store.url('/cached.bin')}", **options)
        assert fs.cat_file(path) == BODY
        daemon.await_publication()
        before = fs.info(path)
        store.words = answer(b"", status="500 Internal Server Error")
        fs.invalidate_cache()
        assert fs.info(path) == before
        assert fs.ls(path) == [before]
        assert fs.exists(path)
        assert fs.cat_file(path) == BODY
        with pytest.raises(OriginUnavailableError):
            fs.info(path.replace("cached", "other"))


def test_filesystem_is_read_only(options: dict[str, Any], tmp_path: Path) -> None:
    """Writing is an error that says where to write instead."""
    with (
        pytest.raises(OSError, match="read-only"),
        fsspec.open(f"shardcache::file://{tmp_path}/a", "wb", **options),
    ):
        pass
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}", **options)
    with pytest.raises(FileNotFoundError):
        fs.info(f"{path}/missing")
    (tmp_path / "a").write_bytes(b"a")
    for change in (fs.rm, fs.mkdir, fs.makedirs, fs.rmdir, fs.touch):
        with pytest.raises(OSError, match="read-only"):
            change(f"{path}/a")
    for change in (fs.mv, fs.cp_file, fs.copy):
        with pytest.raises(OSError, match="read-only"):
            change(f"{path}/a", f"{path}/b")
    with pytest.raises(OSError, match="read-only"):
        fs.pipe(f"{path}/b", b"b")
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_footer_of_an_arriving_table_is_read_first(
    daemon: Daemon, options: dict[str, Any], table: bytes
) -> None:
    """Its schema and length are known while the store holds back its rows."""
    with EndFirst() as store:
        url = store.put("table.parquet", table)
        with fsspec.open(f"shardcache::{url}", **options) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            assert parquet.metadata.num_rows == 40_000
            assert url not in daemon.whole()
            store.let("table.parquet")
            assert parquet.read(columns=["n"]).column("n").to_pylist() == list(range(40_000))
            assert parquet.read().num_rows == 40_000
        eventually(lambda: url in daemon.whole())
    gets = [headers["range"] for method, _, headers in store.requests if method == "GET"]
    gets = [each for each in gets if each != "bytes=0-0"]  # by which the version is asked for
    assert len(gets) == len(set(gets)), "no part was fetched twice"


def test_arrow_dataset_reads_through_the_cache(
    options: dict[str, Any], tmp_path: Path, table: bytes
) -> None:
    """Of a folder of tables, only those columns and rows that are asked for."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.parquet").write_bytes(table)
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}", **options)
    found = pyarrow.dataset.dataset(path, filesystem=fs, format="parquet")
    assert found.to_table(columns=["n"], filter=pyarrow.dataset.field("n") < 5)[
        "n"
    ].to_pylist() == 2 * list(range(5))


def test_rules_hold_for_the_filesystem(folder: Path, tmp_path: Path) -> None:
    """A user reads and sees no url that the daemon's rules do not allow."""
    (tmp_path / "a").write_bytes(b"a")
    (folder / "few").mkdir()
    with Daemon(folder / "few", "--allow", "s3://public/") as daemon:
        fs = ShardcacheFileSystem("file", socket=str(daemon.socket), skip_instance_cache=True)
        for ask in (fs.info, fs.ls, fs.open, fs.cat_file):
            with pytest.raises(NotAllowedError):
                ask(str(tmp_path / "a"))


def test_options_of_the_object_store_are_refused(options: dict[str, Any]) -> None:
    """The daemon opens the store: another endpoint must not be ignored, and another one read."""
    with pytest.raises(ConfigError, match=r"options of s3:// \(endpoint_url\)"):
        fsspec.open(
            "shardcache::s3://bucket/a", s3={"endpoint_url": "http://127.0.0.1:9"}, **options
        )


def test_unknown_options_are_refused() -> None:
    """With the nearest one that there is, or the place where such an option belongs."""
    with pytest.raises(ConfigError, match="did you mean 'socket'"):
        ShardcacheFileSystem("file", sockt="/tmp/a.sock")
    with pytest.raises(ConfigError, match="config file"):
        fsspec.filesystem("shardcache", target_protocol="s3", anon=True)
    with pytest.raises(ConfigError, match="timeout_s"):
        ShardcacheFileSystem("file", timeout_s=-1)


def test_folder_cannot_be_opened(options: dict[str, Any], tmp_path: Path) -> None:
    """It is no empty file."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").touch()
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}", **options)
    for read in (fs.open, fs.cat_file, fs.modified):
        with pytest.raises(IsADirectoryError):
            read(f"{path}/sub")


def test_invalidated_cache_is_asked_for_again(folder: Path, tmp_path: Path) -> None:
    """Files and folders are then as they are now, however long the daemon keeps its listings."""
    (folder / "kept").mkdir()
    with Daemon(folder / "kept", "--listing-ttl-s", "3600") as daemon:
        fs = ShardcacheFileSystem("file", socket=str(daemon.socket), skip_instance_cache=True)
        (tmp_path / "a").write_bytes(b"a")
        assert fs.ls(str(tmp_path), detail=False) == [f"{tmp_path}/a"]
        assert fs.cat_file(f"{tmp_path}/a") == b"a"
        (tmp_path / "a").write_bytes(b"new")
        (tmp_path / "b").write_bytes(b"b")
        assert fs.ls(str(tmp_path), detail=False) == [f"{tmp_path}/a"]
        fs.invalidate_cache()
        assert fs.ls(str(tmp_path), detail=False) == [f"{tmp_path}/a", f"{tmp_path}/b"]
        assert fs.cat_file(f"{tmp_path}/a") == b"new"
        (tmp_path / "c").write_bytes(b"c")
        assert f"{tmp_path}/c" in fs.ls(str(tmp_path), detail=False, refresh=True)


def test_urls_of_one_store_share_a_filesystem(daemon: Daemon) -> None:
    """Each instance stays in memory for good: not one for each url."""
    urls = [f"shardcache::file:///data/{name}" for name in "ab"]
    first, second = (
        fsspec.url_to_fs(url, shardcache={"socket": str(daemon.socket)})[0] for url in urls
    )
    assert first is second


def test_paths_are_literal_but_in_globs(options: dict[str, Any], tmp_path: Path) -> None:
    """A folder may have the characters of a pattern in its name, which stand for themselves."""
    for name in ("a", "b", "{a,b}", "[ab]"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in {name}").write_bytes(b"x")
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}", **options)
    for name in ("{a,b}", "[ab]"):
        inside = [f"{path}/{name}/in {name}"]
        assert fs.ls(f"{path}/{name}", detail=False) == inside
        assert fs.find(f"{path}/{name}") == inside
        assert fs.cat_file(inside[0]) == b"x"
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{path}/{{b,a}}")
    assert len(fs.glob(f"{path}/[ab]/*")) == 2


@pytest.mark.slow
def test_modification_time_changes_with_the_version(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Libraries such as DuckDB tell by it whether what they have read still holds."""
    (tmp_path / "a").write_bytes(b"a")
    fs, path = fsspec.url_to_fs(f"shardcache::file://{tmp_path}/a", **options)
    first = fs.modified(path)
    assert fs.modified(path) == first
    (tmp_path / "a").write_bytes(b"new")
    fs.invalidate_cache()
    assert fs.modified(path) > first
