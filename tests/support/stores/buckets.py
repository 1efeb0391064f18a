"""Buckets for tests, and the AWS variables that lead to their servers."""

import io
import json
import logging
import os
import tarfile
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
from moto.server import ThreadedMotoServer

from shardcache.origin.base import Origin
from shardcache.origin.objects import RemoteObject
from shardcache.origin.registry import Origins
from shardcache.transport.between.flow import Flow
from shardcache.transport.between.parts import Parts, PartSums
from support.stores.seaweedfs import S3Server


@dataclass(frozen=True, slots=True)
class Bucket:
    """A fresh bucket; this process's AWS variables point at its server while the test runs."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, body: bytes, **options: Any) -> str:
        return self.server.put(self.name, key, body, **options)

    def env(self) -> dict[str, str]:
        return self.server.env()


def use_aws(monkeypatch: pytest.MonkeyPatch, home: Path, env: Mapping[str, str]) -> None:
    """Let AWS clients of this process see these variables, and nothing of the user's."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(home / name))
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def new_bucket(server: S3Server) -> Bucket:
    """Return a new bucket of a server, which only those are told of that get its variables."""
    bucket = Bucket(server, f"test-{uuid.uuid4().hex[:12]}")
    server.make_bucket(bucket.name)
    return bucket


def hand_over(origins: Origins, variables: Mapping[str, str]) -> None:
    """Hand over the credentials of a session, which then ends, to a private daemon's origins."""
    with origins.session_credentials.held(variables, os.geteuid()):
        pass


async def read_range(
    origin: Origin, obj: RemoteObject, start: int, stop: int, flow: Flow | None = None
) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        await origin.fetch(
            obj, Parts(file.name, None, obj.size_bytes, start, stop - start), flow or Flow()
        )
        return os.pread(file.fileno(), stop - start, start)


async def read_whole(origin: Origin, obj: RemoteObject, part_bytes: int) -> list[bytes]:
    """Return the whole object, fetched as a download does it, in the parts whose checksums came."""
    with tempfile.NamedTemporaryFile() as file:
        step_bytes = part_bytes if obj.has_ranges else max(1, obj.size_bytes)
        finished: list[PartSums] = []
        for start in range(0, obj.size_bytes, step_bytes):
            parts = Parts(
                file.name, None, part_bytes, start, min(step_bytes, obj.size_bytes - start)
            )
            finished += await origin.fetch(obj, parts, Flow()) or []
        data = Path(file.name).read_bytes()
        return [data[sums.index * part_bytes :][:part_bytes] for sums in finished]


class MotoS3(S3Server):
    """A server in this process, which takes any credentials and keeps everything in memory."""

    def __enter__(self) -> Self:
        # It tells of every request, in a thread: a child forked at that moment inherits the lock of
        # the log's file.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint_url = f"http://{host}:{port}"
        self.client = self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.stop()


def keys_of(bucket: Bucket) -> list[str]:
    """Return the names of all objects."""
    found = bucket.server.client.list_objects_v2(Bucket=bucket.name)
    return [entry["Key"] for entry in found.get("Contents", [])]


def index_of(bucket: Bucket, prefix: str = "train/") -> list[dict[str, Any]]:
    """Return the rows of an index, after checking each against the object that it names."""
    rows: list[dict[str, Any]] = json.loads(body_of(bucket, f"{prefix}index.json"))["shardlist"]
    for row in rows:
        head = bucket.server.client.head_object(Bucket=bucket.name, Key=prefix + row["url"])
        assert row["filesize"] == head["ContentLength"]
        assert row["etag"] == head["ETag"].strip('"')
        with tarfile.open(fileobj=io.BytesIO(body_of(bucket, prefix + row["url"]))) as tar:
            assert row["nsamples"] == len({name.partition(".")[0] for name in tar.getnames()})
    return rows


def body_of(bucket: Bucket, key: str) -> bytes:
    """Return an object's bytes."""
    return bytes(bucket.server.client.get_object(Bucket=bucket.name, Key=key)["Body"].read())
