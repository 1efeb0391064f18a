"""An S3 server in this process, for fast tests: moto's, on a free port of 127.0.0.1."""

from __future__ import annotations

import logging
from typing import Any, Self

import botocore.session
from botocore.config import Config
from moto.server import ThreadedMotoServer

from support.stores import aws_env

REGION = "us-east-1"


class MotoS3:
    """The server and a client for it. It takes any credentials and keeps everything in memory."""

    endpoint_url: str  # where S3 is spoken; set on entering
    client: Any  # a botocore S3 client for that endpoint; set on entering

    def __enter__(self) -> Self:
        # It tells of every request, in a thread: a child forked at that moment inherits the lock of the log's file.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint_url = f"http://{host}:{port}"
        session = botocore.session.Session()
        session.set_credentials("test", "test")
        self.client = session.create_client(
            "s3", region_name=REGION, endpoint_url=self.endpoint_url, config=Config(s3={"addressing_style": "path"})
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.stop()

    def env(self) -> dict[str, str]:
        return aws_env(self.endpoint_url)

    def make_bucket(self, bucket: str) -> str:
        """Make a bucket; return its url, `s3://bucket`."""
        self.client.create_bucket(Bucket=bucket)
        return f"s3://{bucket}"

    def put(self, bucket: str, key: str, body: bytes, **options: Any) -> str:
        """Store bytes in one PUT, with further options of PutObject; return the object's url."""
        self.client.put_object(Bucket=bucket, Key=key, Body=body, **options)
        return f"s3://{bucket}/{key}"
