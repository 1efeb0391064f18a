"""The protocol between daemon and client: the messages of a session.

Control is JSON over a Unix socket. Each reader has a WebSocket at `SESSION_PATH`; its plan and
leases end with this connection. Tools use plain HTTP. The messages of a session are `REQUESTS` and
`ANSWERS`. An answer repeats the `id` of its request, and so does an `error` in its place. A request
without an `id` gets no answer, except `hello`.

A dataset's shards are sent once: `manifest` has them `packed` (`shard_columns`), in a binary frame,
behind its JSON and a newline. A plan's `shards` are the fingerprints of such lists; its `order`
numbers the shards of all of them, in reading order: first the `reads` positions of this epoch, then
those of later epochs as far as they are determined. `extend` appends to the order, so that a plan
of any length can be sent in pieces. A lease's `position` counts through the whole order. The answer
to a plan is `unknown` if the daemon no longer has the lists, never sent them to this user, or would
need too much memory for them. The client then sends the shards itself, in lists of a limited size,
and the plan again. `shards` without `packed` asks for a list whether this client has to send it:
only one of a user's clients has to.

A reader may have thousands of leases: on the shards it is reading, and on others that it requested
ahead. Requesting a lease does not protect a shard: until it is needed, a `leased` shard may be
evicted in favour of a reader that has nothing to read. `need` says that the reader has reached the
shard of the request `of`, and has nothing to read until it arrives. From then on, or from its grant
if that comes later, the shard is in use and stays in place until `release`. A reader that finds no
file, because the shard was evicted before it was needed, releases the lease with `read` false and
requests it again. A release states how many of the shard's samples were `unmatched`: they could not
be joined with those of other shards. A reader that finds a published file damaged releases the
lease with `damage`, the error's message, and requests it again: before the daemon grants that shard
to anybody, it checks the shard, and indexes or fetches it again if necessary. If a shard has been
replaced in the object store, a reader that may read another version than the plan's requests the
`latest`. With `named`, the grant of a cached shard also has a `named_path`, which ends with the
object's own name.

With `partial`, a plain tar that is needed may be granted while it is `arriving`: the file has its
final size, and its first `ready_bytes` are valid, each part verified. `more` waits until there are
more than `beyond` bytes, or the shard is complete and indexed; then the answer is `leased`, with
the same lease number. An error ends the lease.

With `unpublished`, a shard that is needed may be `leased` once it has passed every check, before
its files are synced to disk and get their names: such a grant has the tar's `inode`. The files move
when they are published, so a reader opens them and keeps them open; no other process may be told
their paths. A reader that does not find them, or finds another inode, asks for `more`, which then
waits until the shard is published.

A lease that is not granted yet is released by the id of its request, which then gets no answer.
`need` and `release` of a lease that has ended are ignored: an error may have crossed them on the
wire.

Cached shards are scrubbed. When a shard that a reader has in use turns out to be damaged, the next
`leased` or `arriving` has a list `damaged` of errors, each naming a shard: samples read from it may
be wrong.

A plan's `wanted` says what is read of its shards: `samples`, which is the default, or `files`, any
objects' own bytes. With `either`, an object with a shard's name is a shard, and any other a file.
A file has no samples, and a file of any format may be granted while it is `arriving`.

`resolve` has the same field, and finds only shards, or all files, accordingly. With `objects`, or
`entries` for those of a folder, its urls are not patterns. `max_age_ms` limits the age of listings
and versions that the daemon may answer from.

With a plan of `ranges`, only the bytes from `start` to `beyond` of each `lease` are fetched. The
grant is `arriving`: the requested bytes may be read from then on until `release`, whether or not
they are `needed`, and whatever `ready_bytes` is. It is `leased` if the whole file is cached anyway.
With `ahead_to`, a `needed` lease also covers the bytes that follow its range, up to there, as far
as they are cached: `ready_bytes` is then the end of the bytes that may be read. The grant does not
wait for them.

Readers of many small ranges would spend most of their time on messages. If `hello` and `welcome`
have `bundles`, a `bundle` in either direction stands for all of its `messages`, in their order; and
a `lease` that is `needed` implies its `need`.

`remembered` is the number of sample counts in the manifest that only this daemon knows; the others
come from an index file.

To a private daemon, `hello` hands over the `credentials` of the reader's environment: the values of
variables, by their names.

The workers of a data loader send its name and batch size in `hello`: the loader takes one batch
from each worker in turn, so a worker that waits for cache space keeps the others from releasing
theirs.

Daemon and client may be different releases. `hello` names the newest and the oldest protocol
version that the client speaks, `welcome` the newest that both speak. Unknown fields are ignored, so
a release may add fields under the same version; so are unsolicited messages of the daemon. A
request of unknown type gets an error, and the session continues. An error also names the codes of
its parent classes: a client that does not know its code uses the nearest parent.

A stopping daemon closes its sessions with WebSocket code 1001, and refuses new ones with HTTP
status 503 and a StoppingError. Granted shards may still be read; the client sends its plan to the
next daemon.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from inspect import formatannotation
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypedDict,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

from shardcache.errors import ProtocolError

T = TypeVar("T")
Json = dict[str, Any]
Wanted: TypeAlias = Literal["samples", "shards", "either", "files", "ranges", "objects", "entries"]
Fields = Mapping[str, Any]  # types of a message's fields, by name

SESSION_PATH = "/v1/session"

# A manifest of a million shards is 20 to 100 MB; clients send theirs, and their plans, in pieces.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024
_MAX_BUNDLED = 4096  # each may take a task
MAX_JOB_CHARS = 255  # a longer name would crowd everything else off the status page
_SHOWN_CHARS = 100  # of a wrong value, in an error

# The largest integer that SQLite and the kernel accept; JSON can hold sums of such numbers.
_MAX_INT = 2**63 - 1
# An inode number: overlayfs uses the highest bit.
_Inode = Annotated[int, "unsigned"]


# A dataclass would take five times as long to make, and there may be millions.
class ShardRef(NamedTuple):
    """One shard in a manifest; what is not known of it is None.

    Attributes:
        url: the original one, as in the samples' `__url__`.
        version: in the object store (ETag).
        size_bytes: in the object store.
        samples: number of them, known once the shard has been indexed.
        tokens: number of them as `tarindex.contents` counts them, if an index file says so.
        is_file: True if the object's own bytes are wanted, and no samples.
    """

    url: str
    version: str | None = None
    size_bytes: int | None = None
    samples: int | None = None
    tokens: int | None = None
    is_file: bool = False


def check_indices(values: Sequence[object], count: int) -> None:
    """Raise ProtocolError unless all values are indices into a list of length `count`."""
    if not all(type(value) is int and 0 <= value < count for value in values):
        raise ProtocolError(f"a plan's indices must lie between 0 and {count - 1}")


class _Granted(TypedDict):
    """Fields of every answer that grants a lease."""

    type: str
    id: int
    lease: int
    url: str
    version: str
    path: str
    size_bytes: int


class Arriving(_Granted):
    """A shard that is being fetched: only its first `ready_bytes` can be read at `path`.

    If `path` has another `inode`, the download was restarted: do not read any bytes of that file.
    """

    inode: _Inode
    ready_bytes: int


class _Whole(_Granted):
    """Fields of a grant whose shard is complete and indexed."""

    index_path: str
    samples: int


class Leased(_Whole, total=False):
    """A cached shard, which stays in place from its `need` until `release` or disconnection.

    With an `inode`, its files are not published yet: do not read a tar of another inode.
    """

    inode: _Inode


def parse(text: str | bytes) -> Json:
    """Parse a JSON object; bytes are UTF-8, and what comes after a newline is `packed`.

    Raises ProtocolError.
    """
    newline = b""
    packed = b""
    if isinstance(text, bytes):
        text, newline, packed = text.partition(b"\n")
    try:
        message = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as exn:
        raise ProtocolError(f"invalid JSON: {exn}") from None
    if not isinstance(message, dict):
        raise ProtocolError("the message is not a JSON object")
    if newline:
        message["packed"] = packed
    return message


def written(message: Json) -> bytes:
    """Return a message as it is sent; with `packed`, it goes into a binary frame."""
    if "packed" not in message:
        return _json(message)
    packed: bytes = message["packed"]
    # In the JSON, None stands for the bytes behind it.
    return _json({**message, "packed": None}) + b"\n" + packed


def _json(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def unbundled(message: Json) -> list[Json]:
    """Return the messages that a message stands for: itself, unless it is a `bundle`.

    Raises ProtocolError.
    """
    if message.get("type") != "bundle":
        return [message]
    messages = take(message, "messages", list[Json])
    if len(messages) > _MAX_BUNDLED:
        raise ProtocolError(f"a bundle has at most {_MAX_BUNDLED} messages")
    return messages


def take(message: Json, name: str, kind: type[T]) -> T:
    """Return a field. Raises ProtocolError if it is missing, of another type, or out of range."""
    value = message.get(name)
    if not _IS_SOUND[kind](value):
        raise _unsound(message, name, kind)
    return cast(T, value)


def wanted_of(message: Json) -> Wanted:
    """Return the field `wanted` of a plan or `resolve`. Raises ProtocolError."""
    wanted = message.get("wanted", "samples")
    if wanted not in get_args(Wanted):
        raise ProtocolError(
            f"'wanted' is {wanted[:_SHOWN_CHARS]!r}; it is one of {', '.join(get_args(Wanted))}"
        )
    return cast(Wanted, wanted)


def _unsound(message: Json, name: str, kind: object) -> ProtocolError:
    """Return the error for a field that is missing or has a wrong value; `kind` is its type."""
    message_type = str(message.get("type", "message"))[:_SHOWN_CHARS]
    expected = "list of strings" if kind == list[str] else formatannotation(kind)
    return ProtocolError(f"{message_type!r} needs {name!r}: {expected}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_INT


def _is_text(value: str) -> bool:
    """Return True if the text can be encoded: JSON may contain half a surrogate pair."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


_IS_SOUND: dict[Any, Callable[[Any], bool]] = {
    int: _is_count,
    _Inode: lambda value: type(value) is int and 0 <= value < 2**64,
    int | None: lambda value: value is None or _is_count(value),
    str: lambda value: type(value) is str and _is_text(value),
    bytes: lambda value: type(value) is bytes,
    bool: lambda value: type(value) is bool,
    Json: lambda value: type(value) is dict,
    list: lambda value: type(value) is list,
    list[str]: lambda value: type(value) is list and all(type(item) is str for item in value),
    list[Json]: lambda value: type(value) is list and all(type(item) is dict for item in value),
}


class MessageKind:
    """One kind of message, and the answers to it if it is a request.

    Attributes:
        fields: fields that it must have besides `type`.
        optional: fields that it may have.
        answers: types of the answers besides `error`.
    """

    def __init__(
        self,
        fields: Fields,
        optional: Fields = MappingProxyType({}),
        answers: tuple[str, ...] = (),
    ) -> None:
        self.fields = fields
        self.optional = optional
        self.answers = answers
        kinds = {**optional, **fields}
        self._checks = [(name, _IS_SOUND[kind]) for name, kind in kinds.items()]

    def check(self, message: Json) -> None:
        """Raise ProtocolError unless the message has these fields.

        Others are ignored: a newer release added them.
        """
        for name, is_sound in self._checks:
            if is_sound(message.get(name)):
                continue
            if name in self.fields or name in message:
                raise _unsound(message, name, self.fields.get(name) or self.optional[name])


_GRANTS = ("leased", "arriving")
_PIECE = {"id": int, "order": list}  # of a plan's order
_READER = dict.fromkeys(("rank", "world_size", "worker", "workers", "pid", "batch_size"), int)

REQUESTS = {
    "hello": MessageKind(
        {"protocol": int, "job": str},
        {
            "oldest_protocol": int,
            "client_version": str,
            "bundles": bool,
            "loader": str,
            "credentials": Json,
            **_READER,
        },
        answers=("welcome",),
    ),
    "resolve": MessageKind(
        {"id": int, "urls": list[str]},
        {"wanted": str, "max_age_ms": int},
        answers=("manifest",),
    ),
    "shards": MessageKind(
        {"id": int, "fingerprint": str}, {"packed": bytes}, answers=("ok", "unknown")
    ),
    "plan": MessageKind(
        {**_PIECE, "shards": list[str], "reads": int},
        {"epoch": int, "wanted": str},
        answers=("ok", "unknown"),
    ),
    "extend": MessageKind(_PIECE, answers=("ok",)),
    "lease": MessageKind(
        {"id": int, "position": int},
        {
            "partial": bool,
            "unpublished": bool,
            "start": int,
            "beyond": int,
            "ahead_to": int,
            "latest": bool,
            "named": bool,
            "needed": bool,
        },
        answers=_GRANTS,
    ),
    "need": MessageKind({"of": int}),
    "more": MessageKind({"id": int, "lease": int, "beyond": int}, answers=_GRANTS),
    "explain": MessageKind({"id": int, "of": int}, answers=("waiting",)),
    "release": MessageKind({"lease": int}, {"read": bool, "unmatched": int, "damage": str}),
    "bundle": MessageKind({"messages": list[Json]}),
}
"""Messages of the client.

The numbers in an `order` are checked by `check_indices`, in pieces: there may be millions.
"""

ANSWERS = {
    "welcome": MessageKind({"protocol": int}, {"version": str, "cache_dir": str, "bundles": bool}),
    "manifest": MessageKind({"id": int, "packed": bytes}, {"remembered": int}),
    "ok": MessageKind({"id": int}),
    "unknown": MessageKind({"id": int}),
    "leased": MessageKind(
        get_type_hints(_Whole, include_extras=True),
        {"damaged": list[Json], "named_path": str, "inode": _Inode},
    ),
    "arriving": MessageKind(get_type_hints(Arriving, include_extras=True), {"damaged": list[Json]}),
    "waiting": MessageKind(
        {"id": int, "reason": str}, {"of": int, "done_bytes": int, "total_bytes": int}
    ),
    "error": MessageKind({"error": Json, "id": int | None}),
    "bundle": MessageKind({"messages": list[Json]}),
}
"""Messages of the daemon."""

UNKNOWN = MessageKind({"id": int | None})
"""A message of a newer release."""
