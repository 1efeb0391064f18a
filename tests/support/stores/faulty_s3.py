"""An S3 and HTTP server that serves objects and breaks its word whenever told to."""

import asyncio
import base64
import functools
import gzip
import hashlib
import ssl
from collections import Counter
from email.utils import formatdate
from pathlib import Path
from typing import Self
from urllib.parse import parse_qs, urlsplit

from awscrt import checksums

from support.network.http_requests import Request
from support.stores import aws_env
from support.stores.mischief import Answer, Ending, chunked, part_of, refusal
from support.stores.spoiling_server import Rule, SpoilingServer

BUCKET = "faulty"


class FaultyS3(SpoilingServer):
    """Serves one bucket, `faulty`, over HTTP on a free port; use it as `async with`.

    Attributes:
        access_key: the only one that is taken; others get ExpiredToken. None takes all.
        permits: prefix of the keys that each id of AWS's may read; {} lets all read all.
        ranges: whether Range is honoured.
        lengths: whether Content-Length is sent with bodies; without, they come in chunks.
        encoding: Content-Encoding that objects were stored with.
        compresses: whether bodies are compressed on the way, against Accept-Encoding.
        validators: headers that tell versions apart, of "ETag" and "Last-Modified".
        weakens: whether ETags are marked as weak on the way, as by a proxy.
        crc32c: whether HEAD tells the objects' CRC32C.
        seen: (method, key, Range, If-Match) of every request.
        hosts: Host of every request.
        askers: id of the AWS key that signed each request, or "".
        refreshed: Range of each request that a tier has to answer past its cache.
        detoured: Range of each request that a tier has to send to another owner.
        owner: the tier's answer to questions about owners; None if the owner is silent.
        owner_has_parts: whether the owner has requests in hand, as it says.
        owner_is_slow: whether no owner says that it lives.
        questions: those questions, by kind.
    """

    bucket = BUCKET
    drip_s = 0.1

    def __init__(self, context: ssl.SSLContext | None = None, front: Path | None = None) -> None:
        """Prepare one. `context`: for https; `front`: a Unix socket where it answers, too."""
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.front = front
        self._context = context
        self.access_key: str | None = None
        self.permits: dict[str, str] = {}
        self.ranges = True
        self.lengths = True
        self.encoding: str | None = None
        self.compresses = False
        self.validators: tuple[str, ...] = ("ETag",)
        self.weakens = False
        self.crc32c = False
        self.seen: list[tuple[str, str, str | None, str | None]] = []
        self.hosts: list[str | None] = []
        self.askers: list[str] = []
        self.refreshed: list[str | None] = []
        self.detoured: list[str | None] = []
        self.owner: str | None = "10.0.0.1:9081"
        self.owner_has_parts = True
        self.owner_is_slow = False
        self.questions: Counter[str] = Counter()
        self._late = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.listen(self._context, self.front)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._late.set()
        await self.end()

    def env(self) -> dict[str, str]:
        return aws_env(self.endpoint_url)

    def http_url(self, key: str) -> str:
        return f"{self.endpoint_url}/{self.bucket}/{key}"

    def put(self, key: str, body: bytes) -> str:
        self.objects[key] = body
        return f"s3://{self.bucket}/{key}"

    def hold(
        self, key: str, *, start: int | None = None, times: int | None = None, method: str = "GET"
    ) -> None:
        """Answer requests for a key only after `answer_late`, with what is stored by then."""
        self._rules += (Rule(None, method, key, start, times=times, action=self._late.wait),)

    def answer_late(self) -> None:
        self._late.set()

    def drop_bytes(self, body: bytes) -> int:
        """Return a hundredth of a body: it takes ten seconds."""
        return -(-len(body) // 100)

    def rules_for(self, request: Request) -> list[Rule]:
        """Note a request for an object and return its rules; questions meet none."""
        if "x-shardcache-owner" in request.headers:
            return []
        self._note(request)
        return super().rules_for(request)

    async def ask(self, request: Request) -> Answer:
        if question := request.headers.get("x-shardcache-owner"):
            return self._about_owner(question, is_detour="x-shardcache-detour" in request.headers)
        asker = _asker(request)
        if self.access_key not in (None, asker):
            return refusal(400, "ExpiredToken")
        if self.permits and not (
            asker in self.permits and request.key.startswith(self.permits[asker])
        ):
            return refusal(403, "AccessDenied")
        if request.key not in self.objects:
            return refusal(404, "NoSuchKey")
        body = self.objects[request.key]
        if request.headers.get("if-match") not in (None, _etag(body)):
            return refusal(412, "PreconditionFailed")
        return self._object(request, body)

    def _note(self, request: Request) -> None:
        asked = request.headers.get("range")
        self.seen.append((request.method, request.key, asked, request.headers.get("if-match")))
        self.hosts.append(request.headers.get("host"))
        self.askers.append(_asker(request))
        if "x-shardcache-fresh" in request.headers:
            self.refreshed.append(asked)
        if "x-shardcache-detour" in request.headers:
            self.detoured.append(asked)

    def _about_owner(self, question: str, *, is_detour: bool) -> Answer:
        self.questions[question] += 1
        if self.owner_is_slow and question == "alive":
            return Answer(200, {}, b"", raw=b"", ending=Ending.HANG)
        if question == "alive" and not self.owner_has_parts:
            return Answer(404, {"content-length": "0"}, b"")
        owner = "10.0.0.2:9081" if is_detour else self.owner
        return Answer(
            502 if owner is None else 200,
            {"content-length": "0", "x-shardcache-owner": owner or ""},
            b"",
        )

    def _object(self, request: Request, body: bytes) -> Answer:
        answer, wanted = part_of(
            len(body), request.part if self.ranges else None, self._headers(body)
        )
        if answer.status == 416:
            return answer
        answer.body = body[wanted.start : wanted.stop]
        if self.compresses:
            assert request.headers["accept-encoding"] == "identity"
            answer.headers["content-encoding"] = "gzip"
            answer.body = gzip.compress(answer.body)
            answer.headers["content-length"] = str(len(answer.body))
        if not self.lengths and request.method != "HEAD":
            chunked(answer)
        return answer

    def _headers(self, body: bytes) -> dict[str, str]:
        known = {
            "ETag": _etag(body),
            "Last-Modified": f"Thu, 01 Jan 2026 00:00:{body[0] % 60 if body else 0:02d} GMT",
        }
        headers = {name.lower(): known[name] for name in self.validators}
        if self.weakens:
            headers["etag"] = f"W/{headers['etag']}"
        headers["date"] = formatdate(usegmt=True)
        if self.encoding:
            headers["content-encoding"] = self.encoding
        if self.crc32c:
            headers["x-amz-checksum-crc32c"] = base64.b64encode(
                checksums.crc32c(body).to_bytes(4, "big")
            ).decode()
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        return headers


@functools.lru_cache(maxsize=8)  # it is asked for with each part of a shard
def _etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def _asker(request: Request) -> str:
    """Return the id of the key that signed a request, or an empty one."""
    scope = request.headers.get("authorization", "").partition("Credential=")[2]
    named = parse_qs(urlsplit(request.target).query).get("X-Amz-Credential", [""])
    return (scope or named[0]).partition("/")[0]
