"""Tar shards for tests: samples of random bytes, packed by the standard library's tarfile."""

from __future__ import annotations

import io
import json
import random
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

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


def make_tar(samples: Iterable[Sample], *, format: int = tarfile.USTAR_FORMAT) -> bytes:  # noqa: A002
    """Pack samples into a tar, as WebDataset's TarWriter lays them out. `format` is one of tarfile's constants."""
    members = [
        (f"{sample['__key__']!s}.{ext}", value)
        for sample in samples
        for ext, value in sample.items()
        if not ext.startswith("__") and isinstance(value, bytes)
    ]
    return pack(members, format=format)


def pack(members: Iterable[tuple[str | tarfile.TarInfo, bytes]], *, format: int = tarfile.USTAR_FORMAT) -> bytes:  # noqa: A002
    """Pack members in order, each under its name or as the TarInfo given; a TarInfo of no file carries no bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as tar:
        for name, value in members:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            if info.isreg():
                info.size = len(value)
            tar.addfile(info, io.BytesIO(value))
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    """Return a member that is no regular file, such as `tarfile.SYMTYPE` to `target` or `tarfile.DIRTYPE`."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def write_shards(
    folder: Path, shards: int, samples_per_shard: int, sizes: Mapping[str, int] | None = None, *, seed: int = 0
) -> list[Path]:
    """Write `shard-000000.tar` and on into `folder`; keys go on from one shard to the next, so that each is unique."""
    paths = []
    for number in range(shards):
        samples = random_samples(samples_per_shard, sizes, seed=seed, first=number * samples_per_shard)
        paths.append(folder / f"shard-{number:06d}.tar")
        paths[-1].write_bytes(make_tar(samples))
    return paths


def write_indexed(folder: Path, counts: Sequence[int]) -> str:
    """Write shards with so many samples each, keyed by their number, and an index file; return its url."""
    folder.mkdir()
    for number, count in enumerate(counts):
        samples = random_samples(count, {"jpg": 50}, first=sum(counts[:number]))
        (folder / f"{number}.tar").write_bytes(make_tar(samples))
    rows = [{"url": f"{number}.tar", "nsamples": count} for number, count in enumerate(counts)]
    (folder / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": rows}))
    return f"file://{folder}/index.json"
