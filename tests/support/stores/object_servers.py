"""Servers of object stores' documented HTTP, strict about what they are asked: Google's XML API, Azure's blobs."""

import base64
import gzip
import hashlib
import http.client
import json
import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import quote, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shardcache.checksums import crc32c

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]+)")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer in place of the right one."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Http"

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length)
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, found, data = self.server.store.answer(self.command, self.path, headers, body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **found}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  # names of http.server

    def log_message(self, *_args: object) -> None:
        pass


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    store: "ObjectServer"


Answered = tuple[int, Mapping[str, str], bytes]


class ObjectServer:
    """Listens on a free port of the loopback; a context manager.

    Attributes:
        objects: bodies by path, such as `/bucket/key`.
        refusals: of the next requests for objects.
        requests: method, path and headers of those so far.
        lifetime_s: of the tokens that are issued.
        issued: number of tokens.
        valid: the tokens that are accepted.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self.objects: dict[str, bytes] = {}
        self.versions: Counter[str] = Counter()
        self.refusals: list[Refusal] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lifetime_s = 3600
        self.issued = 0
        self.valid: set[str] = set()
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._http = self._stack.enter_context(_Http(("127.0.0.1", 0), _Handler))
        self._http.store = self
        if self._context is not None:
            self._http.socket = self._context.wrap_socket(self._http.socket, server_side=True)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self._stack.callback(self._http.shutdown)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def endpoint_url(self) -> str:
        return f"{'http' if self._context is None else 'https'}://{self.host}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._http.server_port}"

    def put(self, path: str, body: bytes) -> None:
        self.objects[path] = body
        self.versions[path] += 1

    def answer(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answered:
        with self._lock:
            self.requests.append((method, target, headers))
            refusal = self.refusals.pop(0) if self.refusals and self.is_object(target) else None
        return (refusal.status, refusal.headers, b"") if refusal else self.reply(method, target, headers, body)

    def issue(self) -> Answered:
        with self._lock:
            self.issued += 1
            token = f"token-{self.issued}"
            self.valid.add(token)
        times = {"expires_in": self.lifetime_s, "expires_on": str(int(time.time()) + self.lifetime_s)}
        answer = {"access_token": token, "token_type": "Bearer", "resource": "r", **times}
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def is_object(self, target: str) -> bool:
        return True

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answered:
        raise NotImplementedError


def ranged(body: bytes, wanted: str | None, headers: Mapping[str, str]) -> Answered:
    """Return a body, or the range of it that a header wants."""
    if wanted is None:
        return 200, headers, body
    found = _RANGE.fullmatch(wanted)
    assert found is not None, wanted
    first, last = int(found[1]), min(int(found[2]), len(body) - 1)
    if first > last:
        return 416, {"Content-Range": f"bytes */{len(body)}"}, b""
    return 206, {**headers, "Content-Range": f"bytes {first}-{last}/{len(body)}"}, body[first : last + 1]


class GoogleServer(ObjectServer):
    """The XML API for reads; the JSON API, for listing and upload, is an emulator's, where it is installed.

    Attributes:
        encodings: Content-Encodings that objects were stored with, by path.
        public: buckets that anyone may read.
        payers: projects that may be billed, by bucket where the requester pays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encodings: dict[str, str] = {}
        self.public: set[str] = set()
        self.payers: dict[str, str] = {}
        self._emulator: Any = None

    HAS_EMULATOR: ClassVar[bool] = find_spec("gcp_storage_emulator") is not None

    def __enter__(self) -> Self:
        super().__enter__()
        if self.HAS_EMULATOR:
            from gcp_storage_emulator.server import create_server

            self._emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
            self._emulator.start()
            self._stack.callback(self._emulator.stop)
        return self

    def service_account(self, folder: Path) -> str:
        """Write the file of a service account, whose tokens this server issues, and return its path."""
        key = rsa.generate_private_key(65537, 2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        account = {
            **{"type": "service_account", "project_id": "p", "client_email": "a@b", "client_id": "1"},
            **{"private_key": pem, "private_key_id": "k", "token_uri": f"{self.endpoint_url}/token"},
        }
        path = folder / "account.json"
        path.write_text(json.dumps(account))
        return str(path)

    def is_object(self, target: str) -> bool:
        return not target.startswith(("/token", "/storage/", "/upload/"))

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answered:
        if target == "/token":
            return self.issue()
        bucket = unquote(target).split("/")[1]
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.valid and (token or bucket not in self.public):
            return 401, {"WWW-Authenticate": "Bearer"}, b"<Error><Code>AuthenticationRequired</Code></Error>"
        if not self.is_object(target):
            return self._emulated(method, target, headers, body)
        if headers.get("x-goog-user-project") != self.payers.get(bucket):
            return 400, {}, b"<Error><Code>UserProjectMissing</Code></Error>"
        return self._object(unquote(target), headers)

    def _object(self, path: str, headers: Mapping[str, str]) -> Answered:
        if path not in self.objects and not self._uploaded(path):
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        body, generation = self.objects[path], str(1_700_000_000_000_000 + self.versions[path])
        if headers.get("x-goog-if-generation-match", generation) != generation:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        crc = base64.b64encode(crc32c(body, 0).to_bytes(4, "big")).decode()
        found = {
            "ETag": '"x"',
            "x-goog-generation": generation,
            "x-goog-hash": f"crc32c={crc},md5=AAAAAAAAAAAAAAAAAAAAAA==",
        }
        if encoding := self.encodings.get(path):
            if "gzip" not in headers.get("accept-encoding", ""):
                return 200, found, gzip.decompress(body)  # the range is ignored, as documented
            found["Content-Encoding"] = encoding
        return ranged(body, headers.get("range"), found)

    def _uploaded(self, path: str) -> bool:
        """Take an object over from the emulator, if it is there."""
        _, bucket, key = path.split("/", 2)
        status, _, data = self._emulated("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}", {}, b"")
        if status != 200:
            return False
        self.versions[path] = int(json.loads(data)["generation"]) - 1_700_000_000_000_000
        self.objects[path] = self._emulated("GET", f"/{bucket}/{quote(key)}", {}, b"")[2]
        return True

    def _emulated(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answered:
        if self._emulator is None:
            return 404, {}, b""
        host, port = self._emulator._api._httpd.server_address
        with closing(http.client.HTTPConnection(host, port)) as connection:
            connection.request(method, target, body, {k: v for k, v in headers.items() if k != "host"})
            answer = connection.getresponse()
            data = answer.read()
        place = {name: value for name, value in answer.getheaders() if name in ("Content-Type", "Location")}
        if "Location" in place:
            place["Location"] = self.endpoint_url + "/" + place["Location"].split("/", 3)[3]
        assert urlsplit(target).path
        return answer.status, place, data


class AzureServer(ObjectServer):
    """Blobs of one account, to those with a token of its managed identities, or the one signature that is known."""

    SAS = "sv=2023-11-03&ss=b&srt=o&sp=r&se=2099-01-01&sig=right"

    def is_object(self, target: str) -> bool:
        return not target.startswith("/identity")

    def identity_env(self) -> dict[str, str]:
        """Return the variables by which a managed identity's tokens are found."""
        return {"IDENTITY_ENDPOINT": f"{self.endpoint_url}/identity", "IDENTITY_HEADER": "h"}

    def reply(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Answered:
        if not self.is_object(target):
            return self.issue()
        path, _, query = target.partition("?")
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and (token not in self.valid or "x-ms-version" not in headers):
            return 401, {"x-ms-error-code": "InvalidAuthenticationInfo"}, b""
        if not token and query != self.SAS:
            return (403, {"x-ms-error-code": "AuthenticationFailed"}, b"") if query else (404, {}, b"")
        if (blob := self.objects.get(unquote(path))) is None:
            return 404, {"x-ms-error-code": "BlobNotFound"}, b""
        etag = f'"0x8D{self.versions[unquote(path)]:X}"'
        if headers.get("if-match", etag) != etag:
            return 412, {"x-ms-error-code": "ConditionNotMet"}, b""
        md5 = base64.b64encode(hashlib.md5(blob, usedforsecurity=False).digest()).decode()
        name = "x-ms-blob-content-md5" if "range" in headers else "Content-MD5"
        return ranged(blob, headers.get("range"), {"ETag": etag, name: md5})
