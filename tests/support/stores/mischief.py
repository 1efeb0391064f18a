"""Faults of a store's answer, as changes of a right one. Pure."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

_LENGTH = "content-length"
_RANGE = "content-range"
_CHECKSUMS = ("x-amz-checksum-crc32", "x-goog-hash", "content-md5")
_CHUNK_BYTES = 10_000


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
    body: bytes = b""
    raw: bytes | None = None  # sent in place of head and body, unless None
    sent: int | None = None  # bytes of the body that are sent, all by default
    head_sent: int | None = None  # bytes of the head that are sent, all by default
    late: bool = False  # whether the first byte takes long
    drips: bool = False  # whether the body comes byte by byte
    ending: Ending = Ending.STAY

    def head(self) -> bytes:
        lines = [
            f"HTTP/1.1 {self.status} {self.status}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")[: self.head_sent]


@dataclass(frozen=True, slots=True)
class Scene:
    start: int  # of the range that was asked for
    other: bytes  # the bytes of another object, as many as this one has at least
    whole: bytes  # the bytes of the object itself; empty where they are not known
    version: str  # header of the version


def _refused(status: int, code: str, answer: Answer, _scene: Scene | None = None) -> None:
    """Turn an answer into a refusal with S3's code, without a body where that is empty."""
    answer.status = status
    answer.body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode() if code else b""
    )
    answer.headers = {"content-type": "application/xml", _LENGTH: str(len(answer.body))}


def refusal(status: int, code: str) -> Answer:
    answer = Answer(status, {})
    _refused(status, code, answer)
    return answer


def part_of(
    size_bytes: int, part: slice | None, headers: Mapping[str, str]
) -> tuple[Answer, range]:
    """Return the answer to a request for all or part of an object, and its body."""
    wanted = range(size_bytes)[part or slice(None)]
    if part is None:
        answer = Answer(200, {**headers})
    elif wanted:
        answer = Answer(
            206, {**headers, _RANGE: f"bytes {wanted.start}-{wanted.stop - 1}/{size_bytes}"}
        )
    else:
        answer = Answer(416, {_RANGE: f"bytes */{size_bytes}"})
    answer.headers[_LENGTH] = str(len(wanted))
    return answer, wanted


def _cut(ending: Ending, answer: Answer, _scene: Scene) -> None:
    answer.sent = len(answer.body) // 2
    answer.ending = ending


def _set(answer: Answer, _scene: Scene, **values: object) -> None:
    for name, value in values.items():
        setattr(answer, name, value)


def _half_head(answer: Answer, _scene: Scene) -> None:
    answer.body = b""
    answer.ending = Ending.CLOSE
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
    answer.status = 200
    answer.body = scene.whole
    answer.headers[_LENGTH] = str(len(scene.whole))
    answer.headers.pop(_RANGE, None)


def _empty(answer: Answer, _scene: Scene) -> None:
    answer.body = b""
    answer.headers[_LENGTH] = "0"


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
    answer.body = (
        answer.body[:middle] + bytes([answer.body[middle] ^ 1]) + answer.body[middle + 1 :]
    )


def _no_etag(answer: Answer, scene: Scene) -> None:
    answer.headers.pop(scene.version, None)


def _other_etag(answer: Answer, scene: Scene) -> None:
    version = answer.headers.get(scene.version, "")
    quote = '"' if version.startswith('"') else ""
    answer.headers[scene.version] = quote + version.strip('"')[::-1] + quote


def _other_bytes(answer: Answer, scene: Scene) -> None:
    answer.body = scene.other[scene.start :][: len(answer.body)]


def _other_object(answer: Answer, scene: Scene) -> None:
    _other_bytes(answer, scene)
    _other_etag(answer, scene)


def _endless_head(answer: Answer, _scene: Scene) -> None:
    answer.raw = b"HTTP/1.1 206 OK\r\n" + b"x-more: and more\r\n" * 20_000
    answer.ending = Ending.HANG


class Mischief(enum.StrEnum):
    """Each fault: its name in tables of results, and the change of the answer that makes it."""

    spoil: Callable[[Answer, Scene], None]

    def __new__(cls, text: str, spoil: Callable[[Answer, Scene], None]) -> Self:
        self = str.__new__(cls, text)
        self._value_ = text
        self.spoil = spoil
        return self

    STALL = "half of the body, then nothing", partial(_cut, Ending.HANG)
    SILENCE = "no answer at all", partial(_set, raw=b"", ending=Ending.HANG)
    LATE = "a first byte that takes seconds", partial(_set, late=True)
    DRIP = "a body byte by byte", partial(_set, drips=True)
    RESET = "half of the body, then a reset", partial(_cut, Ending.RESET)
    RESET_AT_ONCE = "a reset in place of an answer", partial(_set, raw=b"", ending=Ending.RESET)
    TRUNCATE = "half of the body, then a close in good order", partial(_cut, Ending.CLOSE)
    HALF_HEAD = "half of the head, then a close in good order", _half_head
    LENGTH_LESS = "a Content-Length less than the body", partial(_length, 0.5)
    LENGTH_MORE = "a Content-Length more than the body", partial(_length, 2)
    LENGTH_ODD = "a Content-Length that is no number", partial(_with, _LENGTH, "many")
    LENGTH_NONE = "no Content-Length, and half of the body", _no_length
    RANGE_SHIFTED = "a Content-Range of other bytes", partial(_range, 512, 0)
    RANGE_TOTAL = "a Content-Range with another total", partial(_range, 0, 512)
    RANGE_NONE = "206 without a Content-Range", partial(_without, _RANGE)
    RANGE_SHORT = "half of the range, with headers that say so", _short_range
    INTERNAL_ERROR = "500 InternalError", partial(_refused, 500, "InternalError")
    SLOW_DOWN = "503 SlowDown", partial(_refused, 503, "SlowDown")
    TOO_MANY = "429 TooManyRequests", partial(_refused, 429, "TooManyRequests")
    FORBIDDEN = "403 AccessDenied", partial(_refused, 403, "AccessDenied")
    EXPIRED = "400 ExpiredToken", partial(_refused, 400, "ExpiredToken")
    NOT_FOUND = "404 NoSuchKey", partial(_refused, 404, "NoSuchKey")
    TIMEOUT = "408 RequestTimeout", partial(_refused, 408, "RequestTimeout")
    CHANGED = "412 PreconditionFailed", partial(_refused, 412, "PreconditionFailed")
    NO_SUCH_RANGE = "416 InvalidRange", partial(_refused, 416, "InvalidRange")
    WHOLE = "200 and the whole object in place of a range", _whole
    ERROR_AS_200 = "an XML error with status 200", partial(_refused, 200, "InternalError")
    ERROR_AS_206 = "an XML error with status 206", partial(_refused, 206, "InternalError")
    EMPTY = "206 and an empty body", _empty
    GARBAGE = (
        "bytes that are no HTTP",
        partial(_set, raw=b"\x00\xff not a word of HTTP \r\n\r\n" * 10, ending=Ending.CLOSE),
    )
    ENDLESS_HEAD = "headers without an end", _endless_head
    CHUNKED = "a body in chunks, without a Content-Length", chunked
    ENCODED = (
        "a Content-Encoding that the object was stored with",
        partial(_with, "content-encoding", "gzip"),
    )
    FLIP = "a bit flipped", _flip
    ETAG_OTHER = "another ETag", _other_etag
    ETAG_NONE = "no ETag", _no_etag
    OTHER_BYTES = "another object's bytes under the right headers", _other_bytes
    OTHER_OBJECT = "another object's bytes under its own headers", _other_object
    HEAD_LESS = "a HEAD with a size less than it is", partial(_length, 0.5)
    HEAD_MORE = "a HEAD with a size more than it is", partial(_length, 2)
    HEAD_NO_ETAG = "a HEAD without an ETag", _no_etag
    HEAD_ETAG = "a HEAD with another ETag", _other_etag
    HEAD_NO_LENGTH = "a HEAD without a size", partial(_without, _LENGTH)
    HEAD_ODD_LENGTH = "a HEAD with a size that is no number", partial(_with, _LENGTH, "many")
    HEAD_ODD_DATE = "a HEAD with a date that is none", partial(_with, "last-modified", "long ago")
    HEAD_ODD_CHECKSUM = "a HEAD with a checksum that is none", _odd_checksums
    HEAD_SILENCE = "no answer to HEAD", partial(_set, raw=b"", ending=Ending.HANG)
    HEAD_RESET = (
        "a reset in place of an answer to HEAD",
        partial(_set, raw=b"", ending=Ending.RESET),
    )
    HEAD_GARBAGE = (
        "an answer to HEAD that is no HTTP",
        partial(_set, raw=b"\x00\xff not a word of HTTP \r\n\r\n", ending=Ending.CLOSE),
    )
    HEAD_INTERNAL_ERROR = "500 to HEAD", partial(_refused, 500, "")
    HEAD_NOT_FOUND = "404 to HEAD", partial(_refused, 404, "")

    @property
    def method(self) -> str:
        return "HEAD" if self.name.startswith("HEAD_") else "GET"
