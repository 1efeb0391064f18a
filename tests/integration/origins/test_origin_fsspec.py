"""Every other filesystem: local files, memory, asynchronous ones, missing ones."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from shardcache.config.origin_table import OriginTable
from shardcache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingPackageError,
    NotFoundError,
    OriginUnavailableError,
    ShardcacheError,
)
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import nothing
from support.stores.buckets import read_range, read_whole

DATA = bytes(range(256)) * 10


class AsyncMemory(AsyncFileSystem):  # type: ignore[misc]
    """The memory filesystem behind fsspec's asynchronous interface."""

    protocol = "asyncmemory"
    memory = MemoryFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("asyncmemory://", "memory://")))

    async def _info(self, path: str, **options: Any) -> Any:
        return self.memory.info(path)

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> Any:
        return self.memory.cat_file(path, start, end)

    async def _find(self, path: str, detail: bool = False, **options: Any) -> Any:
        return self.memory.find(path, detail=detail)

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.memory.ls(path, detail=detail)


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty folder of the parametrized protocol, as a url."""
    if request.param == "file":
        yield f"file://{tmp_path}/"
    elif request.param == "path":
        yield f"{tmp_path}/"
    else:
        fsspec.register_implementation("asyncmemory", AsyncMemory, clobber=True)
        MemoryFileSystem.store.clear()
        yield f"{request.param}://train/"
        MemoryFileSystem.store.clear()


def write(url: str, data: bytes) -> None:
    """Make a file of the folder's kind."""
    with fsspec.open(url.replace("asyncmemory", "memory"), "wb", auto_mkdir=True) as file:
        file.write(data)


@pytest.mark.parametrize("folder", ["file", "path", "memory", "asyncmemory"], indirect=True)
async def test_files_are_found_and_read(folder: str, origins: Origins) -> None:
    """On every kind: size, ranges, parts, and a listing that gives what stat gives."""
    for name in ("b.tar", "sub/c.tar", "a.tar"):
        write(folder + name, DATA)
    origin = origins.origin(folder)
    obj = await origin.stat(folder + "a.tar")
    assert obj.size_bytes == len(DATA)
    assert obj.has_ranges is True
    assert obj.is_guarded is False
    assert await read_range(origins.origin(obj.url), obj, 100, 300) == DATA[100:300]
    assert b"".join(await read_whole(origin, obj, 1000)) == DATA
    found = await origin.list_prefix(folder, nothing)
    assert [entry.url for entry in found] == [
        folder + name for name in ("a.tar", "b.tar", "sub/c.tar")
    ]
    assert found[0] == obj
    flat = await origin.list_prefix(folder, nothing, flat=True)
    assert [*flat[:2], flat[2].url] == [*found[:2], folder + "sub/"]
    assert [entry.url for entry in await origin.list_prefix(folder + "b", nothing)] == [
        folder + "b.tar"
    ]
    assert await origin.list_prefix(folder + "no", nothing) == []


@pytest.mark.parametrize("folder", ["file", "memory"], indirect=True)
async def test_a_replaced_file_is_another_version(folder: str, origins: Origins) -> None:
    """The version changes with the content, even at the same size."""
    write(folder + "a.tar", DATA)
    before = await origins.origin(folder).stat(folder + "a.tar")
    write(folder + "a.tar", DATA[::-1])
    assert (await origins.origin(folder).stat(folder + "a.tar")).version != before.version
    write(folder + "a.tar", DATA[:100])
    with pytest.raises(OriginUnavailableError):
        await read_range(origins.origin(before.url), before, 0, 200)


@pytest.mark.parametrize("folder", ["file", "memory", "asyncmemory"], indirect=True)
async def test_missing_file_or_folder_is_named(folder: str, origins: Origins) -> None:
    """Neither error is retried, and the folder's says how to name its shards."""
    write(folder + "a.tar", DATA)
    with pytest.raises(NotFoundError):
        await origins.origin(folder).stat(folder + "b.tar")
    with pytest.raises(NotFoundError, match="folder") as refused:
        await origins.origin(folder).stat(folder.rstrip("/"))
    assert "/" in refused.value.remedy
    if folder.startswith("file:"):
        with pytest.raises(NotFoundError, match="the folder does not exist"):
            await origins.origin(folder).list_prefix(f"{folder}none/a", nothing)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
async def test_a_file_that_may_not_be_read_is_denied(tmp_path: Path, origins: Origins) -> None:
    """The filesystem's own permissions count."""
    file = tmp_path / "a.tar"
    file.write_bytes(DATA)
    obj = await origins.origin(str(file)).stat(str(file))
    file.chmod(0)
    with pytest.raises(AccessDeniedError):
        await read_range(origins.origin(obj.url), obj, 0, 10)


class Needy(MemoryFileSystem):  # type: ignore[misc]
    """Raises an ImportError of its own, which names no module."""

    def __init__(self, **_options: Any) -> None:
        raise ImportError("get the frobnicator")


@pytest.mark.parametrize(
    ("url", "error", "message", "remedy"),
    [
        ("oci://c/a.tar", MissingPackageError, "ocifs", "pip install ocifs"),
        ("tos://b/a.tar", MissingPackageError, "tosfs", "pip install tosfs"),
        ("oss://b/a.tar", MissingPackageError, "ossfs", "pip install ossfs"),
        (
            "needy://a.tar",
            MissingPackageError,
            r"a Python package \(get the frobnicator\)",
            "install the package",
        ),
        ("s4://b/a.tar", ConfigError, "no filesystem for s4://.*did you mean 's3'", ""),
        ("-://b/a.tar", ConfigError, "no filesystem for -://", "write one of s3://"),
        # The constructor of its filesystem refuses the option.
        ("webhdfs://h/a.tar", ConfigError, "storage_options", "[[origin]]"),
    ],
)
async def test_a_url_that_no_filesystem_serves_is_an_error_with_a_remedy(
    url: str, error: type[ShardcacheError], message: str, remedy: str
) -> None:
    """A missing package, an unknown scheme or a wrong option is no matter of retries."""
    fsspec.register_implementation("needy", Needy, clobber=True)
    table = OriginTable.model_validate({"match": "webhdfs://", "storage_options": {"nonsense": 1}})
    origins = Origins([table], max_connections=1)
    with pytest.raises(error, match=f"(?s){message}") as refused:
        await origins.origin(url).stat(url)
    assert remedy in refused.value.remedy
    await origins.close()
