"""A store that checks signatures and regions as S3 does, over plain HTTP; S3's own hosts are meant to lead to it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, urlsplit

from aiohttp import web
from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from support.stores.faulty_s3 import aws_env

ACCESS_KEY, SECRET_KEY = "strict", "strict-secret"
_DOMAIN = ".amazonaws.com"


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: for which bucket, whether by a signed url, whether as to a proxy, and the status of the answer."""

    bucket: str
    by_url: bool
    proxied: bool
    status: int


@dataclass(slots=True)
class StrictS3:
    """Buckets in regions, in both styles of addressing; use it as `async with`.

    Attributes:
        regions: of the buckets; a request that is signed for another is refused with the right one.
        headers_only: buckets whose objects signed urls do not open.
        seen: every request.
        hosts: that were asked for.
    """

    regions: Mapping[str, str]
    headers_only: frozenset[str] = frozenset()
    seen: list[Seen] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    port: int = 0
    _objects: dict[str, bytes] = field(default_factory=dict)
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def env(self, endpoint_url: str | None = None) -> dict[str, str]:
        """Return the variables for an AWS SDK; without an endpoint it asks the hosts of S3 itself."""
        keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        found = aws_env(endpoint_url or "") | keys
        return {name: value for name, value in found.items() if value}

    def put(self, bucket: str, key: str, body: bytes) -> str:
        """Store bytes; return their s3:// url."""
        self._objects[f"{bucket}/{key}"] = body
        return f"s3://{bucket}/{key}"

    async def _answer(self, request: web.Request) -> web.Response:
        self.hosts.add(request.headers["Host"])
        place = self._place(request)
        bucket = place.partition("/")[0]
        by_url = "X-Amz-Signature" in request.query_string
        answer = self._refusal(request, bucket, by_url) or self._object(request, self._objects[place])
        self.seen.append(Seen(bucket, by_url, request.raw_path.startswith("http://"), answer.status))
        return answer

    @staticmethod
    def _place(request: web.Request) -> str:
        host, path = request.headers["Host"], request.rel_url.path.lstrip("/")
        return f"{host.partition('.s3.')[0]}/{path}" if host.endswith(_DOMAIN) else path

    def _refusal(self, request: web.Request, bucket: str, by_url: bool) -> web.Response | None:
        region, host = self.regions[bucket], request.headers["Host"]
        signature = _QuerySignature(request) if by_url else _HeaderSignature(request)
        is_other_host = host.endswith(_DOMAIN) and not host.endswith(
            (f".s3.{region}{_DOMAIN}", f"{bucket}.s3{_DOMAIN}")
        )
        if is_other_host or signature.region != region:
            return _refuse(301 if is_other_host else 400, region)
        if not signature.is_right() or (by_url and bucket in self.headers_only):
            return _refuse(403, region)
        return None

    @staticmethod
    def _object(request: web.Request, body: bytes) -> web.Response:
        headers = {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        if request.method == "HEAD":
            return web.Response(headers=headers | {"Content-Length": str(len(body))})
        part = request.http_range
        assert part.start is not None and part.stop is not None
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(body)}"
        return web.Response(status=206, body=body[part], headers=headers)


def _refuse(status: int, region: str) -> web.Response:
    code = {301: "PermanentRedirect", 400: "AuthorizationHeaderMalformed", 403: "SignatureDoesNotMatch"}[status]
    return web.Response(
        status=status,
        text=f"<Error><Code>{code}</Code></Error>",
        content_type="application/xml",
        headers={"x-amz-bucket-region": region},
    )


class _Signature:
    """Return a request's statement of its signature, and whether the SDK's own signer comes to the same."""

    def __init__(self, request: web.Request, kind: type[S3SigV4Auth], fields: Mapping[str, str], date: str) -> None:
        self.region = fields["Credential"].split("/")[2]
        self._given, self._kind = fields["Signature"], kind
        path, _, query = request.raw_path.removeprefix(f"http://{request.headers['Host']}").partition("?")
        kept = "&".join(each for each in query.split("&") if not each.startswith("X-Amz-Signature="))
        headers = {name: request.headers[name] for name in fields["SignedHeaders"].split(";")}
        self._request = AWSRequest(request.method, f"http://{request.headers['Host']}{path}?{kept}", headers)
        self._request.context["timestamp"] = date

    def is_right(self) -> bool:
        signer = self._kind(Credentials(ACCESS_KEY, SECRET_KEY), "s3", self.region)
        text = signer.string_to_sign(self._request, signer.canonical_request(self._request))
        return bool(signer.signature(text, self._request) == self._given)


class _QuerySignature(_Signature):
    def __init__(self, request: web.Request) -> None:
        query = parse_qs(urlsplit(request.raw_path).query)
        fields = {name.removeprefix("X-Amz-"): values[0] for name, values in query.items()}
        super().__init__(request, S3SigV4QueryAuth, fields, fields["Date"])


class _HeaderSignature(_Signature):
    def __init__(self, request: web.Request) -> None:
        _, _, text = request.headers["Authorization"].partition(" ")
        fields = dict(each.strip().split("=", 1) for each in text.split(","))
        super().__init__(request, S3SigV4Auth, fields, request.headers["X-Amz-Date"])
