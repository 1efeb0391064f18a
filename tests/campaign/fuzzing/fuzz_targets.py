"""Functions that take any bytes, and changes of inputs that get past checksums and JSON."""

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from campaign.fuzzing import fuzz_files, fuzz_sessions
from shardcache.shared.protocol import ANSWERS, REQUESTS
from shardcache.shared.tarindex.members import BLOCK_BYTES
from shardcache.shared.tarindex.tables import _CRC, _PROLOGUE  # what the file itself consists of

Mutate = Callable[[bytes, int], bytes]
"""`mutate(data, max_bytes)` changes some bytes somewhere; libFuzzer's own."""

_USTAR = slice(257, 262)
_SUM = slice(148, 156)


def tar(data: bytes, max_bytes: int, seed: int, mutate: Mutate) -> bytes:
    """Change a tar; three times in four, what still looks like a header gets a right checksum."""
    changed = bytearray(mutate(data, max_bytes))
    if seed % 4:
        for at in range(0, len(changed) - BLOCK_BYTES + 1, BLOCK_BYTES):
            if changed[at : at + BLOCK_BYTES][_USTAR] == b"ustar":
                _sum(changed, at)
    return bytes(changed)


def _sum(tar: bytearray, at: int) -> None:
    block = tar[at : at + BLOCK_BYTES]
    block[_SUM] = b" " * 8
    tar[at + _SUM.start : at + _SUM.stop] = b"%06o\0 " % sum(block)


def sidecar(data: bytes, max_bytes: int, seed: int, mutate: Mutate) -> bytes:
    """Change a sidecar; three times in four, counts and both checksums are made to fit again."""
    changed = bytearray(mutate(data, max_bytes))
    if seed % 4 == 0 or len(changed) < _PROLOGUE.size:
        return bytes(changed)
    magic, *counts, _ = _PROLOGUE.unpack_from(changed)
    header_end = _PROLOGUE.size + min(counts[0], len(changed))
    tables = changed[header_end + _CRC.size :]
    if seed % 4 == 1:  # as many key bytes as there is room for
        samples, members, names, faults = counts[1:5]
        rest = (
            len(tables)
            - 8 * (2 * members + 2 * samples + names + 3 * faults)
            - 4 * members
            - counts[6]
        )
        counts[5] = max(rest, 0) % 2**64
    _PROLOGUE.pack_into(changed, 0, magic, *counts, zlib.crc32(tables))
    if len(changed) >= header_end + _CRC.size:
        _CRC.pack_into(changed, header_end, zlib.crc32(changed[:header_end]))
    return bytes(changed)


_NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 0.5, float("nan"), float("inf"),
    2**31, 2**63 - 1, 2**63, 2**64, 10**4000,
    "", "a", "\0", "\ud800", "\U0001f4a9", "../../etc", "{1..3}", "x" * 5000,
    [], {}, [[]], [None], {"type": "error"},
    ["file:///nowhere.tar", None, None, None], [0, 1, 2], *REQUESTS, *ANSWERS,
)  # fmt: skip


def lines(data: bytes, max_bytes: int, seed: int, mutate: Mutate) -> bytes:
    """Change messages, a line each: order, number, fields, or, one time in four, bytes."""
    rng = random.Random(seed)
    if rng.random() < 0.25:
        return bytes(mutate(data, max_bytes))
    rows = data.split(b"\n")
    at = rng.randrange(len(rows))
    match rng.randrange(6):
        case 0:
            rows.insert(rng.randrange(len(rows) + 1), rows[at])
        case 3:
            rows.insert(rng.randrange(len(rows) + 1), _sound(rng))
        case 1:
            rows.pop(at)
        case 2:
            other = rng.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
        case _:
            rows[at] = _changed(rows[at], rng)
    return b"\n".join(rows)[:max_bytes]


def _sound(rng: random.Random) -> bytes:
    kind, found = rng.choice([*REQUESTS.items(), *ANSWERS.items()])
    fields = {
        **found.fields,
        **{name: each for name, each in found.optional.items() if rng.random() < 0.5},
    }
    values: dict[Any, Any] = {str: "a", bool: True, list: [], dict: {}}
    message = {
        name: values.get(get_origin(each) or each, rng.randrange(8))
        for name, each in fields.items()
    }
    return json.dumps(message | {"type": kind}).encode()


def _changed(row: bytes, rng: random.Random) -> bytes:
    """Put something nasty, or another field's value, at some place in a message."""
    try:
        message = json.loads(row)
    except (ValueError, RecursionError):
        return row
    place, key = _place(message, rng)
    if place is None:
        return json.dumps(rng.choice(_NASTY)).encode()
    match rng.randrange(4):
        case 0 if isinstance(place, dict):
            del place[key]
        case 1:
            place[key] = rng.randrange(8)
        case _:
            place[key] = rng.choice(_NASTY)
    return json.dumps(message).encode()


def _place(value: Any, rng: random.Random) -> tuple[Any, Any]:
    found: tuple[Any, Any] = (None, None)
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        found = value, rng.choice(keys)
        value = value[found[1]]
        if rng.random() < 0.5:
            break
    return found


FOLDER = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Target:
    """A function that takes any bytes and raises only when a promise is broken.

    Attributes:
        mutate: how inputs are changed, where libFuzzer's own way would seldom get past a checksum.
    """

    check: Callable[[bytes], None]  # the function
    what: str  # was done, in a few words
    mutate: Callable[[bytes, int, int, Mutate], bytes] | None = None


TARGETS = {
    "tar": Target(fuzz_files.whole, "any bytes as a tar", tar),
    "arriving": Target(fuzz_files.arriving, "any bytes as a tar that arrives", tar),
    "sidecar": Target(fuzz_files.sidecar, "any bytes as a sidecar", sidecar),
    "message": Target(fuzz_sessions.message, "any bytes as a reader's message", lines),
    "session": Target(fuzz_sessions.session, "any messages to a daemon", lines),
    "answers": Target(fuzz_sessions.answers, "any answers to a reader", lines),
}


def kept(kind: str, name: str) -> list[Path]:
    """Return a target's inputs that are kept: its `corpus`, or what was `found` with it."""
    return sorted((FOLDER / kind / name).glob("*"))
