"""The datasets: deterministic, incompressible, made once and shared by all parts."""

import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.peers import write_lancedb, write_litdata, write_mosaicml
from support.shards.tars import Sample, make_tar

SHARD_BYTES = 64 * 1024 * 1024
_BLOCK = tarfile.BLOCKSIZE

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    name: str  # folder and key prefix
    label: str  # for people
    members: tuple[tuple[str, int], ...]  # extension and size in bytes of each member of a sample
    dataset_bytes: int  # size of all its tars together at scale 1, about
    shard_bytes: int = SHARD_BYTES  # the most that one of them has

    @property
    def extensions(self) -> tuple[str, ...]:
        return tuple(extension for extension, _ in self.members)

    @property
    def sample_bytes(self) -> int:
        """Payload of one sample, without the tar around it."""
        return sum(size_bytes for _, size_bytes in self.members)

    @property
    def shard_samples(self) -> int:
        """Samples that fit into one shard, with each member's header and padding to blocks."""
        in_tar_bytes = sum(
            _BLOCK + -(-size_bytes // _BLOCK) * _BLOCK for _, size_bytes in self.members
        )
        return (self.shard_bytes - tarfile.RECORDSIZE) // in_tar_bytes

    def shard_count(self, scale: float) -> int:
        """Shards at a scale: two at least, so that two workers have something to do."""
        return max(2, round(self.dataset_bytes * scale / self.shard_bytes))


LARGE = Kind("large", "100 KB", (("jpg", 100_000),), 32 * SHARD_BYTES)
SMALL = Kind("small", "2 KB × 3", (("jpg", 1_900), ("json", 96), ("cls", 4)), 250_000_000)
KINDS = (LARGE, SMALL)


@dataclass(frozen=True, slots=True)
class Dataset:
    """A kind at a scale, on local disk as tar shards."""

    kind: Kind
    shards: tuple[Path, ...]

    @property
    def folder(self) -> Path:
        return self.shards[0].parent

    @property
    def names(self) -> str:
        return f"train-{{0000..{len(self.shards) - 1:04d}}}.tar"

    @property
    def samples(self) -> int:
        return len(self.shards) * self.kind.shard_samples

    @property
    def payload_bytes(self) -> int:
        return self.samples * self.kind.sample_bytes

    @property
    def tar_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.shards)


def samples(kind: Kind, shard: int) -> Iterator[Sample]:
    """Yield each sample of a shard, the same bytes every time."""
    source = random.Random(f"{kind.name}/{shard}")
    for number in range(kind.shard_samples):
        members = {ext: source.randbytes(size_bytes) for ext, size_bytes in kind.members}
        yield {"__key__": f"{shard:04d}{number:06d}", **members}


def make_tars(kind: Kind, scale: float, root: Path, say: Progress) -> Dataset:
    """Write the shards of a kind where they are not there yet."""
    folder = (
        root / f"{kind.name}-{kind.shard_count(scale)}x{kind.shard_samples}x{kind.sample_bytes}"
    )
    shards = tuple(folder / f"train-{shard:04d}.tar" for shard in range(kind.shard_count(scale)))
    if not folder.exists():
        say(f"making {len(shards)} shards of {kind.label} samples")
        folder.mkdir()
        for number, path in enumerate(shards):
            path.write_bytes(make_tar(samples(kind, number)))
    return Dataset(kind, shards)


def make_litdata(dataset: Dataset, say: Progress) -> Path:
    """Write the same samples as litdata's own chunks where they are not there yet."""
    folder = dataset.folder.with_name(f"{dataset.folder.name}-litdata")
    if not folder.exists():
        say(f"converting {dataset.kind.label} samples for litdata")
        write_litdata(
            folder,
            chain.from_iterable(
                samples(dataset.kind, shard) for shard in range(len(dataset.shards))
            ),
        )
    return folder


def make_mosaicml(dataset: Dataset, say: Progress) -> Path:
    """Write the same samples as MosaicML's shards of the tars' size, unless they are there."""
    folder = dataset.folder.with_name(f"{dataset.folder.name}-mosaicml")
    if not folder.exists():
        say(f"converting {dataset.kind.label} samples for streaming")
        shards = (samples(dataset.kind, shard) for shard in range(len(dataset.shards)))
        rows = (
            {"key": sample["__key__"], "jpg": sample["jpg"]}
            for sample in chain.from_iterable(shards)
        )
        columns = {"key": "str", "jpg": "bytes"}
        write_mosaicml(folder, columns, rows, size_limit=dataset.kind.shard_bytes)
    return folder


def make_lancedb(dataset: Dataset, say: Progress) -> Path:
    """Write the same samples as a table of LanceDB, unless it is there; return its folder."""
    folder = dataset.folder.with_name(f"{dataset.folder.name}-lancedb")
    if not folder.exists():
        say(f"converting {dataset.kind.label} samples for lancedb")
        write_lancedb(
            folder, (samples(dataset.kind, shard) for shard in range(len(dataset.shards)))
        )
    return folder
