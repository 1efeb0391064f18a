"""The admin API as the shapes of its answers, and requests that do or do not fit it.

Answers may gain fields: a shape lists those that are always present. Unknown fields of a request are ignored.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from support.programs.daemon import Daemon

Shape = Any
"""A type or types of a value; `[shape]` of each item of a list; fields by name of an object."""

NONE = type(None)
NUMBER = (int, float)
ERROR = {"code": str, "message": str, "url": (str, NONE), "remedy": str, "parents": [str]}
FAILURE = {"error": ERROR}
DISK = {"state": str, "error": (dict, NONE), "since_s": NUMBER, "short_bytes": int, "silent_s": NUMBER}
EVENT = {"event": str}
KEPT = [{"url": str, "reason": str}]
SHARD = {"url": str, "version": str, "size_bytes": int, "samples": int, "leases": int, "pinned": bool}
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
        **dict.fromkeys(("round_share", "round_begun_at_s", "last_round_ended_at_s"), (*NUMBER, NONE)),
    },
    "pins": dict.fromkeys(("shards", "missing", "size_bytes", "limit_bytes"), int),
    "cache": {
        **dict.fromkeys(("capacity_bytes", "used_bytes", "leased_bytes", "reserved_bytes", "shards"), int),
        **{"dir": str, "free_bytes": (int, NONE)},
    },
    "counters": dict,
    "origins": [{"name": str, "connections": int, "limit": int, "throttled": int}],
    "tiers": [{"address": str, "certificate_expires_s": (*NUMBER, NONE), "failing": bool, "stale": bool}],
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
            **dict.fromkeys(("waited_s", "shards_per_s", "ahead_s"), (*NUMBER, NONE)),
            **{"name": str, "user": str, "waited": dict, "waiting_for": (str, NONE)},
        }
    ],
}


class Operation(NamedTuple):
    """Shape of its answer, or of each line of it; and, of a body, the fields that it needs and may have."""

    answer: Shape
    is_stream: bool = False
    needs: str = ""
    may_have: str = ""


OPERATIONS = {
    ("GET", "/v1/health"): Operation({"status": str, "disk": DISK}),
    ("GET", "/v1/status"): Operation(STATUS),
    ("GET", "/v1/shards"): Operation({**SHARD, "used_at_s": NUMBER}, is_stream=True),
    ("GET", "/v1/pins"): Operation({"url": str, "size_bytes": int, "cached": bool, "uids": [int]}, is_stream=True),
    ("POST", "/v1/warm"): Operation(EVENT, is_stream=True, needs="urls"),
    ("POST", "/v1/index"): Operation(EVENT, is_stream=True, needs="urls", may_have="tokens"),
    ("POST", "/v1/pin"): Operation(EVENT, is_stream=True, needs="urls"),
    ("POST", "/v1/unpin"): Operation({"unpinned": [str], "kept": KEPT}, needs="urls"),
    ("POST", "/v1/evict"): Operation({"evicted": [str], "kept": KEPT, "freed_bytes": int}, needs="urls"),
    ("POST", "/v1/verify"): Operation(EVENT, is_stream=True, needs="prefix"),
}

_ERRORS = {400, 403, 404, 502, 503, 507}
_TAILS = ("/", ".tar", ".json", "/*.tar", "/{0..3}.tar", "/{a,b}.tar.gz", "/**", "/[ab].tar")
_NONSENSE: tuple[Any, ...] = (None, True, 0, -1, 1.5, 2**70, {}, {"urls": []}, [None], [[]], [1], ["\ud800"])


def check(value: Any, shape: Shape, where: str = "answer") -> None:
    """Raise AssertionError unless a value has a shape."""
    match shape:
        case dict():
            assert isinstance(value, dict) and shape.keys() <= value.keys(), f"{where}: {value!r:.500}"
            for name, inner in shape.items():
                check(value[name], inner, f"{where}.{name}")
        case [inner]:
            assert isinstance(value, list), f"{where}: {value!r:.500}"
            for each in value:
                check(each, inner, f"{where}[]")
        case _:
            assert isinstance(value, shape), f"{where}: {value!r:.500}"


def ask(daemon: Daemon, key: tuple[str, str], body: object = None) -> int:
    """Send a request and return the answer's status. Raises AssertionError if the answer has another shape."""
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

    Raises AssertionError for an answer of another shape, an internal error, or a body that is refused or taken wrongly.
    """
    operation, rng = OPERATIONS[key], random.Random(f"{key}")
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
    urls = [f"file:///{rng.choice('ab0')}/{rng.choice('z9_')}{rng.choice(_TAILS)}" for _ in range(rng.randrange(3))]
    body: dict[str, Any] = {"urls": urls} if operation.needs == "urls" else {"prefix": rng.choice(["", "s3://", "/a"])}
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
    return {**_sound(operation, rng), operation.needs: rng.choice([*_NONSENSE, 7 if operation.needs == "urls" else []])}
