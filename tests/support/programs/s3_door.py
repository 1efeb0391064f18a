"""botocore clients of a daemon's S3 endpoint, with the keys that the daemon gave."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from support.network.http_requests import Answer, answered
from support.programs.daemon import Daemon
from support.programs.guard import GUARD_S
from support.stores.s3_client import s3_client

DOOR = ("--s3", "127.0.0.1:0")
"""Options of a daemon with an endpoint at any free port."""


def keys_of(daemon: Daemon) -> dict[str, Any]:
    """Return new keys of this process's user, as `shardcache credentials` prints them."""
    keys: dict[str, Any] = json.loads(daemon.request("POST", "/v1/credentials"))
    return keys


def address_of(daemon: Daemon) -> str:
    """Return HOST:PORT of a daemon's endpoint."""
    return str(daemon.status()["s3"])


def connect(daemon: Daemon, keys: dict[str, Any] | None = None, **config: Any) -> Any:
    """Return a client of a daemon's endpoint, which repeats nothing."""
    keys = keys or keys_of(daemon)
    secrets = keys["AccessKeyId"], keys["SecretAccessKey"], keys.get("SessionToken")
    chosen = Config(
        signature_version="s3v4", retries={"total_max_attempts": 1}, read_timeout=GUARD_S, **config
    )
    endpoint = f"http://{address_of(daemon)}"
    return s3_client(endpoint, *secrets, region="eu-central-1", config=chosen)


def refusal(call: Any, **params: Any) -> tuple[int, str]:
    """Make a call that is refused; return the status and S3's code."""
    try:
        call(**params)
    except ClientError as exn:
        return exn.response["ResponseMetadata"]["HTTPStatusCode"], exn.response["Error"]["Code"]
    raise AssertionError("the call was not refused")


def signed(
    daemon: Daemon,
    path: str,
    keys: dict[str, Any],
    *,
    method: str = "GET",
    host: str | None = None,
    presigned_s: int | None = None,
    **headers: str,
) -> tuple[str, dict[str, str]]:
    """Return the target and the headers of a request as botocore signs it.

    Args:
        host: to be sent in place of the endpoint's address.
        presigned_s: how long a presigned url is valid; None to sign the headers.
    """
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    address = host or address_of(daemon)
    request = AWSRequest(method, f"http://{address}{path}", headers=named)
    credentials = Credentials(keys["AccessKeyId"], keys["SecretAccessKey"])
    if presigned_s is None:
        S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
    else:
        S3SigV4QueryAuth(credentials, "s3", "us-east-1", expires=presigned_s).add_auth(request)
    return request.url.removeprefix(f"http://{address}"), {**request.headers, "Host": address}


def ask(daemon: Daemon, target: str, headers: dict[str, str], method: str = "GET") -> Answer:
    """Send one request with these headers, and return its answer."""
    return answered(HTTPConnection(address_of(daemon), timeout=GUARD_S), target, headers, method)


def request_of(target: str, headers: dict[str, str]) -> bytes:
    """Return a GET request as it is sent."""
    lines = [
        f"GET {target} HTTP/1.1",
        *(f"{name}: {text}" for name, text in headers.items()),
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


@contextmanager
def connection(daemon: Daemon) -> Iterator[socket.socket]:
    """A connection to the endpoint with little room for bytes that its client does not read."""
    host, _, port = address_of(daemon).rpartition(":")
    with socket.socket() as client:
        client.settimeout(GUARD_S)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.connect((host, int(port)))
        yield client
