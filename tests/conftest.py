"""Servers that many tests need: one of each kind for the whole run, a fresh bucket for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.faulty_s3 import FaultyS3
from support.moto_s3 import MotoS3
from support.seaweedfs import SeaweedFS


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fresh bucket; this process's AWS variables point at its server while the test runs."""

    server: MotoS3 | SeaweedFS
    name: str

    @property
    def url(self) -> str:
        """Return `s3://name`."""
        return f"s3://{self.name}"

    def put(self, key: str, body: bytes, **options: Any) -> str:
        """Store an object; return its url."""
        return self.server.put(self.name, key, body, **options)

    def env(self) -> dict[str, str]:
        """Return the AWS variables, for a process of its own."""
        return self.server.env()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoS3]:
    """An S3 server in this process."""
    with MotoS3() as server:
        yield server


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[SeaweedFS]:
    """A real S3 server of its own; starting takes some seconds."""
    with SeaweedFS() as server:
        yield server


@pytest.fixture
def moto(moto_server: MotoS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A fresh bucket on moto."""
    return _fresh_bucket(moto_server, monkeypatch, tmp_path)


@pytest.fixture
def seaweedfs(seaweedfs_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """A fresh bucket on SeaweedFS."""
    return _fresh_bucket(seaweedfs_server, monkeypatch, tmp_path)


@pytest.fixture
async def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[FaultyS3]:
    """A server that misbehaves as told; this process's AWS variables point at it."""
    async with FaultyS3() as server:
        use_aws(monkeypatch, tmp_path, server.env())
        yield server


def use_aws(monkeypatch: pytest.MonkeyPatch, home: Path, env: Mapping[str, str]) -> None:
    """Let AWS clients of this process see these variables, and nothing of the user's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(home / name))
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def _fresh_bucket(server: MotoS3 | SeaweedFS, monkeypatch: pytest.MonkeyPatch, home: Path) -> Bucket:
    use_aws(monkeypatch, home, server.env())
    bucket = Bucket(server, f"test-{uuid.uuid4().hex[:12]}")
    server.make_bucket(bucket.name)
    return bucket
