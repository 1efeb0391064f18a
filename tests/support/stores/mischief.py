"""Faults of a store's answer, as changes of a right one. Pure."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

_LENGTH, _RANGE = "content-length", "content-range"
_CHECKSUMS = ("x-amz-checksum-crc32", "x-goog-hash", "content-md5")
_CHUNK_BYTES = 10_000


class Mischief(enum.StrEnum):
    STALL = "half of the body, then nothing"
    SILENCE = "no answer at all"
    LATE = "a first byte that takes seconds"
    DRIP = "a body byte by byte"
    RESET = "half of the body, then a reset"
    RESET_AT_ONCE = "a reset in place of an answer"
    TRUNCATE = "half of the body, then a close in good order"
    HALF_HEAD = "half of the head, then a close in good order"
    LENGTH_LESS = "a Content-Length less than the body"
    LENGTH_MORE = "a Content-Length more than the body"
    LENGTH_ODD = "a Content-Length that is no number"
    LENGTH_NONE = "no Content-Length, and half of the body"
    RANGE_SHIFTED = "a Content-Range of other bytes"
    RANGE_TOTAL = "a Content-Range with another total"
    RANGE_NONE = "206 without a Content-Range"
    RANGE_SHORT = "half of the range, with headers that say so"
    INTERNAL_ERROR = "500 InternalError"
    SLOW_DOWN = "503 SlowDown"
    TOO_MANY = "429 TooManyRequests"
    FORBIDDEN = "403 AccessDenied"
    EXPIRED = "400 ExpiredToken"
    NOT_FOUND = "404 NoSuchKey"
    TIMEOUT = "408 RequestTimeout"
    CHANGED = "412 PreconditionFailed"
    NO_SUCH_RANGE = "416 InvalidRange"
    WHOLE = "200 and the whole object in place of a range"
    ERROR_AS_200 = "an XML error with status 200"
    ERROR_AS_206 = "an XML error with status 206"
    EMPTY = "206 and an empty body"
    GARBAGE = "bytes that are no HTTP"
    ENDLESS_HEAD = "headers without an end"
    CHUNKED = "a body in chunks, without a Content-Length"
    ENCODED = "a Content-Encoding that the object was stored with"
    FLIP = "a bit flipped"
    ETAG_OTHER = "another ETag"
    ETAG_NONE = "no ETag"
    OTHER_BYTES = "another object's bytes under the right headers"
    OTHER_OBJECT = "another object's bytes under its own headers"
    HEAD_LESS = "a HEAD with a size less than it is"
    HEAD_MORE = "a HEAD with a size more than it is"
    HEAD_NO_ETAG = "a HEAD without an ETag"
    HEAD_ETAG = "a HEAD with another ETag"
    HEAD_NO_LENGTH = "a HEAD without a size"
    HEAD_ODD_LENGTH = "a HEAD with a size that is no number"
    HEAD_ODD_DATE = "a HEAD with a date that is none"
    HEAD_ODD_CHECKSUM = "a HEAD with a checksum that is none"
    HEAD_SILENCE = "no answer to HEAD"
    HEAD_RESET = "a reset in place of an answer to HEAD"
    HEAD_GARBAGE = "an answer to HEAD that is no HTTP"
    HEAD_INTERNAL_ERROR = "500 to HEAD"
    HEAD_NOT_FOUND = "404 to HEAD"

    @property
    def method(self) -> str:
        return "HEAD" if self.name.startswith("HEAD_") else "GET"


class Ending(enum.Enum):
    """End of a connection after the last byte of an answer."""

    STAY = enum.auto()
    CLOSE = enum.auto()
    RESET = enum.auto()
    HANG = enum.auto()


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes
    raw: bytes | None = None  # sent in place of head and body, unless None
    sent: int | None = None  # bytes of the body that are sent, all by default
    head_sent: int | None = None  # bytes of the head that are sent, all by default
    late: bool = False  # whether the first byte takes long
    drips: bool = False  # whether the body comes byte by byte
    ending: Ending = Ending.STAY

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {self.status}", *(f"{name}: {value}" for name, value in self.headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")[: self.head_sent]


@dataclass(frozen=True, slots=True)
class Scene:
    start: int  # of the range that was asked for
    other: bytes  # the bytes of another object, as many as this one has at least
    whole: bytes  # the bytes of the object itself; empty where they are not known
    version: str  # header of the version


Spoiler = Callable[[Answer, Scene], None]

_REFUSALS = {
    Mischief.INTERNAL_ERROR: (500, "InternalError"),
    Mischief.SLOW_DOWN: (503, "SlowDown"),
    Mischief.TOO_MANY: (429, "TooManyRequests"),
    Mischief.FORBIDDEN: (403, "AccessDenied"),
    Mischief.EXPIRED: (400, "ExpiredToken"),
    Mischief.NOT_FOUND: (404, "NoSuchKey"),
    Mischief.TIMEOUT: (408, "RequestTimeout"),
    Mischief.CHANGED: (412, "PreconditionFailed"),
    Mischief.NO_SUCH_RANGE: (416, "InvalidRange"),
    Mischief.ERROR_AS_200: (200, "InternalError"),
    Mischief.ERROR_AS_206: (206, "InternalError"),
    Mischief.HEAD_INTERNAL_ERROR: (500, ""),
    Mischief.HEAD_NOT_FOUND: (404, ""),
}


def spoil(mischief: Mischief, answer: Answer, scene: Scene) -> None:
    if mischief in _REFUSALS:
        refuse(answer, *_REFUSALS[mischief])
    else:
        _SPOILERS[mischief](answer, scene)


def refuse(answer: Answer, status: int, code: str) -> None:
    """Turn an answer into a refusal with S3's code, without a body where that is empty."""
    answer.status = status
    answer.body = f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode() if code else b""
    answer.headers = {"content-type": "application/xml", _LENGTH: str(len(answer.body))}


def _cut(ending: Ending, answer: Answer, _scene: Scene) -> None:
    answer.sent, answer.ending = len(answer.body) // 2, ending


def _set(answer: Answer, _scene: Scene, **values: object) -> None:
    for name, value in values.items():
        setattr(answer, name, value)


def _half_head(answer: Answer, _scene: Scene) -> None:
    answer.body, answer.ending = b"", Ending.CLOSE
    answer.head_sent = len(answer.head()) // 2


def _length(factor: float, answer: Answer, _scene: Scene) -> None:
    answer.headers[_LENGTH] = str(int(int(answer.headers[_LENGTH]) * factor))
    answer.ending = Ending.CLOSE


def _no_length(answer: Answer, scene: Scene) -> None:
    del answer.headers[_LENGTH]
    _cut(Ending.CLOSE, answer, scene)


def _range(shift: int, total: int, answer: Answer, scene: Scene) -> None:
    size = int(answer.headers[_RANGE].rpartition("/")[2])
    first = scene.start + shift
    answer.headers[_RANGE] = f"bytes {first}-{first + len(answer.body) - 1}/{size + total}"


def _short_range(answer: Answer, scene: Scene) -> None:
    size = answer.headers[_RANGE].rpartition("/")[2]
    answer.body = answer.body[: len(answer.body) // 2]
    answer.headers[_RANGE] = f"bytes {scene.start}-{scene.start + len(answer.body) - 1}/{size}"
    answer.headers[_LENGTH] = str(len(answer.body))


def _without(name: str, answer: Answer, _scene: Scene) -> None:
    answer.headers.pop(name, None)


def _with(name: str, value: str, answer: Answer, _scene: Scene) -> None:
    answer.headers[name] = value


def _odd_checksums(answer: Answer, _scene: Scene) -> None:
    answer.headers |= {name: "crc32c=none" if "hash" in name else "none" for name in _CHECKSUMS}


def _whole(answer: Answer, scene: Scene) -> None:
    answer.status, answer.body = 200, scene.whole
    answer.headers[_LENGTH] = str(len(scene.whole))
    answer.headers.pop(_RANGE, None)


def _empty(answer: Answer, _scene: Scene) -> None:
    answer.body, answer.headers[_LENGTH] = b"", "0"


def chunked(answer: Answer, _scene: Scene | None = None) -> None:
    """Send an answer's body in chunks, without a Content-Length."""
    del answer.headers[_LENGTH]
    answer.headers["transfer-encoding"] = "chunked"
    answer.body = in_chunks(answer.body)


def in_chunks(body: bytes) -> bytes:
    """Return a body as `Transfer-Encoding: chunked` sends it."""
    chunks = [body[first : first + _CHUNK_BYTES] for first in range(0, len(body), _CHUNK_BYTES)]
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


def _flip(answer: Answer, _scene: Scene) -> None:
    middle = len(answer.body) // 2
    answer.body = answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]


def _no_etag(answer: Answer, scene: Scene) -> None:
    answer.headers.pop(scene.version, None)


def _other_etag(answer: Answer, scene: Scene) -> None:
    version = answer.headers.get(scene.version, "")
    quote = '"' * version.startswith('"')
    answer.headers[scene.version] = quote + version.strip('"')[::-1] + quote


def _other_bytes(answer: Answer, scene: Scene) -> None:
    answer.body = scene.other[scene.start :][: len(answer.body)]


def _other_object(answer: Answer, scene: Scene) -> None:
    _other_bytes(answer, scene)
    _other_etag(answer, scene)


_SPOILERS: Mapping[Mischief, Spoiler] = {
    Mischief.STALL: partial(_cut, Ending.HANG),
    Mischief.SILENCE: partial(_set, raw=b"", ending=Ending.HANG),
    Mischief.LATE: partial(_set, late=True),
    Mischief.DRIP: partial(_set, drips=True),
    Mischief.RESET: partial(_cut, Ending.RESET),
    Mischief.RESET_AT_ONCE: partial(_set, raw=b"", ending=Ending.RESET),
    Mischief.TRUNCATE: partial(_cut, Ending.CLOSE),
    Mischief.HALF_HEAD: _half_head,
    Mischief.LENGTH_LESS: partial(_length, 0.5),
    Mischief.LENGTH_MORE: partial(_length, 2),
    Mischief.LENGTH_ODD: partial(_with, _LENGTH, "many"),
    Mischief.LENGTH_NONE: _no_length,
    Mischief.RANGE_SHIFTED: partial(_range, 512, 0),
    Mischief.RANGE_TOTAL: partial(_range, 0, 512),
    Mischief.RANGE_NONE: partial(_without, _RANGE),
    Mischief.RANGE_SHORT: _short_range,
    Mischief.WHOLE: _whole,
    Mischief.EMPTY: _empty,
    Mischief.GARBAGE: partial(_set, raw=b"\x00\xff not a word of HTTP \r\n\r\n" * 10, ending=Ending.CLOSE),
    Mischief.ENDLESS_HEAD: partial(
        _set, raw=b"HTTP/1.1 206 OK\r\n" + b"x-more: and more\r\n" * 20_000, ending=Ending.HANG
    ),
    Mischief.CHUNKED: chunked,
    Mischief.ENCODED: partial(_with, "content-encoding", "gzip"),
    Mischief.FLIP: _flip,
    Mischief.ETAG_OTHER: _other_etag,
    Mischief.ETAG_NONE: _no_etag,
    Mischief.OTHER_BYTES: _other_bytes,
    Mischief.OTHER_OBJECT: _other_object,
    Mischief.HEAD_LESS: partial(_length, 0.5),
    Mischief.HEAD_MORE: partial(_length, 2),
    Mischief.HEAD_NO_ETAG: _no_etag,
    Mischief.HEAD_ETAG: _other_etag,
    Mischief.HEAD_NO_LENGTH: partial(_without, _LENGTH),
    Mischief.HEAD_ODD_LENGTH: partial(_with, _LENGTH, "many"),
    Mischief.HEAD_ODD_DATE: partial(_with, "last-modified", "long ago"),
    Mischief.HEAD_ODD_CHECKSUM: _odd_checksums,
    Mischief.HEAD_SILENCE: partial(_set, raw=b"", ending=Ending.HANG),
    Mischief.HEAD_RESET: partial(_set, raw=b"", ending=Ending.RESET),
    Mischief.HEAD_GARBAGE: partial(_set, raw=b"\x00\xff not a word of HTTP \r\n\r\n", ending=Ending.CLOSE),
}
