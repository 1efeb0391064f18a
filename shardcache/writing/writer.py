"""`ShardWriter`, which writes the samples of a program to shards.

The program's thread appends samples to a local tar. A second thread, which runs an event loop,
uploads finished shards.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from shardcache.config.amounts import MIB
from shardcache.config.settings import Settings
from shardcache.shared import exceptions
from shardcache.shared.tarindex.named_members import TokenMember
from shardcache.writing.destination import Destination, check_has_no_shards
from shardcache.writing.journal import ShardRecord
from shardcache.writing.sample_tar import sample_of
from shardcache.writing.shard_cuts import SHARD_NAMES, ShardNames
from shardcache.writing.shard_file import ShardFile

T = TypeVar("T")


class ShardWriter:
    """Writes samples to shards and, at the end, their index; a context manager.

        with ShardWriter("s3://bucket/train/", shard_size_bytes=256 * 2**20) as shards:
            shards.write({"__key__": "000017", "jpg": data, "cls": 3})

    A shard is uploaded while the next is written; it appears in the destination whole or not at
    all. The same samples give the same bytes. The table of samples, which `select` needs, is
    written, too. If the block raises, no index is written, and the unfinished shard is discarded;
    complete shards stay. A writer must not be used by several threads.

    Args:
        destination: folder or url for the shards and `index.json`, without other shards.
        shard_size_bytes: maximum size of a shard, unless a single sample is larger.
        names: pattern of the shards' names, with one number.
        tokens: the member with a document's tokens, which are counted for the index: "npy" for
            `.npy` files of that extension, "tok:uint16" for plain arrays.
            `ShardDataset(tokens=...)` needs it.
        config: TOML file with `[[origin]]` tables; by default, the daemon's.

    Raises:
        ConfigError: an argument is invalid, or the destination holds shards already; at the end of
            the block, if no sample was written.
        AccessDeniedError, OriginUnavailableError, OriginError: the destination cannot be reached or
            written to.
        DiskError: a shard cannot be written: to the destination, or to $TMPDIR before its upload.
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
            raise exceptions.ConfigError("shard_size_bytes must be positive")
        self._names = ShardNames(names)
        self._shard_size_bytes = shard_size_bytes
        self._target = Destination(os.fspath(destination), Settings.load({}, config).origin)
        self._token_member = None if tokens is None else TokenMember.parse(tokens)
        self._shard: ShardFile | None = None  # the shard being written
        # Number of the shard being written, counted from 0; also the count of finished shards.
        self._shard_number = 0
        self._upload: Future[ShardRecord] | None = None  # the upload of the shard finished last
        self._records: list[ShardRecord] = []  # records of the uploaded shards, in order
        self._is_open = False

    def __enter__(self) -> Self:
        # The destination's connections belong to one event loop, so one thread runs all coroutines.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardcache-upload")
        self._runner = self._thread.submit(asyncio.Runner).result()
        self._call(self._target.__aenter__())
        try:
            objects = self._call(self._target.objects())
            check_has_no_shards(objects, self._target.url)
        except BaseException:
            self._close()
            raise
        self._is_open = True
        return self

    def __exit__(self, exc_type: object, *_exc: object) -> None:
        self._is_open = False
        try:
            if exc_type is None:
                self._finish_dataset()
        finally:
            if self._shard is not None:
                self._shard.discard()
            self._close()

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample: its `__key__`, and a value for each extension.

        `bytes` are written as they are, `str` in UTF-8, a number as `cls`, an array as `npy`,
        anything as `json`. Other names that begin with `__`, such as `__url__`, are left out.

        Raises:
            SampleError: the sample cannot be encoded, or readers would find it under another key or
                other extensions.
            TokensError: the sample's tokens are not an array.
            AccessDeniedError, OriginUnavailableError, OriginError, DiskError: the upload of an
                earlier shard has failed, or this shard cannot be written to the local disk.
        """
        if not self._is_open:
            raise exceptions.ConfigError(
                "the ShardWriter is not open",
                remedy="write within its `with` block",
            )
        if self._upload is not None and self._upload.done():
            self._await_upload()
        encoded_sample = sample_of(sample)
        if self._shard is not None:
            new_size_bytes = self._shard.size_bytes + encoded_sample.size_bytes
            if new_size_bytes > self._shard_size_bytes:
                self._finish_shard()
        if self._shard is None:
            draft = self._target.draft(self._names.name(self._shard_number))
            self._shard = ShardFile(draft, self._token_member)
        self._shard.add(encoded_sample)

    def _finish_shard(self) -> None:
        """Finish the shard being written, and start its upload when the shard before is uploaded.

        So at most two shards take space on the local disk.
        """
        # If the first sample was refused, the shard has no samples. It stays open for the next one.
        if self._shard is None or not self._shard.samples:
            return
        self._await_upload()
        self._shard.finish()
        name = self._names.name(self._shard_number)
        store = self._target.store_shard(self._shard, name, self._shard_number)
        self._upload = self._thread.submit(self._runner.run, store)
        self._shard = None
        self._shard_number += 1

    def _finish_dataset(self) -> None:
        """Store the last shard, the table of samples and the index."""
        self._finish_shard()
        self._await_upload()
        if not self._shard_number:
            raise exceptions.ConfigError(
                f"no samples were written to {self._target.url}, and readers reject an empty index",
                remedy="find out why there were no samples; nothing was stored",
            )
        names = [self._names.name(number) for number in range(self._shard_number)]
        # The index is stored last, since readers take it as the sign of a complete dataset.
        self._call(self._target.store_table(names))
        self._call(self._target.store_index(zip(names, self._records, strict=True)))

    def _await_upload(self) -> None:
        """Wait for the shard being uploaded, if there is one. Raises the upload's errors.

        After a failed upload, each call raises its error.
        """
        if self._upload is not None:
            self._records.append(self._upload.result())
            self._upload = None

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread of the event loop, and wait for its result."""
        return self._thread.submit(self._runner.run, work).result()

    def _close(self) -> None:
        """Close the destination in its event loop, then the loop, and then its thread."""
        self._call(self._target.__aexit__(None, None, None))
        self._thread.submit(self._runner.close).result()
        self._thread.shutdown()
