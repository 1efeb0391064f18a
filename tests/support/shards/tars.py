"""Tar shards for tests: samples of random bytes, packed by the standard library's tarfile."""

import io
import json
import lzma
import random
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardcache.shared.formats.zstd_library import zstd_library
from shardcache.shared.tarindex.grouping import index_tar
from shardcache.shared.tarindex.tables import write
from shardcache.store.codecs import Codec
from shardcache_client.dataset import ShardDataset
from support.shards.reading import write_index

Sample = Mapping[str, bytes | str]


def random_samples(
    count: int, sizes: Mapping[str, int] | None = None, *, seed: int = 0, first: int = 0
) -> list[Sample]:
    """Return samples `{"__key__": "000000", ext: bytes…}`, the same ones for the same seed.

    Args:
        count: how many.
        sizes: bytes of each extension; by default 1000 of `jpg` and 1 of `cls`.
        first: number of the first key, so that the keys of several shards differ.
    """
    chosen = {"jpg": 1000, "cls": 1} if sizes is None else sizes
    rng = random.Random(f"{seed}/{first}")
    return [
        {"__key__": f"{number:06d}"} | {ext: rng.randbytes(size) for ext, size in chosen.items()}
        for number in range(first, first + count)
    ]


def make_tar(samples: Iterable[Sample]) -> bytes:
    """Pack samples into a tar, as WebDataset's TarWriter lays them out."""
    members = [
        (f"{sample['__key__']!s}.{ext}", value)
        for sample in samples
        for ext, value in sample.items()
        if not ext.startswith("__") and isinstance(value, bytes)
    ]
    return pack(members)


def pack(
    members: Iterable[tuple[str | tarfile.TarInfo, bytes]],
    *,
    format: int = tarfile.USTAR_FORMAT,  # noqa: A002  as tarfile calls it
) -> bytes:
    """Pack members in order, by name or TarInfo; a TarInfo of no file carries no bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, value in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            if info.isreg():
                info.size = len(value)
            tar.addfile(info, io.BytesIO(value))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return a special member, such as `tarfile.SYMTYPE` to `target` or `tarfile.DIRTYPE`."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def published(path: Path, tar: bytes, url: str) -> tuple[Path, Path]:
    """Lay a shard and its sidecar down, as the daemon does; return their paths."""
    index_path = path.with_suffix(".idx")
    path.write_bytes(tar)
    write(index_path, {"size_bytes": len(tar)}, index_tar(path, url))
    return path, index_path


def write_shards(
    folder: Path, shards: int, samples_per_shard: int, sizes: Mapping[str, int] | None = None
) -> list[Path]:
    """Write `shard-000000.tar` and on into `folder`, with unique keys that continue."""
    paths = []
    for number in range(shards):
        samples = random_samples(samples_per_shard, sizes, first=number * samples_per_shard)
        paths.append(folder / f"shard-{number:06d}.tar")
        paths[-1].write_bytes(make_tar(samples))
    return paths


def write_indexed(folder: Path, counts: Sequence[int], *, first: int = 0) -> str:
    """Write shards of these sizes, keyed by number from `first`, and an index; return its url."""
    folder.mkdir(exist_ok=True)
    for number, count in enumerate(counts):
        samples = random_samples(count, {"jpg": 50}, first=first + sum(counts[:number]))
        (folder / f"{number}.tar").write_bytes(make_tar(samples))
    return write_index(folder, counts)


COUNTS = (5, 11, 3, 8, 1, 13, 6)
KEYS = [f"{number:06d}" for number in range(sum(COUNTS))]
BATCH = 4

Make = Callable[..., ShardDataset]
"""Makes the dataset, with more options."""


Samples = dict[str, dict[str, bytes]]


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "index.json").read_text())["shardlist"]
    return found


def table_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table of samples."""
    with tarfile.open(path) as tar:
        return [json.load(tar.extractfile(name)) for name in tar.getnames()]  # type: ignore[arg-type]


def samples(folder: Path) -> Samples:
    """Return the samples of all indexed shards by key, after checking their numbers."""
    found: Samples = {}
    for row in rows(folder):
        path = folder / row["url"]
        before = len(found)
        with tarfile.open(path) as tar:
            for info in tar:
                key, _, extension = info.name.partition(".")
                member = tar.extractfile(info)
                assert member is not None
                found.setdefault(key, {})[extension] = member.read()
        assert row["nsamples"] == len(found) - before
        assert row["filesize"] == path.stat().st_size
    return found


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*[0-9].tar"))}


zstd = zstd_library()

_LZMA2 = b"\x21\x01"  # the filter's id, and the size of its properties
_STREAM_HEADER = 12


def with_window(codec: Codec, data: bytes, window_log: int) -> bytes:
    """Return data compressed by xz or zstd, with a window of 2**window_log bytes."""
    return (_xz if codec is Codec.XZ else _zstd)(data, window_log)


def _xz(data: bytes, window_log: int) -> bytes:
    """Change the block header (xz file format, 3.1): its dictionary's size, then its CRC32."""
    compressed = bytearray(lzma.compress(data, preset=0))
    end = _STREAM_HEADER + 4 * compressed[_STREAM_HEADER]
    compressed[compressed.index(_LZMA2, _STREAM_HEADER) + len(_LZMA2)] = 2 * (window_log - 12)
    compressed[end : end + 4] = zlib.crc32(compressed[_STREAM_HEADER:end]).to_bytes(4, "little")
    return bytes(compressed)


def _zstd(data: bytes, window_log: int) -> bytes:
    """Change a frame's window descriptor if it states no content size (RFC 8878, 3.1.1.1.2)."""
    compressor = zstd.ZstdCompressor()
    compressed = bytearray(compressor.compress(data) + compressor.flush())
    compressed[5] = (window_log - 10) << 3
    return bytes(compressed)


Documents = Sequence[Sequence[int]]


def npy(tokens: Sequence[int], dtype: str = "uint16") -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(tokens, dtype))
    return buffer.getvalue()


def token_tar(
    documents: Documents, *, extension: str = "npy", dtype: str | None = None, first: int = 0
) -> bytes:
    """Return a tar with a sample for each document, keyed by its number from `first` on.

    Args:
        dtype: of plain arrays; None for .npy files of uint16.
    """
    pack = npy if dtype is None else lambda tokens: np.array(tokens, dtype).tobytes()
    return make_tar(
        {"__key__": f"{number:06d}", "txt": b"text", extension: pack(tokens)}
        for number, tokens in enumerate(documents, first)
    )


def write_token_shards(folder: Path, shards: Sequence[Documents]) -> str:
    """Write shards of .npy files and an index with the numbers of their tokens; return its url."""
    folder.mkdir()
    rows = []
    first = 0
    for number, documents in enumerate(shards):
        (folder / f"{number}.tar").write_bytes(token_tar(documents, first=first))
        first += len(documents)
        tokens = sum(map(len, documents))
        rows.append({"url": f"{number}.tar", "nsamples": len(documents), "ntokens": tokens})
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{folder}/index.json"


def blocks_of(
    documents: Documents, length: int, overlap: int = 0, end: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """Return tokens and document numbers of each of a shard's blocks: concatenate and cut."""
    ends = [] if end is None else [end]
    joined = [
        (token, number) for number, tokens in enumerate(documents) for token in [*tokens, *ends]
    ]
    found = []
    while len(joined) >= length:
        block = joined[:length]
        order = list(dict.fromkeys(number for _, number in block))
        found.append(([token for token, _ in block], [order.index(number) for _, number in block]))
        joined = joined[length - overlap :]
    return found
