"""Strict servers of documented object stores: Google's XML API, Azure's blobs, the Hub."""

import asyncio
import base64
import gzip
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from shardcache.transport.between.checksums import crc32c
from support.network.http_requests import Request, answered
from support.stores.mischief import Answer, Ending, part_of
from support.stores.spoiling_server import ThreadedServer

Answered = tuple[int, Mapping[str, str], bytes]


class ObjectServer(ThreadedServer):
    """Serves what a store documents.

    Attributes:
        bodies: of the objects, by path, such as `/bucket/key`.
        refusals: answers to the next requests for objects, in place of the right ones.
        requests: method, path and headers of those so far.
        lifetime_s: of the tokens that are issued.
        issued: number of tokens.
        valid: the tokens that are accepted.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(context)
        self.bodies: dict[str, bytes] = {}
        self.versions: Counter[str] = Counter()
        self.refusals: list[Answered] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lifetime_s = 3600
        self.issued = 0
        self.valid: set[str] = set()
        self._lock = threading.Lock()
        self._needed = ExitStack()  # other servers that this one needs

    def __exit__(self, *exc: object) -> None:
        self._needed.close()
        super().__exit__(*exc)

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint_url).netloc

    def put(self, path: str, body: bytes) -> None:
        self.bodies[path] = body
        self.versions[path] += 1

    async def ask(self, request: Request) -> Answer:
        status, headers, body = await asyncio.to_thread(self._answered, request)
        sent = {"content-length": str(len(body))} | {
            name.lower(): value for name, value in headers.items()
        }
        is_cut = int(sent["content-length"]) > len(body)
        return Answer(status, sent, body, ending=Ending.CLOSE if is_cut else Ending.STAY)

    def _answered(self, request: Request) -> Answered:
        with self._lock:
            self.requests.append((request.method, request.target, request.headers))
            refusal = (
                self.refusals.pop(0) if self.refusals and self.is_object(request.target) else None
            )
        return refusal or self.reply(request)

    def issue(self) -> Answered:
        with self._lock:
            self.issued += 1
            token = f"token-{self.issued}"
            self.valid.add(token)
        times = {
            "expires_in": self.lifetime_s,
            "expires_on": str(int(time.time()) + self.lifetime_s),
        }
        answer = {"access_token": token, "token_type": "Bearer", "resource": "r", **times}
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def is_object(self, target: str) -> bool:
        return True

    def reply(self, request: Request) -> Answered:
        raise NotImplementedError


def ranged(body: bytes, request: Request, headers: Mapping[str, str]) -> Answered:
    """Return a body, or the range of it that a request wants."""
    assert request.part is not None or "range" not in request.headers, "a Range that cannot be read"
    answer, wanted = part_of(len(body), request.part, headers)
    return answer.status, answer.headers, body[wanted.start : wanted.stop]


class GoogleServer(ObjectServer):
    """The XML API for reads, and an emulator's JSON API for listing and upload.

    Attributes:
        encodings: Content-Encodings that objects were stored with, by path.
        public: buckets that anyone may read.
        payers: projects that may be billed, by bucket where the requester pays.
        buckets: the one bucket that the account of an address may read; other accounts may read
            all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encodings: dict[str, str] = {}
        self.public: set[str] = set()
        self.payers: dict[str, str] = {}
        self.buckets: dict[str, str] = {}
        self._addresses: dict[str, str] = {}  # of accounts, by token
        self._emulator: Any = None

    HAS_EMULATOR: ClassVar[bool] = find_spec("gcp_storage_emulator") is not None

    def __enter__(self) -> Self:
        super().__enter__()
        if self.HAS_EMULATOR:
            from gcp_storage_emulator.server import create_server

            self._emulator = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
            self._emulator.start()
            self._needed.callback(self._emulator.stop)
        return self

    def service_account(self, folder: Path, name: str = "a") -> str:
        """Write a service account's file for tokens of this server; return its path.

        Its address is the name, @, and b.
        """
        key = rsa.generate_private_key(65537, 2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        account = {
            **{
                "type": "service_account",
                "project_id": "p",
                "client_email": f"{name}@b",
                "client_id": "1",
            },
            **{
                "private_key": pem,
                "private_key_id": "k",
                "token_uri": f"{self.endpoint_url}/token",
            },
        }
        path = folder / f"account-{name}.json"
        path.write_text(json.dumps(account))
        return str(path)

    def is_object(self, target: str) -> bool:
        return not target.startswith(("/token", "/storage/", "/upload/"))

    def reply(self, request: Request) -> Answered:
        target = request.target
        if target == "/token":
            return self._issue_to(request.body)
        bucket = unquote(target).split("/")[4 if target.startswith("/storage/v1/b/") else 1]
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in self.valid and (token or bucket not in self.public):
            return (
                401,
                {"WWW-Authenticate": "Bearer"},
                b"<Error><Code>AuthenticationRequired</Code></Error>",
            )
        if self.buckets.get(self._addresses.get(token, ""), bucket) != bucket:
            return 403, {}, b"<Error><Code>AccessDenied</Code></Error>"
        if not self.is_object(target):
            return self._emulated(request.method, target, request.headers, request.body)
        if request.headers.get("x-goog-user-project") != self.payers.get(bucket):
            return 400, {}, b"<Error><Code>UserProjectMissing</Code></Error>"
        return self._object(unquote(target), request)

    def _issue_to(self, body: bytes) -> Answered:
        """Issue a token to the account that an assertion names."""
        answer = self.issue()
        (assertion,) = parse_qs(body.decode())["assertion"]
        claims = assertion.split(".")[1]
        address = json.loads(base64.urlsafe_b64decode(claims + "=="))["iss"]
        self._addresses[json.loads(answer[2])["access_token"]] = address
        return answer

    def _object(self, path: str, request: Request) -> Answered:
        if path not in self.bodies and not self._uploaded(path):
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        body = self.bodies[path]
        generation = str(1_700_000_000_000_000 + self.versions[path])
        if request.headers.get("x-goog-if-generation-match", generation) != generation:
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        crc = base64.b64encode(crc32c(body, 0).to_bytes(4, "big")).decode()
        found = {
            "ETag": '"x"',
            "x-goog-generation": generation,
            "x-goog-hash": f"crc32c={crc},md5=AAAAAAAAAAAAAAAAAAAAAA==",
        }
        if encoding := self.encodings.get(path):
            if "gzip" not in request.headers.get("accept-encoding", ""):
                return 200, found, gzip.decompress(body)  # the range is ignored, as documented
            found["Content-Encoding"] = encoding
        return ranged(body, request, found)

    def _uploaded(self, path: str) -> bool:
        """Take an object over from the emulator, if it is there."""
        _, bucket, key = path.split("/", 2)
        status, _, data = self._emulated(
            "GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}", {}, b""
        )
        if status != 200:
            return False
        self.versions[path] = int(json.loads(data)["generation"]) - 1_700_000_000_000_000
        self.bodies[path] = self._emulated("GET", f"/{bucket}/{quote(key)}", {}, b"")[2]
        return True

    def _emulated(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Answered:
        if self._emulator is None:
            return 404, {}, b""
        host, port = self._emulator._api._httpd.server_address
        passed_on = {name: value for name, value in headers.items() if name != "host"}
        answer = answered(HTTPConnection(host, port), target, passed_on, method, body)
        place = {
            name: value
            for name, value in answer.headers.items()
            if name in ("Content-Type", "Location")
        }
        if "Location" in place:
            place["Location"] = self.endpoint_url + "/" + place["Location"].split("/", 3)[3]
        return answer.status, place, answer.body


class AzureServer(ObjectServer):
    """Blobs of one account, for managed identity tokens of its own or known signatures.

    Attributes:
        signatures: those that may read all.
        containers: further ones, with the one container that each may read.
        keys: keys of the account, in Base64, whose signatures may read all.
    """

    SAS = "sv=2023-11-03&ss=b&srt=o&sp=r&se=2099-01-01&sig=right"

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        super().__init__(context)
        self.signatures = {self.SAS}
        self.containers: dict[str, str] = {}
        self.keys: set[str] = set()

    def is_object(self, target: str) -> bool:
        return not target.startswith("/identity")

    def reply(self, request: Request) -> Answered:
        if not self.is_object(request.target):
            return self.issue()
        headers = request.headers
        path, _, query = request.target.partition("?")
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and (token not in self.valid or "x-ms-version" not in headers):
            return 401, {"x-ms-error-code": "InvalidAuthenticationInfo"}, b""
        if not token and not self._is_permitted(path, query):
            return (
                (403, {"x-ms-error-code": "AuthenticationFailed"}, b"") if query else (404, {}, b"")
            )
        blob = self.bodies.get(unquote(path))
        if blob is None:
            return 404, {"x-ms-error-code": "BlobNotFound"}, b""
        etag = f'"0x8D{self.versions[unquote(path)]:X}"'
        if headers.get("if-match", etag) != etag:
            return 412, {"x-ms-error-code": "ConditionNotMet"}, b""
        md5 = base64.b64encode(hashlib.md5(blob, usedforsecurity=False).digest()).decode()
        name = "x-ms-blob-content-md5" if "range" in headers else "Content-MD5"
        return ranged(blob, request, {"ETag": etag, name: md5})

    def _is_permitted(self, path: str, query: str) -> bool:
        container = path.split("/")[1]
        if query in self.signatures or self.containers.get(query) == container:
            return True
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        signed = [
            fields.get(name, "")
            for name in ("sp", "ss", "srt", "st", "se", "sip", "spr", "sv", "ses")
        ]
        text = "\n".join(["account", *signed, ""])
        return any(fields.get("sig") == _signature(key, text) for key in self.keys)


def _signature(key: str, text: str) -> str:
    return base64.b64encode(hmac.digest(base64.b64decode(key), text.encode(), "sha256")).decode()


class HubServer(ObjectServer):
    """A Hub that redirects to a server of git LFS files by urls valid once signed.

    Attributes:
        content: server of the LFS files, by SHA-256.
        lfs: paths of files in LFS; others are in git.
        mixed: what other servers of a CDN send for files in git under the present ETag, by path;
            one body per GET.
        tags: ETags of files in LFS, by path, at a Hub that does not state their SHA-256.
        signed: number of signed urls; only the last one is valid.
        tokens: further tokens, with the folder of the one repository that each may read; `TOKEN`
            may read all.
        elsewhere: Location of all answers, in place of the right one.
        content_url: where the server of LFS files seems to be; set on entering.
    """

    TOKEN = "hf_token"

    def __init__(self) -> None:
        super().__init__()
        self.content = _Content()
        self.lfs: set[str] = set()
        self.mixed: dict[str, list[bytes]] = {}
        self.tags: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.elsewhere = self.content_url = ""

    def __enter__(self) -> Self:
        super().__enter__()
        self.content_url = self._needed.enter_context(self.content).endpoint_url
        return self

    def put_lfs(self, path: str, body: bytes) -> None:
        self.put(path, body)
        self.lfs.add(path)

    def reply(self, request: Request) -> Answered:
        target = request.target.removeprefix("http://hub.example")  # as a proxy is asked
        path = unquote(target)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token != self.TOKEN and token not in self.tokens:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if f"{self.tokens.get(token, '')}/" not in f"{path}/":
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if self.elsewhere:
            return (
                302,
                {
                    "Location": self.elsewhere,
                    "X-Linked-ETag": f'"{"0" * 64}"',
                    "X-Linked-Size": "1",
                },
                b"",
            )
        if path.startswith("/datasets/") and path in self.bodies and path not in self.lfs:
            return 307, {"Location": f"/api/resolve-cache{target}"}, b""
        if path.startswith(("/api/datasets/", "/api/models/")):
            return self._api(path.partition("?")[0])
        path = path.removeprefix("/api/resolve-cache")
        found = self.bodies.get(path)
        if found is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        if path not in self.lfs:
            others = self.mixed.get(path) if request.method == "GET" else None
            return ranged(
                others.pop(0) if others else found, request, {"ETag": f'"{git_sha(found)}"'}
            )
        sha = hashlib.sha256(found).hexdigest()
        tag = self.tags.get(path, sha)
        linked = {
            "X-Linked-ETag": f'"{tag}"',
            "X-Linked-Size": str(len(found)),
            "X-Repo-Commit": "c" * 40,
        }
        return 302, {"Location": self.content_url + self.content.sign(sha, found), **linked}, b""

    def _api(self, path: str) -> Answered:
        """Describe a repository at `main`, or list all of its files."""
        repository = ("/" + "/".join(path.split("/")[2:5])).removeprefix("/models")
        root = f"{repository}/resolve/main/"
        files = [
            self._entry(name.removeprefix(root), name)
            for name in self.bodies
            if name.startswith(root)
        ]
        info = {
            "id": repository.removeprefix("/datasets").lstrip("/"),
            "_id": "1",
            "sha": "c" * 40,
            "siblings": [],
            "tags": [],
        }
        found = files if "/tree/" in path else info
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()

    def _entry(self, name: str, path: str) -> dict[str, Any]:
        body = self.bodies[path]
        entry = {"type": "file", "path": name, "size": len(body), "oid": git_sha(body)}
        lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        return entry | ({"lfs": lfs} if path in self.lfs else {})


def git_sha(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


class _Content(ObjectServer):
    """Server of files in LFS.

    Attributes:
        cuts: number of the next bodies that break off in the middle.
        mixed: what its mirrors send under the same url: one body per GET, then the right one.
    """

    def __init__(self) -> None:
        super().__init__()
        # the latest of the signed ones
        self.signed = 0
        self.valid_urls = 1
        self.cuts = 0
        self.mixed: list[bytes] = []

    def sign(self, sha: str, body: bytes) -> str:
        self.bodies[f"/lfs/{sha}"] = body
        self.signed += 1
        return f"/lfs/{sha}?X-Amz-Expires=3600&X-Amz-Signature={self.signed}"

    def reply(self, request: Request) -> Answered:
        path, _, query = request.target.partition("?")
        number = int(query.rpartition("=")[2] or 0)
        if (
            "authorization" in request.headers
            or number not in range(self.signed + 1)[-self.valid_urls :]
        ):
            return 403, {}, b"<Error><Message>Request has expired</Message></Error>"
        found = self.mixed.pop(0) if self.mixed else self.bodies[path]
        status, headers_sent, data = ranged(found, request, {"ETag": '"of the content"'})
        if not self.cuts:
            return status, headers_sent, data
        self.cuts -= 1
        return status, {**headers_sent, "Content-Length": str(len(data))}, data[: len(data) // 2]
