"""A store that is far away: S3 and plain HTTP over a folder of files, slow to answer and narrow."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Self

from support.programs.guard import GUARD_S
from support.stores import aws_env
from support.stores.throttled_server import Far, Stats

_TESTS = Path(__file__).parents[2]


class ThrottledS3:
    """A server in a process of its own on 127.0.0.1; `/bucket/key` is the file `folder/bucket/key`.

    It knows GET and HEAD of objects, with Range and If-Match, and ListObjectsV2 in one page; it takes any
    credentials or none. Entering returns once it listens. Files are sent from the page cache; one that is not there
    costs every connection the time of the disk.
    """

    endpoint_url: str  # where S3 is spoken; set on entering
    pid: int  # of the server; set on entering

    def __init__(
        self,
        folder: Path,
        *,
        first_byte_s: float = 0.03,
        connection_bytes_per_s: float = 60e6,
        total_bytes_per_s: float = 170e6,
        **moods: int,
    ) -> None:
        """`moods` are `Far.slow_every` and `Far.max_requests`."""
        self._folder = folder
        self._far = Far(first_byte_s, connection_bytes_per_s, total_bytes_per_s, **moods)
        self._process: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:
        return f"<ThrottledS3 {self._folder} at {getattr(self, 'endpoint_url', 'no port')}>"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.stores.throttled_server", json.dumps(self._arguments())],
            stdin=subprocess.PIPE,  # ends with this process, however that ends
            stdout=subprocess.PIPE,
            text=True,
            cwd=_TESTS,  # where -m looks first
            # A Ctrl-C in the terminal is for whoever uses the server, which then ends it last.
            process_group=0,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise RuntimeError("the throttled store did not start; it has said why on stderr")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        assert process is not None
        try:
            process.communicate(timeout=GUARD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()

    def env(self) -> dict[str, str]:
        """Return the variables by which any AWS SDK finds this server."""
        return aws_env(self.endpoint_url)

    def http_url(self, bucket: str, key: str) -> str:
        """Return the http:// url of an object."""
        return f"{self.endpoint_url}/{bucket}/{key}"

    def stats(self) -> Stats:
        """Return what it has counted since it started."""
        connection = http.client.HTTPConnection(self.endpoint_url.removeprefix("http://"))
        try:
            connection.request("GET", "/_stats")
            return Stats(**json.load(connection.getresponse()))
        finally:
            connection.close()

    def _arguments(self) -> dict[str, object]:
        return {"folder": os.fspath(self._folder.resolve()), **asdict(self._far)}
