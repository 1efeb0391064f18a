"""The protocol between daemon and client: the messages of a session.

A reader is one process that iterates over a dataset. A manifest is the list of a dataset's shards.
A reader's plan is the order in which it reads shards, and a position is a place in this order. A
lease is a reader's right to read the shard at one position, and a grant is the answer that gives it
the lease. A part is the unit in which a shard is fetched and verified. A shard is published once it
is complete, checked, indexed and synced to disk.

Connections
-----------

Control is JSON over a Unix socket. Each reader has a WebSocket at `SESSION_PATH`; its plan and
leases end with this connection. Tools use plain HTTP. The messages of a session are `REQUESTS` and
`ANSWERS`. An answer repeats the `id` of its request, and so does an `error` in its place. A request
without an `id` gets no answer, except `hello`.

Lists of shards, and plans
--------------------------

A dataset's shards are sent once. The answer `manifest` has them `packed` (see `shard_columns`) in a
binary frame, after its JSON and a newline. A plan's `shards` are the fingerprints of such lists.
The shards of all these lists are numbered consecutively, and the plan's `order` has their numbers
in reading order. The first `reads` positions are this epoch's; later epochs follow as far as their
order is determined. `extend` appends to the order, so that a plan of any length can be sent in
pieces. A lease's `position` counts through the whole order.

The answer to a plan is `unknown` if the daemon no longer has the lists, never sent them to this
user, or would need too much memory for them. The client then sends the shards itself, in lists of a
limited size, and the plan again. A `shards` message without `packed` asks whether this client has
to send the list: only one of a user's clients has to.

`remembered` is the number of sample counts in the manifest that only this daemon knows; the other
counts come from an index file.

Leases
------

A reader may have thousands of leases: on the shards that it is reading, and on others that it
requested ahead. A request for a lease does not protect a shard: until the reader needs the shard,
it may be evicted in favour of a reader that has nothing to read. `need` says that the reader has
reached the shard of the request `of`, and has nothing to read until the shard arrives. From then
on, or from its grant if that comes later, the shard is in use and stays in place until `release`. A
reader that finds no file, because the shard was evicted before it was needed, releases the lease
with `read` false and requests the shard again. A release states how many of the shard's samples
were `unmatched`: they could not be joined with the samples of other shards.

`explain` asks why the request `of` is not granted yet, and `waiting` answers it. A lease that is
not granted yet is released by the id of its request, and the request then gets no answer. `need`
and `release` of a lease that has ended are ignored: an error, which ends the lease, may still have
been on its way to the client.

Damaged and replaced shards
---------------------------

A reader that finds a published file damaged releases the lease with `damage`, which is the error's
message, and requests the shard again. Before the daemon grants that shard to any reader, it checks
the shard, and indexes or fetches it again if necessary. If a shard has been replaced in the object
store, a reader that may read another version than the plan's requests the `latest`.

The daemon also reads cached shards again to find damage. When a shard that a reader has in use
turns out to be damaged, the next `leased` or `arriving` answer has a list `damaged` of errors. Each
error names a shard, and samples read from that shard may be wrong.

Shards that are not published yet
---------------------------------

With `partial`, a plain tar that is needed may be granted while it is `arriving`: the file has its
final size, and its first `ready_bytes` are valid, because each part of them has been verified.
`more` waits until more than `beyond` bytes are valid, or the shard is complete and indexed; then
the answer is `leased`, with the same lease number. An error ends the lease.

With `unpublished`, a shard that is needed may be `leased` once it has passed every check, before
its files are synced to disk and get their names: such a grant has the tar's `inode`. The files move
when they are published, so a reader opens them and keeps them open, and must not pass their paths
to another process. A reader that does not find them, or finds another inode, asks for `more`, which
then waits until the shard is published.

Files, folders and ranges
-------------------------

A plan's `wanted` says what the reader reads: `samples`, which is the default, or `files`, which are
the own bytes of any objects. With `either` or `shards`, an object with a shard's name is a shard,
and any other object is a file. They differ for a name that other files often have, such as that of
JSON Lines: with `either`, it is not a shard's. A file has no samples, and a file of any format may
be granted while it is `arriving`. With `named`, the grant of a cached shard also has a
`named_path`, which ends with the object's own name.

`resolve` has the field `wanted`, too: it finds only shards, or all files, accordingly. With
`objects`, its urls are not patterns but objects; with `entries`, its url is a folder, whose entries
are listed. `max_age_ms` limits the age of listings and versions that the daemon may answer from.

With a plan of `ranges`, only the bytes from `start` to `beyond` of each `lease` are fetched. The
grant is `arriving`: the requested bytes may be read from then on until `release`, whether or not
the lease is `needed`, and whatever `ready_bytes` is. The grant is `leased` if the whole file is
cached anyway. With `ahead_to`, a `needed` lease also covers the cached bytes that follow its range,
up to the offset `ahead_to`: `ready_bytes` is then the end of the bytes that may be read. The grant
does not wait for these bytes.

If `welcome` has `range_plans`, `plan_ranges` may announce ranges that are leased later, in order:
none of them is fetched, but the parts that are needed soonest stay cached. `ranges` has four
numbers for each: its `number`, and `position`, `start` and `beyond` of its lease. The numbers must
not decrease; pieces of one sample have the same. The `lease` on the last of them has this `number`,
too, and its release ends all ranges up to it. A message goes on with the announced order, or
`begins` another one. For its limit, see `announced_range`.

Readers of many small ranges would spend most of their time on messages. If `hello` and `welcome`
have `bundles`, a `bundle` in either direction stands for all of its `messages`, in their order, and
a `lease` that is `needed` implies its `need`.

Beginning and end of a session
------------------------------

Daemon and client may be different releases. `hello` names the newest and the oldest protocol
version that the client speaks, `welcome` the newest that both speak. Unknown fields are ignored, so
a release may add fields under the same version; so are unsolicited messages of the daemon. A
request of unknown type gets an error, and the session continues. An error also names the codes of
its parent classes: a client that does not know its code uses the nearest parent.

To a private daemon, which a reader has started for its own user, `hello` hands over the
`credentials` of the reader's environment: the values of variables, by their names. The workers of a
data loader send its name and batch size in `hello`: the loader takes one batch from each worker in
turn, so a worker that waits for cache space keeps the others from releasing theirs.

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

from shardcache.shared.exceptions import ProtocolError

T = TypeVar("T")
Json = dict[str, Any]
Wanted: TypeAlias = Literal["samples", "shards", "either", "files", "ranges", "objects", "entries"]
Fields = Mapping[str, Any]  # types by the names of a message's fields

SESSION_PATH = "/v1/session"

# Limits on the daemon's and the client's messages. The daemon sends a manifest in one message,
# which has 20 to 100 MB for a million shards. Clients send lists of shards and plans in pieces.
MAX_MESSAGE_BYTES = 512 * 1024 * 1024
MAX_REQUEST_BYTES = 16 * 1024 * 1024
# Limit on the messages of a bundle, each of which may take a task of the daemon.
MAX_BUNDLED = 4096
MAX_JOB_CHARS = 255  # a longer name would crowd everything else off the status page
_SHOWN_CHARS = 100  # number of characters of a wrong value that an error shows

# The largest integer that SQLite and the kernel accept.
_MAX_INT = 2**63 - 1
# An inode number, which may be larger than `_MAX_INT`: overlayfs uses the highest bit.
_Inode = Annotated[int, "unsigned"]


# A dataclass would take five times as long to create, and there may be millions of shards.
class ShardRef(NamedTuple):
    """One shard in a manifest. A field is None if its value is not known.

    Attributes:
        url: the shard's url, as in the samples' `__url__`.
        version: version in the object store (ETag).
        size_bytes: size in the object store.
        samples: number of samples, known once the shard has been indexed.
        tokens: number of tokens as `tarindex.contents` counts them, if an index file states it.
        is_file: True if the object's own bytes are wanted, rather than samples.
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
    """Fields of every answer that grants a lease.

    Attributes:
        id: the id of the request.
        lease: the number of the lease, by which the client releases it.
        url: the shard's url.
        version: the shard's version in the object store.
        path: the shard's file in the cache.
        size_bytes: the size of the file.
    """

    type: str
    id: int
    lease: int
    url: str
    version: str
    path: str
    size_bytes: int


class Arriving(_Granted):
    """A shard that is being fetched: only its first `ready_bytes` can be read at `path`.

    If the file at `path` has another `inode`, the download was restarted: a reader must not read
    any bytes of that file.
    """

    inode: _Inode
    ready_bytes: int


class _Whole(_Granted):
    """Fields of a grant whose shard is complete and indexed."""

    index_path: str
    samples: int


class Leased(_Whole, total=False):
    """A cached shard, which stays in place from its `need` until `release` or disconnection.

    If there is an `inode`, the shard's files are not published yet: a reader must not read a tar
    with another inode.
    """

    inode: _Inode


def parse(text: str | bytes) -> Json:
    """Parse a message, which is a JSON object.

    Bytes are JSON in UTF-8; if a newline follows, the bytes after it become the field `packed`.
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
    """Return the bytes of a message; a message with `packed` has to be sent as a binary frame."""
    if "packed" not in message:
        return _json(message)
    packed: bytes = message["packed"]
    # In the JSON, the value of `packed` is null: the bytes themselves follow after the newline.
    return _json({**message, "packed": None}) + b"\n" + packed


def _json(message: Json) -> bytes:
    """Return a message as JSON without blanks, in UTF-8."""
    return json.dumps(message, separators=(",", ":")).encode()


def unbundled(message: Json) -> list[Json]:
    """Return the messages of a `bundle`; for any other message, a list of only that message.

    Raises ProtocolError.
    """
    if message.get("type") != "bundle":
        return [message]
    messages = take(message, "messages", list[Json])
    if len(messages) > MAX_BUNDLED:
        raise ProtocolError(f"a bundle has at most {MAX_BUNDLED} messages")
    return messages


def take(message: Json, name: str, kind: type[T]) -> T:
    """Return a field of a message.

    Args:
        kind: type of the field, one of the keys of `_IS_SOUND`.

    Raises ProtocolError if the field is missing, of another type, or out of range.
    """
    value = message.get(name)
    if not _IS_SOUND[kind](value):
        raise _unsound(message, name, kind)
    return cast(T, value)


def wanted_of(message: Json) -> Wanted:
    """Return the field `wanted` of a plan or `resolve`. Raises ProtocolError."""
    wanted = message.get("wanted", "samples")
    if wanted not in get_args(Wanted):
        choices = ", ".join(get_args(Wanted))
        raise ProtocolError(f"'wanted' is {wanted[:_SHOWN_CHARS]!r}; it is one of {choices}")
    return cast(Wanted, wanted)


def _unsound(message: Json, name: str, kind: object) -> ProtocolError:
    """Return the error for a field that is missing or has a wrong value.

    Args:
        kind: type of the field, as for `take`.
    """
    message_type = str(message.get("type", "message"))[:_SHOWN_CHARS]
    expected = "list of strings" if kind == list[str] else formatannotation(kind)
    return ProtocolError(f"{message_type!r} needs {name!r}: {expected}")


def is_count(value: object) -> bool:
    """Return True for an integer from 0 to `_MAX_INT`; a bool is not an integer here."""
    return type(value) is int and 0 <= value <= _MAX_INT


def _is_text(value: str) -> bool:
    """Return True if the text can be encoded: JSON may contain half a surrogate pair."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


# By the type of a field, the function that returns whether a value is of this type and in range.
_IS_SOUND: dict[Any, Callable[[Any], bool]] = {
    int: is_count,
    _Inode: lambda value: type(value) is int and 0 <= value < 2**64,
    int | None: lambda value: value is None or is_count(value),
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
        fields: types of the fields that it must have besides `type`, by name.
        optional: types of the fields that it may have, by name.
        answers: types of the messages that may answer it, besides `error`.
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
        self._types = {**optional, **fields}
        self._checks = [(name, _IS_SOUND[kind]) for name, kind in self._types.items()]

    def check(self, message: Json) -> None:
        """Raise ProtocolError unless the message has these fields, with values of their types.

        Unknown fields, which a newer release may have added, are ignored.
        """
        for name, is_sound in self._checks:
            if is_sound(message.get(name)):
                continue
            # The field is missing or wrong. Only an optional field may be missing.
            if name in self.fields or name in message:
                raise _unsound(message, name, self._types[name])


_GRANTS = ("leased", "arriving")
_PIECE_FIELDS = {"id": int, "order": list}  # fields of a message with a piece of a plan's order
# Fields of `hello` that describe the reader's process and its place among the job's processes.
_PROCESS_FIELDS = dict.fromkeys(
    ("rank", "world_size", "worker", "workers", "pid", "batch_size"),
    int,
)

REQUESTS = {
    "hello": MessageKind(
        {"protocol": int, "job": str},
        {
            "oldest_protocol": int,
            "client_version": str,
            "bundles": bool,
            "loader": str,
            "credentials": Json,
            **_PROCESS_FIELDS,
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
        {**_PIECE_FIELDS, "shards": list[str], "reads": int},
        {"epoch": int, "wanted": str},
        answers=("ok", "unknown"),
    ),
    "extend": MessageKind(_PIECE_FIELDS, answers=("ok",)),
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
            "number": int,
        },
        answers=_GRANTS,
    ),
    "plan_ranges": MessageKind({"ranges": list}, {"begins": bool}),
    "need": MessageKind({"of": int}),
    "more": MessageKind({"id": int, "lease": int, "beyond": int}, answers=_GRANTS),
    "explain": MessageKind({"id": int, "of": int}, answers=("waiting",)),
    "release": MessageKind({"lease": int}, {"read": bool, "unmatched": int, "damage": str}),
    "bundle": MessageKind({"messages": list[Json]}),
}
"""Messages of the client.

The numbers in an `order` are not checked with the other fields but by `check_indices`, in pieces:
there may be millions of them.
"""

ANSWERS = {
    "welcome": MessageKind(
        {"protocol": int}, {"version": str, "cache_dir": str, "bundles": bool, "range_plans": bool}
    ),
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

UNKNOWN_KIND = MessageKind({"id": int | None})
"""A message of a type that only a newer release knows."""
