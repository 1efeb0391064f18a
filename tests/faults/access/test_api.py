"""The admin API answers in its shapes, whatever it is sent.

Answers may gain fields: a shape lists those that are always present. Unknown fields of a request
are ignored.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from shardcache.server.api import routes
from support.programs.daemon import Daemon
from support.shards.tars import write_shards

Shape = Any
"""A type or types of a value; `[shape]` of each item of a list; fields by name of an object."""

NONE = type(None)
NUMBER = (int, float)
ERROR = {"code": str, "message": str, "url": (str, NONE), "remedy": str, "parents": [str]}
FAILURE = {"error": ERROR}
DISK = {
    "state": str,
    "error": (dict, NONE),
    "since_s": NUMBER,
    "short_bytes": int,
    "silent_s": NUMBER,
}
EVENT = {"event": str}
KEPT = [{"url": str, "reason": str}]
SHARD = {
    "url": str,
    "version": str,
    "size_bytes": int,
    "cached_bytes": int,
    "samples": int,
    "leases": int,
    "pinned": bool,
}
STATUS = {
    "version": str,
    "uptime_s": NUMBER,
    "pid": int,
    "draining": bool,
    "process": dict,
    "loop_lag": dict,
    "disk": DISK,
    "scrub": {
        **dict.fromkeys(("rate_bytes_per_s", "scrubbed_bytes", "scrubbed_shards", "corrupt"), int),
        **dict.fromkeys(
            ("round_share", "round_begun_at_s", "last_round_ended_at_s"), (*NUMBER, NONE)
        ),
    },
    "pins": dict.fromkeys(("shards", "missing", "size_bytes", "limit_bytes"), int),
    "cache": {
        **dict.fromkeys(
            (
                "capacity_bytes",
                "used_bytes",
                "leased_bytes",
                "reserved_bytes",
                "parts_bytes",
                "shards",
            ),
            int,
        ),
        **{"dir": str, "free_bytes": (int, NONE)},
    },
    "counters": dict,
    "limits": [{"name": str, "text": str, "holds": bool}],
    "origins": [{"name": str, "connections": int, "limit": int, "throttled": int}],
    "tiers": [
        {
            **dict.fromkeys(("owners_left_out", "store_bytes", "cached_bytes"), int),
            **{
                "address": str,
                "certificate_expires_s": (*NUMBER, NONE),
                "failing": bool,
                "stale": bool,
            },
        }
    ],
    "transfers": [
        {
            **dict.fromkeys(("done_bytes", "rate_bytes_per_s", "waiters"), int),
            **dict.fromkeys(("total_bytes", "needed_in_s", "last_error"), (*NUMBER, str, NONE)),
            **{"url": str, "class": str, "stage": str},
        }
    ],
    "jobs": [
        {
            **dict.fromkeys(("uid", "sessions", "shards_planned", "shards_done", "waiting"), int),
            **dict.fromkeys(
                ("waited_s", "waiting_s", "waiting_share", "shards_per_s", "ahead_s"),
                (*NUMBER, NONE),
            ),
            **{"name": str, "user": str, "waited": dict, "waiting_for": (str, NONE)},
        }
    ],
}


class Operation(NamedTuple):
    """Shape of its answer or each of its lines, and a body's required and allowed fields."""

    answer: Shape
    is_stream: bool = False
    needs: str = ""
    may_have: str = ""


OPERATIONS = {
    ("GET", "/v1/health"): Operation({"status": str, "disk": DISK}),
    ("GET", "/v1/status"): Operation(STATUS),
    ("GET", "/v1/shards"): Operation({**SHARD, "used_at_s": NUMBER}, is_stream=True),
    ("GET", "/v1/pins"): Operation(
        {"url": str, "size_bytes": int, "cached": bool, "uids": [int]}, is_stream=True
    ),
    ("POST", "/v1/warm"): Operation(EVENT, is_stream=True, needs="urls"),
    ("POST", "/v1/index"): Operation(EVENT, is_stream=True, needs="urls", may_have="tokens"),
    ("POST", "/v1/pin"): Operation(EVENT, is_stream=True, needs="urls"),
    ("POST", "/v1/unpin"): Operation({"unpinned": [str], "kept": KEPT}, needs="urls"),
    ("POST", "/v1/evict"): Operation(
        {"evicted": [str], "kept": KEPT, "freed_bytes": int}, needs="urls"
    ),
    ("POST", "/v1/verify"): Operation(EVENT, is_stream=True, needs="prefix"),
}

_ERRORS = {400, 403, 404, 502, 503, 507}
_TAILS = ("/", ".tar", ".json", "/*.tar", "/{0..3}.tar", "/{a,b}.tar.gz", "/**", "/[ab].tar")
_NONSENSE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    2**70,
    {},
    {"urls": []},
    [None],
    [[]],
    [1],
    ["\ud800"],
)


def check(value: Any, shape: Shape, where: str = "answer") -> None:
    """Raise AssertionError unless a value has a shape."""
    match shape:
        case dict():
            assert isinstance(value, dict), f"{where}: {value!r:.500}"
            assert shape.keys() <= value.keys(), f"{where}: {value!r:.500}"
            for name, inner in shape.items():
                check(value[name], inner, f"{where}.{name}")
        case [inner]:
            assert isinstance(value, list), f"{where}: {value!r:.500}"
            for each in value:
                check(each, inner, f"{where}[]")
        case _:
            assert isinstance(value, shape), f"{where}: {value!r:.500}"


def ask(daemon: Daemon, key: tuple[str, str], body: object = None) -> int:
    """Send a request; return the answer's status. Raises AssertionError for a wrong shape."""
    method, path = key
    status, text = daemon.answer(method, path, None if body is None else json.dumps(body).encode())
    operation = OPERATIONS[key]
    values = [json.loads(line) for line in text.splitlines()]
    assert status != 200 or operation.is_stream or len(values) == 1
    for value in values:
        check(value, operation.answer if status == 200 else FAILURE)
        if operation.answer is EVENT and "error" in value:
            check(value, FAILURE)
    return status


def examine(daemon: Daemon, key: tuple[str, str], examples: int) -> Iterator[int]:
    """Call an operation with bodies that fit it, then with others; yield each answer's status.

    Raises AssertionError for an answer of another shape, an internal error, or a body that is
    refused or taken wrongly.
    """
    operation = OPERATIONS[key]
    rng = random.Random(f"{key}")
    if not operation.needs:
        yield ask(daemon, key)
        return
    for _ in range(examples):
        status = ask(daemon, key, _sound(operation, rng))
        assert status == 200 or status in _ERRORS - {400}, status
        yield status
        body = _unsound(operation, rng)
        status = ask(daemon, key, body)
        assert status == 400, f"{body}: {status}"
        yield status


def _sound(operation: Operation, rng: random.Random) -> dict[str, Any]:
    urls = [
        f"file:///{rng.choice('ab0')}/{rng.choice('z9_')}{rng.choice(_TAILS)}"
        for _ in range(rng.randrange(3))
    ]
    body: dict[str, Any] = (
        {"urls": urls} if operation.needs == "urls" else {"prefix": rng.choice(["", "s3://", "/a"])}
    )
    if operation.may_have and rng.random() < 0.5:
        body[operation.may_have] = rng.choice(["npy", "bin:uint16", "a.b:int32"])
    return body | rng.choice([{}, {"later": 1}])


def _unsound(operation: Operation, rng: random.Random) -> object:
    match rng.randrange(4):
        case 0:
            return rng.choice([[], "urls", 1, True])
        case 1:
            return {}
        case 2 if operation.may_have:
            return {**_sound(operation, rng), operation.may_have: rng.choice([1, [], {}, True])}
    return {
        **_sound(operation, rng),
        operation.needs: rng.choice([*_NONSENSE, 7 if operation.needs == "urls" else []]),
    }


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with a shard or two, that may fetch nothing from elsewhere."""
    root = tmp_path_factory.mktemp("d")
    urls = [f"file://{path}" for path in write_shards(root, 2, 3)]
    with Daemon(root, "--allow", f"file://{root}/") as running:
        running.request("POST", "/v1/warm", {"urls": urls})
        yield running


def test_every_route_is_described_and_nothing_else() -> None:
    """A route without a description, or a description without a route, would be noticed here."""
    assert set(OPERATIONS) == {(route.method, route.path) for route in routes}  # type: ignore[attr-defined]


@pytest.mark.parametrize("key", OPERATIONS, ids=" ".join)
def test_every_operation_keeps_to_its_description(daemon: Daemon, key: tuple[str, str]) -> None:
    """Sound data are taken, unsound data refused; statuses and bodies are the described ones."""
    statuses = list(examine(daemon, key, 8))
    assert 200 in statuses or 403 in statuses, "it was never really called"
    assert "Traceback" not in daemon.log.read_text()


def test_answers_about_real_shards_fit_the_description(daemon: Daemon) -> None:
    """Every event of a fetch, a count, a check and a removal; what random urls never come to."""
    cached = [shard["url"] for shard in daemon.shards()]
    urls = {"urls": [*cached, cached[0].replace("000000", "999999")]}
    for path in ("/v1/index", "/v1/pin", "/v1/unpin", "/v1/evict", "/v1/warm"):
        assert ask(daemon, ("POST", path), urls) == 200, path
    assert ask(daemon, ("POST", "/v1/verify"), {"prefix": ""}) == 200
    assert len(daemon.request("GET", f"/v1/shards?prefix={cached[0]}").splitlines()) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/warm", None, 405),
        ("DELETE", "/v1/shards", None, 405),
        ("POST", "/v1/evict", b"{", 400),
        ("POST", "/v1/evict", b"\xff\xfe", 400),
        ("POST", "/v1/evict", b"[" * 100_000, 400),
        ("POST", "/v1/verify", b'{"prefix": "\\ud800"}', 400),
        ("POST", "/v1/warm", b'{"urls": []}', 404),
        ("POST", "/v1/warm", b" " * (1 << 21), 413),
    ],
)
def test_http_errors_have_the_form_of_all_errors(
    daemon: Daemon, method: str, path: str, body: bytes | None, status: int
) -> None:
    """No page of HTML, no bare text: tools read one form of error."""
    found, text = daemon.answer(method, path, body)
    assert found == status
    check(json.loads(text), FAILURE)


def test_head_changes_nothing_and_is_not_in_the_audit_log(daemon: Daemon) -> None:
    """Probes send it; a request that changes something is in the log."""
    assert daemon.answer("HEAD", "/v1/health") == (200, b"")
    daemon.request("POST", "/v1/unpin", {"urls": []})
    lines = daemon.log.read_text()
    assert "what=unpin" in lines
    assert "what=health" not in lines
