"""One tree of exceptions for both sides: each names what failed, why, and what to do about it.

An error is raised where a foreign exception enters, crosses the wire as JSON (`to_json`), and is raised again
as the same class in the training process (`from_json`).

torch sends an exception of a DataLoader worker to the trainer as its class and its formatted traceback, and there calls
the class with that text. So the text has the JSON at its end whenever torch formats it, and the constructor reads it.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar, Self

from shardcache.redact import redact

_MOST_CHARS = 8192

_FORMATS_FOR_THE_TRAINER = "torch._utils"  # the module of ExceptionWrapper
_TRAILER = "\n  shardcache error as JSON: "  # no JSON contains a line break


NO_PROCESS_REMEDY = (
    "look for limits on memory and processes (ulimit -a, the container's); where Python was replaced under the running "
    "daemon, restart it"
)
"""For a `CacheError` where the daemon cannot start one of its processes."""


class ShardcacheError(Exception):
    """Base of everything that shardcache raises.

    Attributes:
        message: what happened, one sentence without a full stop; what is secret in a url is left out of it.
        url: the shard, pattern or file that it happened to, if any, without its secrets.
        remedy: what the reader of the message can do.
        code: stable machine-readable name of the class, the same on the wire.
        retryable: whether asking again, unchanged, may help.
        yielded: samples of the shard that had been given before this was known.
        worker_traceback: of the DataLoader worker that raised it; empty in the process that did.
    """

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    default_remedy: ClassVar[str] = ""

    def __init__(self, message: str, *, url: str | None = None, remedy: str | None = None) -> None:
        self.yielded, self.worker_traceback = 0, ""
        sent = _sent_by_worker(message)
        if sent is not None:
            self.worker_traceback = message.rpartition(_TRAILER)[0]
            self.yielded = _yielded(sent)
            message, url, remedy = str(sent.get("message", "")), _text(sent.get("url")), _text(sent.get("remedy"))
            self.add_note(f"{self.worker_traceback.partition(chr(10))[0]} See the attribute worker_traceback.")
        self.message = _told(message)
        super().__init__(self.message)
        self.url = None if url is None else _told(url)
        self.remedy = self.default_remedy if remedy is None else remedy

    def __repr__(self) -> str:
        where = "" if self.url is None else f", url={self.url!r}"
        return f"{type(self).__name__}({self.message!r}{where})"

    def __str__(self) -> str:
        where = f"{self.url}: " if self.url else ""
        hint = f"\n  What to do: {self.remedy}" if self.remedy else ""
        trailer = f"{_TRAILER}{json.dumps(self.to_json())}" if _is_formatted_for_trainer() else ""
        return f"{where}{self.message}{hint}{trailer}"

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader sends exceptions between processes; keyword-only arguments need a helping hand.
        return from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """Return the error as a JSON object; `from_json` is the inverse."""
        parents = [kind.code for kind in type(self).__mro__[1:] if issubclass(kind, ShardcacheError)]
        error = {"code": self.code, "message": self.message, "url": self.url, "remedy": self.remedy, "parents": parents}
        return error | {"yielded": self.yielded} if self.yielded else error

    @classmethod
    def _subclasses(cls) -> dict[str, type[Self]]:
        found = {cls.code: cls}
        for child in cls.__subclasses__():
            found.update(child._subclasses())
        return found


class ConfigError(ShardcacheError):
    """An option, a config file or an argument makes no sense."""

    code = "config"


class OriginError(ShardcacheError):
    """The remote side could not give what was asked.

    The subclasses that have a counterpart among Python's OSErrors derive from it: `except IOError` catches a missing
    shard, a refused one and a store that does not answer, as it does where a loader opens files itself.
    """

    code = "origin"


class NotFoundError(OriginError, FileNotFoundError):
    """The object, the bucket or everything that a pattern could match does not exist."""

    code = "not_found"
    default_remedy = (
        'check the url for typing errors, and end a prefix or folder with "/"; '
        "list what is there with the store's own tool"
    )


class AccessDeniedError(OriginError, PermissionError):
    """The store refuses the daemon's credentials."""

    code = "access_denied"
    default_remedy = (
        "give the daemon credentials that may read this url (AWS_PROFILE, an instance role, or `profile` "
        "in an [[origin]] table of its config), or `anon = true` for public data"
    )


class NotAllowedError(OriginError):
    """The url lies outside the prefixes that this daemon may fetch."""

    code = "not_allowed"
    default_remedy = "ask the node's operator to add the prefix to --allow"


class MissingPackageError(OriginError):
    """The url's filesystem needs a Python package that the daemon lacks."""

    code = "missing_package"


class OriginUnavailableError(OriginError, OSError):
    """Time-outs, resets, 5xx or throttling; retries did not outlast it."""

    code = "origin_unavailable"
    retryable = True
    default_remedy = "check the network path from this node to the store and the store's own health; then ask again"


class OriginBusyError(OriginUnavailableError):
    """The store asks for fewer requests: 503 SlowDown or 429."""

    code = "origin_busy"
    default_remedy = (
        "lower --max-connections on the nodes that read from this store, or ask its operator for a higher rate"
    )


class ShardChangedError(OriginError):
    """The object was replaced while it was being read."""

    code = "shard_changed"
    retryable = True
    default_remedy = "let the writer of the shard finish before training reads it"


class OutdatedError(OriginError):
    """The store no longer holds the version of a shard that an index, or the listing of a running job, names."""

    code = "outdated"
    default_remedy = (
        "if the dataset is read by an index file, bring that up to date: `shardcache index INDEX -o INDEX` reads only "
        "what changed; then start the job again"
    )


class ShardError(ShardcacheError):
    """The bytes arrived, but are no shard that can be served."""

    code = "shard"


class NotATarError(ShardError):
    """The object is not a tar archive."""

    code = "not_a_tar"
    default_remedy = "point the dataset at tar shards (.tar, .tar.gz, .tgz, .tar.zst, .tar.bz2, .tar.xz)"


class TruncatedShardError(ShardError):
    """The tar ends too early: inside a member, or without its end-of-archive block."""

    code = "truncated"
    default_remedy = "write and upload the shard again; it was cut short before it reached the store"


class TrailingDataError(ShardError):
    """Data follow the tar's end-of-archive block, where other readers stop without a word."""

    code = "trailing_data"
    default_remedy = (
        "if these are several tars in one file, join them with `tar --concatenate`; if zeros replaced a part of the "
        "shard, write and upload it again; if the data mean nothing, set `ignore_trailing_data = true` in the "
        "[[origin]] table for it"
    )


class CorruptShardError(ShardError):
    """Bytes differ from the checksum that the store or the cache holds for them."""

    code = "corrupt"
    default_remedy = "run `shardcache verify`; if the store's copy is damaged, upload the shard again"


class UnsupportedShardError(ShardError):
    """Reading the shard would take more memory than one shard may have."""

    code = "unsupported_shard"
    default_remedy = "compress the shard with a smaller window: `xz -9`, `zstd --long=27`; or leave it uncompressed"


class CountMismatchError(ShardError):
    """A shard holds another number of samples than the manifest says."""

    code = "count_mismatch"
    default_remedy = "make the dataset's index again: shardcache index URL... -o FILE"


class CacheError(ShardcacheError):
    """The node's cache cannot do what is asked."""

    code = "cache"


class CapacityError(CacheError):
    """The shard does not fit, now or ever, beside what is in use."""

    code = "capacity"
    default_remedy = "raise --capacity, or write smaller shards"


class DiskError(CacheError):
    """The disk or the folder under the cache cannot be used; what is cached and can be read is still served."""

    code = "disk"
    retryable = True


class DiskFullError(DiskError):
    """The filesystem under the cache has no room, whatever the capacity says."""

    code = "disk_full"
    default_remedy = "free space on the cache's filesystem or lower --capacity"


class DiskFailedError(DiskError):
    """The disk does not read or does not write: I/O errors, or the kernel has made it read-only."""

    code = "disk_failed"
    default_remedy = "see dmesg for what the kernel says of the disk; mend or replace it, the daemon goes on by itself"


class CacheDirError(DiskError):
    """The cache folder is missing, not writable, or in use by another daemon."""

    code = "cache_dir"


class CacheFormatError(CacheDirError):
    """The cache folder has a format that this release does not know."""

    code = "cache_format"


class DaemonError(ShardcacheError):
    """The daemon cannot be talked to."""

    code = "daemon"


class NoDaemonError(DaemonError):
    """Nothing listens at the socket, or the connection broke."""

    code = "no_daemon"
    retryable = True
    default_remedy = "start it: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"


class StoppingError(NoDaemonError):
    """The daemon was told to stop and takes on nothing new; the next one at its socket will."""

    code = "stopping"
    default_remedy = "ask again once it was started again; what has arrived is kept"


class SocketInUseError(DaemonError):
    """Another daemon answers at the socket."""

    code = "socket_in_use"
    default_remedy = "stop the other daemon, or give this one its own --socket"


class VersionMismatchError(DaemonError):
    """Client and daemon speak different versions of the protocol."""

    code = "version_mismatch"


class ProtocolError(DaemonError):
    """A message that makes no sense."""

    code = "protocol"


class ShardTimeoutError(DaemonError):
    """A shard did not come within the time that the reader allows."""

    code = "shard_timeout"
    retryable = True


class SampleError(ShardcacheError):
    """One sample within a good shard cannot be given, such as one with two members of the same name."""

    code = "sample"


class DecodeError(SampleError):
    """The function that was to decode a sample raised an error."""

    code = "decode"


class RanksError(ShardcacheError):
    """The ranks of a training job do not go together."""

    code = "ranks"


class RankTimeoutError(RanksError):
    """A rank did not come within the time that the others allow."""

    code = "rank_timeout"
    default_remedy = (
        "see what that rank does instead: an error of its own, an epoch that ended early, a dataset that it does not "
        "make; a dataset of one rank alone takes rank=0, world_size=1"
    )


class ManifestMismatchError(RanksError):
    """Ranks were given different lists of shards for the same urls."""

    code = "manifest_mismatch"
    default_remedy = (
        "have one list made for all: initialise torch.distributed before the dataset is made, and rank 0's is used by "
        "every rank; or give the dataset an index file as its url (shardcache index)"
    )


class EpochMismatchError(RanksError):
    """A rank leaves an epoch in which the other ranks stay, more than once."""

    code = "epoch_mismatch"
    default_remedy = (
        "call dataset.set_epoch(epoch) before each iteration, on every rank; or do not iterate over the dataset on one "
        "rank alone (rank=0, world_size=1 makes a dataset for that)"
    )


def _told(text: str) -> str:
    if len(text) > _MOST_CHARS:  # who sends nonsense by the megabyte need not have all of it back
        text = text[:_MOST_CHARS] + "…"
    # What a server or a file system said may hold bytes that are no characters, which no JSON can carry.
    return redact(text.encode(errors="backslashreplace").decode())


def codes(kind: type[ShardcacheError]) -> frozenset[str]:
    """Return the codes of a class and all below it."""
    return frozenset(kind._subclasses())


def from_json(data: dict[str, Any]) -> ShardcacheError:
    """Build the error that `to_json` described; a code that is not known here becomes the nearest class that is.

    A newer daemon may know more codes than this client: what to catch, and the message, still arrive. Whatever else is
    not as it should be is left out; that an error arrives matters more.
    """
    known, parents = ShardcacheError._subclasses(), data.get("parents")
    codes = (data.get("code"), *(parents if isinstance(parents, list | tuple) else ()))
    cls = next((known[code] for code in codes if isinstance(code, str) and code in known), ShardcacheError)
    error = cls(str(data.get("message", "")), url=_text(data.get("url")), remedy=_text(data.get("remedy")))
    error.yielded = _yielded(data)
    return error


def _yielded(data: dict[str, Any]) -> int:
    yielded = data.get("yielded")
    return yielded if isinstance(yielded, int) else 0


def _is_formatted_for_trainer() -> bool:
    """Return True where the caller's `__str__` is called to send the error from a DataLoader worker to the trainer."""
    frame = sys._getframe(1).f_back  # none where the interpreter itself prints an error that ended the program
    while frame is not None and frame.f_globals.get("__name__") == "traceback":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _FORMATS_FOR_THE_TRAINER


def _sent_by_worker(text: str) -> dict[str, Any] | None:
    """Return the JSON of an error that torch makes again from the text of a worker's; None for any other message."""
    if not (text.startswith("Caught ") and _TRAILER in text):
        return None
    try:
        sent = json.loads(text.rpartition(_TRAILER)[2].partition("\n")[0])
    except ValueError:
        return None
    return sent if isinstance(sent, dict) and "code" in sent else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
