"""`ShardWriter`: shards from the samples of a program; and the folder or prefix that a dataset is written to."""

import asyncio
import os
import random
import tempfile
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from shardcache import errors, shardlist
from shardcache.access import LOCAL, WEB, checked, protocol_of
from shardcache.config import MIB, OriginTable, Settings
from shardcache.fetch.retry import BACKOFF
from shardcache.origin.base import WRITABLE
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.origin.whole_object import read_object
from shardcache.protocol import ShardRef, from_here, local_path
from shardcache.tarindex.contents import SUFFIX, TokenMember, rows_of, tokens_in
from shardcache.tarindex.grouping import Adjacency, Grouping
from shardcache.transport.flow import Flow, nothing
from shardcache.url_names import beside_index, is_shard
from shardcache.writing.shards import END, SHARD_NAMES, Sample, ShardNames, Stored, as_table, sample_of, shown, utf8

INDEX = "index.json"
"""Name of the index in the destination."""

TABLE = beside_index(INDEX, SUFFIX)
"""Name of the table of samples there, which `select()` reads."""

T = TypeVar("T")

_ATTEMPTS = 4
_CONNECTIONS = 8


class ShardFile:
    """A local tar that grows by samples, and counts their members and tokens; replaces an older file.

    Raises DiskError if it cannot be written.
    """

    def __init__(self, path: Path, member: TokenMember | None = None) -> None:
        self.path = path
        self.samples = 0  # so far
        self.members = Counter[str]()  # so far, by extension
        self.tokens = None if member is None else 0  # so far, if they are counted
        self._member = member
        self._last_key: str | None = None
        self._grouping = Grouping()
        with _writing(path):
            self._file: BinaryIO = path.open("wb", buffering=MIB)

    @property
    def size_bytes(self) -> int:
        """Size that the tar would have if it ended here."""
        return self._file.tell() + len(END)

    def add(self, sample: Sample) -> None:
        """Append a sample. Raises SampleError for one with the key of the one before, TokensError for a bad array."""
        if sample.key == self._last_key:
            raise errors.SampleError(
                f"two samples in succession have the key {shown(sample.key)}; readers would take them for one",
                remedy="give each sample its own key",
            )
        self._last_key = sample.key
        if self._member is not None and self.tokens is not None:
            self.tokens += sum(
                tokens_in(data, self._member, sample.key)
                for extension, data in sample.members
                if extension.lower() == self._member.extension.lower()
            )
        with _writing(self.path):
            self._file.writelines(sample.tar())
        for extension, data in sample.members:
            self.members[extension.lower()] += sample.count
            self._grouping.add([(utf8(f"{sample.key}.{extension}"), 0, len(data), None)])
        self.samples += sample.count

    def finish(self) -> None:
        """Write the end of the archive, and close the file.

        Raises SampleError if two samples have one key, and not the same members.
        """
        torn = Adjacency(self._grouping.finish()).torn()
        if torn is not None:
            raise errors.SampleError(
                f"two samples have the key {shown(torn[0])}, and not the same members; readers would refuse the shard",
                remedy="give each sample its own key, or write all of its members at once",
            )
        with _writing(self.path):
            self._file.write(END)
            self._file.close()

    def write_rows(self, path: Path, number: int, version: str | None) -> None:
        """Write the part of the sample table about this shard, the one with this number in the index."""
        with _writing(path), path.open("wb") as file:
            file.writelines(as_table(number, version, rows_of(self._grouping.finish())))

    def discard(self) -> None:
        """Remove the file, finished or not."""
        with suppress(OSError):
            self._file.close()
        self.path.unlink(missing_ok=True)


class Destination:
    """A folder or prefix of an object store; an asynchronous context manager.

    Every object appears under its name whole or not at all. `scratch` is a local folder for parts of the table of
    samples, which several processes may share.

    Raises ConfigError for a url that is malformed, or cannot be written to.
    """

    def __init__(self, url: str, tables: Sequence[OriginTable], scratch: Path | None = None) -> None:
        self.url = from_here(url).rstrip("/") + "/"
        self._tables = tables
        self._scratch = scratch
        self._is_local = protocol_of(self.url) in LOCAL
        checked(self.url)
        if protocol_of(self.url) in WEB:
            raise errors.ConfigError("web servers can only be read", url=self.url, remedy=WRITABLE)

    async def __aenter__(self) -> Self:
        self._origins = Origins(self._tables, max_connections=_CONNECTIONS)
        self._folder = tempfile.TemporaryDirectory(prefix="shardcache-write-")
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._origins.close()
        self._folder.cleanup()

    def draft(self, name: str) -> Path:
        """Return the local path where an object is made: next to it, if the destination is local. Raises DiskError."""
        if not self._is_local:
            return Path(self._folder.name) / name
        folder = Path(local_path(self.url) or self.url)
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / f".{name}.part"

    async def objects(self) -> dict[str, RemoteObject]:
        """Return the objects in the destination, by name, those in folders below it excluded."""
        try:
            with _for_this_user():
                found = await self._origins.origin(self.url).list_prefix(self.url, nothing)
        except errors.NotFoundError:
            if not self._is_local:
                raise
            return {}  # the folder will be made
        names = {obj.url.removeprefix(self.url): obj for obj in found}
        return {name: obj for name, obj in names.items() if "/" not in name}

    async def version(self, name: str) -> str:
        """Return the version of an object; "" if there is none. Raises the origin's errors."""
        with suppress(errors.NotFoundError), _for_this_user():
            return (await self._origins.origin(self.url).stat(self.url + name)).version
        return ""

    async def read(self, name: str) -> bytes:
        """Return the bytes of a small object. Raises the origin's errors."""
        origin = self._origins.origin(self.url)
        return await read_object(origin, await origin.stat(self.url + name), Flow())

    async def store_shard(self, shard: ShardFile, name: str, number: int, kept: Stored | None = None) -> Stored:
        """Store a finished shard, unless it is `kept`, and its part of the table of samples; remove the file.

        Raises the origin's errors, some after several attempts.
        """
        found = kept or await self.store_file(shard.path, name)
        shard.write_rows(self._part(name), number, None if self._is_local else found.version)
        return Stored(found.size_bytes, found.version, shard.samples, shard.tokens, shard.members)

    def _part(self, name: str) -> Path:
        return (self._scratch or Path(self._folder.name)) / f"{name}.rows"

    async def store_table(self, names: Iterable[str]) -> RemoteObject:
        """Store the table of samples: the parts of these shards. Raises as `store_shard`."""
        draft = self.draft(TABLE)
        with _writing(draft), draft.open("wb") as table:
            for name in names:
                table.write(self._part(name).read_bytes())
            table.write(END)
        return await self.store_file(draft, TABLE)

    async def store_bytes(self, data: bytes, name: str) -> None:
        """Store bytes under a name. Raises as `store_shard`."""
        draft = self.draft(name)
        with _writing(draft):
            draft.write_bytes(data)
        await self.store_file(draft, name)

    async def store_index(self, shards: Iterable[tuple[str, Stored]]) -> None:
        """Store the index of the shards, in their order, with relative names."""
        # Without versions of local files, which change when they are copied elsewhere.
        rows = [
            ShardRef(self.url + name, None if self._is_local else version, size_bytes, samples, tokens)
            for name, (size_bytes, version, samples, tokens, _) in shards
        ]
        await self.store_bytes(shardlist.write(rows, self.url).encode(), INDEX)

    async def store_file(self, draft: Path, name: str, replaced: str | None = None) -> RemoteObject:
        """Store a file and remove it; `replaced` as for `Origin.upload`. Raises as `store_shard`."""
        url, failures = self.url + name, 0
        try:
            with _for_this_user():
                while True:
                    try:
                        return await self._origins.origin(url).upload(draft, url, replaced)
                    except errors.ShardChangedError as exn:
                        reason = "another process has changed it since this command began"
                        raise errors.ShardChangedError(reason, url=url, remedy="run the command again") from exn
                    except errors.OriginUnavailableError:
                        failures += 1
                        if failures == _ATTEMPTS:
                            raise
                    await asyncio.sleep(BACKOFF.pause_s(failures, random.random()))
        finally:
            draft.unlink(missing_ok=True)  # noqa: ASYNC240  # one call of the system


def check_empty(objects: Iterable[str], url: str) -> None:
    """Raise ConfigError if a new dataset would mix with shards that are there already."""
    taken = [name for name in objects if name == INDEX or is_shard(name)]
    if taken:
        raise errors.ConfigError(
            f"the destination already holds other shards or their index, such as {min(taken)}",
            url=url,
            remedy="choose an empty folder or prefix, or delete what is there",
        )


@contextmanager
def _for_this_user() -> Iterator[None]:
    """Give errors a remedy for the user who writes, with credentials of their own."""
    try:
        yield
    except errors.AccessDeniedError as exn:
        remedy = "log in, or name a profile that may write there: AWS_PROFILE, or an [[origin]] table of --config"
        raise errors.AccessDeniedError(exn.message, url=exn.url, remedy=remedy) from exn


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Translate the errors of a local file that cannot be written."""
    try:
        yield
    except OSError as exn:
        remedy = "free space there; unfinished shards for an object store lie in $TMPDIR"
        raise errors.DiskError(f"cannot write the file ({exn.strerror})", url=str(path), remedy=remedy) from exn


class ShardWriter:
    """Writes samples to shards and, at the end, their index; a context manager.

        with ShardWriter("s3://bucket/train/", shard_size_bytes=256 * 2**20) as shards:
            shards.write({"__key__": "000017", "jpg": data, "cls": 3})

    A shard is uploaded while the next is written; it appears in the destination whole or not at all. The same samples
    give the same bytes. The table of samples that `select` needs is written, too. If the block raises, no index is
    written, and the shard at hand is discarded; complete ones stay. Not for several threads.

    Args:
        destination: folder or url for the shards and `index.json`, without other shards.
        shard_size_bytes: most bytes of a shard, unless a single sample is larger.
        names: pattern of the shards' names, with one number.
        tokens: the member with a document's tokens, whose number the index then gives: "npy" for `.npy` files of that
            extension, "tok:uint16" for plain arrays. `ShardDataset(tokens=...)` needs it.
        config: TOML file with `[[origin]]` tables; by default, the daemon's.

    Raises:
        ConfigError: an argument is invalid, or the destination holds shards already.
        AccessDeniedError, OriginUnavailableError, OriginError: the destination cannot be reached or written to.
        DiskError: a shard at hand cannot be written to $TMPDIR or, for a local destination, there.
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        *,
        shard_size_bytes: int = 256 * MIB,
        names: str = SHARD_NAMES,
        tokens: str | None = None,
        config: Path | None = None,
    ) -> None:
        if shard_size_bytes < 1:
            raise errors.ConfigError("shard_size_bytes must be positive")
        self._names = ShardNames(names)
        self._shard_size_bytes = shard_size_bytes
        self._target = Destination(os.fspath(destination), Settings.load({}, config).origin)
        self._member = None if tokens is None else TokenMember.parse(tokens)
        self._shard: ShardFile | None = None
        self._uploading: Future[Stored] | None = None
        self._stored: list[Stored] = []
        self._number = 0  # of the shard at hand
        self._is_open = False

    def __enter__(self) -> Self:
        # One thread has the event loop: the destination's connections belong to it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardcache-upload")
        self._runner = self._thread.submit(asyncio.Runner).result()
        self._call(self._target.__aenter__())
        try:
            check_empty(self._call(self._target.objects()), self._target.url)
        except BaseException:
            self._close()
            raise
        self._is_open = True
        return self

    def __exit__(self, exc_type: object, *_exc: object) -> None:
        self._is_open = False
        try:
            if exc_type is None:
                self._finish_shard()
                self._await_upload()
                names = [*map(self._names.name, range(self._number))]
                self._call(self._target.store_table(names))
                self._call(self._target.store_index(zip(names, self._stored, strict=True)))
        finally:
            if self._shard is not None:
                self._shard.discard()
            self._close()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample: its `__key__`, and a value for each extension.

        `bytes` are written as they are, `str` in UTF-8, a number as `cls`, an array as `npy`, anything as `json`.

        Raises SampleError for a sample that readers would not find as it is, TokensError for one whose tokens are no
        array, and the errors of the class for an upload that has failed.
        """
        if not self._is_open:
            raise errors.ConfigError("the ShardWriter is not open", remedy="write within its `with` block")
        found = sample_of(sample)
        if self._shard is not None and self._shard.size_bytes + found.size_bytes > self._shard_size_bytes:
            self._finish_shard()
        if self._shard is None:
            self._shard = ShardFile(self._target.draft(self._names.name(self._number)), self._member)
        self._shard.add(found)

    def _finish_shard(self) -> None:
        """Upload the shard at hand, after the one before it: at most two lie on the disk."""
        if self._shard is None:
            return
        self._shard.finish()
        self._await_upload()
        store = self._target.store_shard(self._shard, self._names.name(self._number), self._number)
        self._uploading = self._thread.submit(self._runner.run, store)
        self._shard = None
        self._number += 1

    def _await_upload(self) -> None:
        if self._uploading is not None:
            future, self._uploading = self._uploading, None
            self._stored.append(future.result())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.submit(self._runner.run, work).result()

    def _close(self) -> None:
        self._call(self._target.__aexit__(None, None, None))
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()
