"""Validation of the daemon's messages: every field in use is present and has the type that the protocol defines."""

from __future__ import annotations

import json
from typing import Any

from shardcache.errors import ProtocolError

Json = dict[str, Any]

_TEXT, _COUNT = (str,), (int,)
_PLACE = {"lease": _COUNT, "url": _TEXT, "version": _TEXT, "path": _TEXT, "size_bytes": _COUNT}
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "welcome": {},
    "ok": {},
    "error": {"error": (dict,)},
    "manifest": {"shards": (list,)},
    "leased": {**_PLACE, "index_path": _TEXT},
    "arriving": {**_PLACE, "inode": _COUNT, "ready_bytes": _COUNT},
    "waiting": {"reason": _TEXT},
}
_GRANTS = ("leased", "arriving")
_ANSWERS = {
    "resolve": ("manifest",),
    "plan": ("ok",),
    "extend": ("ok",),
    "lease": _GRANTS,
    "more": _GRANTS,
    "explain": ("waiting",),
}
_ROW = ((str,), (str, type(None)), (int, type(None)), (int, type(None)))


def parse(data: bytes) -> Json:
    """Decode and check a message. Raises ProtocolError.

    For message types that this version does not know, only the `id` is checked.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as exn:
        raise ProtocolError(f"the daemon sent invalid JSON: {exn}") from exn
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("the daemon sent JSON that is not a message")
    _check(message, {"id": (int, type(None))}, optional=True)
    _check(message, _FIELDS.get(message["type"], {}))
    _check(
        message, {"done_bytes": _COUNT, "total_bytes": _COUNT, "remembered": _COUNT, "damaged": (list,)}, optional=True
    )
    if not all(isinstance(error, dict) for error in message.get("damaged", ())):
        raise ProtocolError("the daemon sent a damage notice that does not name an error")
    for row in message["shards"] if message["type"] == "manifest" else ():
        if not _is_shard(row):
            raise ProtocolError(f"the daemon sent a manifest with an invalid row: {str(row)[:100]}")
    return message


def expect(request: str, answer: Json) -> Json:
    """Return the answer, if it is of a type that this kind of request may get. Raises ProtocolError otherwise."""
    if answer["type"] != "error" and answer["type"] not in _ANSWERS[request]:
        raise ProtocolError(f"the daemon answered {request!r} with {answer['type'][:100]!r}")
    return answer


def _check(message: Json, fields: dict[str, tuple[type, ...]], *, optional: bool = False) -> None:
    for name, kinds in fields.items():
        if not (_is_a(message.get(name), kinds) or (optional and name not in message)):
            raise ProtocolError(f"the daemon sent {message['type'][:100]!r} with {name!r} missing or invalid")


def _is_a(value: object, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds and not (isinstance(value, int) and value < 0)


def _is_shard(row: object) -> bool:
    return isinstance(row, list) and len(row) == len(_ROW) and all(map(_is_a, row, _ROW))
