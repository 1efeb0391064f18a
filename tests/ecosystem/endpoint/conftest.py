"""Endpoints for S3 clients: a daemon's, and the store's own, which proves the tests right."""

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.programs.daemon import Daemon
from support.stores import aws_env
from support.stores.seaweedfs import SeaweedFS


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An S3 endpoint, and the store that has the objects.

    Attributes:
        env: by which an AWS client finds the endpoint, and may use it.
        daemon: None for the store's own endpoint.
    """

    store: SeaweedFS
    env: dict[str, str]

    daemon: Daemon | None = None

    def origin_bytes(self) -> int:
        """Return how many bytes the daemon has fetched from the store; 0 where there is none."""
        if self.daemon is None:
            return 0
        fetched: int = self.daemon.status()["counters"]["origin_bytes"]
        return fetched


@pytest.fixture(scope="module", params=["store", "daemon"])
def endpoint(
    request: pytest.FixtureRequest,
    seaweedfs_server: SeaweedFS,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Endpoint]:
    """The store's own endpoint with its keys, or a daemon's with keys from a program."""
    store = seaweedfs_server
    with tempfile.TemporaryDirectory(prefix="shardcache-s3-") as name:
        folder = Path(name)
        config = folder / "aws"
        nobody = {
            "AWS_CONFIG_FILE": str(config),
            "AWS_SHARED_CREDENTIALS_FILE": str(folder / "none"),
        }
        if request.param == "store":
            yield Endpoint(store, store.env() | nobody)
            return
        with Daemon(
            folder, "--s3", "127.0.0.1:0", "--listing-ttl-s", "0", env=store.env()
        ) as daemon:
            program = f"{sys.executable} -m shardcache credentials --socket {daemon.socket}"
            config.write_text(f"[default]\nregion = us-east-1\ncredential_process = {program}\n")
            env = aws_env(f"http://{daemon.status()['s3']}") | nobody
            for static in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                del env[static]
            yield Endpoint(store, env, daemon)
