"""A host with a daemon, and a host with an object store."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from support.cluster.network import Host
from support.programs.cli import Ran, shardcache
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples
from support.stores.seaweedfs import SeaweedFS


class Node:
    """A context manager of a host with a daemon, ready on entering and killed on leaving.

    Attributes:
        daemon: reads from the store, through a tier where there is one.
    """

    def __init__(
        self, host: Host, root: Path, store: "Store", *flags: str, tiered: bool = False
    ) -> None:
        """Prepare a daemon with more `flags`. `tiered`: it asks for parts at `front` first."""
        root.mkdir()
        self.host = host  # its network
        self.root = root  # folder of everything that the node has
        self.front = root / "run" / "front.sock"  # where its nginx serves its daemon
        config = root / "shardcache.toml"
        lines = ["[[origin]]", 'match = "s3://"']
        if tiered:
            lines.append(f'tier = "{self.front}"')
        config.write_text("\n".join(lines) + "\n")
        # A zygote is in another network.
        env = {**store.env(), "NETWORK": str(host.path)}
        self.daemon = Daemon(root, "--config", str(config), "--scrub-rate", "0", *flags, env=env)

    def __enter__(self) -> Self:
        with self.host.entered():
            self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()

    def __repr__(self) -> str:
        return f"<Node {self.host.address}>"

    def warm(self, urls: Sequence[str]) -> Ran:
        return shardcache("warm", *urls, socket=self.daemon.socket)

    def check(self, ran: Ran, dataset: "Dataset") -> None:
        """Raise AssertionError unless a fetch went well and cached every shard exactly."""
        assert ran.code == 0, f"{self}: {ran.out}{ran.err}\n{self.daemon.tail()}"
        assert not dataset.checksums - self.checksums(), self

    def checksums(self) -> set[str]:
        """Return the SHA-256 of the file of each cached shard."""
        files = (self.daemon.cache_dir / "shards").rglob("*.tar")
        return {sha256(path) for path in files}


def empty(nodes: Iterable[Node]) -> None:
    for node in nodes:
        answer = json.loads(node.daemon.request("POST", "/v1/evict", {"urls": ["s3://**"]}))
        assert node.daemon.shards() == [], answer


# The same every time: which node owns a shard follows from its whole url. With its gRPC port,
# 10,000 higher, it lies below those that `free_port` gives to the store's other servers.
_PORT = 1900
_SAMPLE_BYTES = 128 * 1024
_HEADERS_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Shard:
    url: str
    size_bytes: int
    sha256: str


class Dataset(tuple[Shard, ...]):
    @property
    def urls(self) -> list[str]:
        return [shard.url for shard in self]

    @property
    def checksums(self) -> set[str]:
        return {shard.sha256 for shard in self}

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self)


class Store(SeaweedFS):
    """A store that checks signatures; a context manager, like its base class."""

    def __init__(self, host: Host, root: Path | None = None) -> None:
        super().__init__(root, address=host.address, port=_PORT)
        self.host = host  # its host

    def __enter__(self) -> Self:
        with self.host.entered():
            return super().__enter__()

    def fill(self, bucket: str, shards: int, shard_bytes: int) -> Dataset:
        """Make a bucket of shards with random samples; return what is in it."""
        self.make_bucket(bucket)
        return Dataset(
            self.put_shard(bucket, number, shard_bytes, seed=number) for number in range(shards)
        )

    def put_shard(self, bucket: str, number: int, size_bytes: int, seed: int) -> Shard:
        """Store a shard of random samples, in place of one with that number."""
        tar = random_tar(size_bytes, seed)
        return Shard(
            self.put(bucket, f"{number:06d}.tar", tar), len(tar), hashlib.sha256(tar).hexdigest()
        )

    def copy(self, bucket: str, paths: Iterable[Path]) -> Dataset:
        """Make a bucket of existing shards; return what is in it."""
        self.make_bucket(bucket)
        return Dataset(
            Shard(self.put(bucket, path.name, path), path.stat().st_size, sha256(path))
            for path in paths
        )

    def make_bucket(self, bucket: str) -> str:
        """As the base class does, from the store's own network."""
        with self.host.entered():
            return super().make_bucket(bucket)

    def put(self, bucket: str, key: str, body: bytes | Path, **options: Any) -> str:
        """As the base class does, from the store's own network."""
        with self.host.entered():
            return super().put(bucket, key, body, **options)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def random_tar(size_bytes: int, seed: int) -> bytes:
    """Return a tar of random samples, a few KiB larger than the size."""
    samples = random_samples(
        size_bytes // _SAMPLE_BYTES, {"bin": _SAMPLE_BYTES - _HEADERS_BYTES}, seed=seed
    )
    return make_tar(samples)
