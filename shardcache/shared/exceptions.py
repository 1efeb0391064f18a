"""The exception hierarchy of daemon and client.

Each error names what failed, why, and what to do about it (its remedy). The daemon raises an error
and sends it as JSON (`to_json`). The client raises the same class again in the training process
(`from_json`). Exceptions of other packages are translated into these classes where they occur.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from shardcache.shared.wording.redact import excerpt, printable
from shardcache.shared.wording.remedies import member_remedy
from shardcache.shared.wording.worker_errors import (
    TRAILER,
    is_formatted_for_trainer,
    parse_worker_error,
)

_MAX_URL_CHARS = 8192
# Where users import the errors from, as tracebacks name it.
_PUBLIC_MODULE = "shardcache.errors"


class ShardcacheError(Exception):
    """Base class of all shardcache exceptions.

    Attributes:
        message: one sentence without a full stop, shortened by `excerpt` if it is long.
        url: the affected shard, pattern or file, if any, with secrets redacted.
        remedy: advice on what to do, by default that of the class; empty if there is none.
        code: stable machine-readable name of the class, also used on the wire.
        retryable: True if the same request may succeed when it is repeated.
        yielded: number of the shard's samples that were yielded before the error was found.
        worker_traceback: traceback of the DataLoader worker that raised the error; empty in that
            worker itself.
    """

    __module__ = _PUBLIC_MODULE
    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    default_remedy: ClassVar[str] = ""

    def __init_subclass__(cls, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            cls.__module__ = _PUBLIC_MODULE
        if code is not None:
            cls.code = code
        if retryable is not None:
            cls.retryable = retryable

    def __init__(self, message: str, *, url: str | None = None, remedy: str | None = None) -> None:
        self.yielded = 0
        self.worker_traceback = ""
        # torch rebuilds a DataLoader worker's error with its formatted traceback as the message.
        sent = parse_worker_error(message)
        if sent is not None:
            self.worker_traceback = sent.traceback
            self.add_note(f"{sent.first_line} See the attribute worker_traceback.")
            self.yielded = _yielded(sent.fields)
            message = str(sent.fields.get("message", ""))
            url = _text_or_none(sent.fields.get("url"))
            remedy = _text_or_none(sent.fields.get("remedy"))

        self.message = excerpt(message)
        super().__init__(self.message)
        self.url = None if url is None else excerpt(url, _MAX_URL_CHARS)
        self.remedy = self.default_remedy if remedy is None else printable(remedy)

    def __repr__(self) -> str:
        where = "" if self.url is None else f", url={self.url!r}"
        return f"{type(self).__name__}({self.message!r}{where})"

    def __str__(self) -> str:
        where = f"{self.url}: " if self.url else ""
        hint = f"\n  What to do: {self.remedy}" if self.remedy else ""
        trailer = ""
        if is_formatted_for_trainer():
            trailer = f"{TRAILER}{json.dumps(self.to_json())}"
        return f"{where}{self.message}{hint}{trailer}"

    def __reduce__(self) -> tuple[Any, ...]:
        # DataLoader pickles exceptions; pickle's default cannot pass keyword-only arguments.
        return from_json, (self.to_json(),)

    def to_json(self) -> dict[str, Any]:
        """Return the error as a JSON object; `from_json` is the inverse."""
        _, *classes = type(self).__mro__
        parents = [each.code for each in classes if issubclass(each, ShardcacheError)]
        error: dict[str, Any] = {
            "code": self.code,
            "message": self.message,
            "url": self.url,
            "remedy": self.remedy,
            "parents": parents,
        }
        if self.yielded:
            error["yielded"] = self.yielded
        return error

    @classmethod
    def by_code(cls) -> dict[str, type[Self]]:
        """Return this class and all its subclasses, by their codes."""
        classes = {}
        # Ray derives classes without a code from the classes of errors in its tasks.
        if "code" in vars(cls):
            classes[cls.code] = cls
        for child in cls.__subclasses__():
            classes.update(child.by_code())
        return classes


class ConfigError(ShardcacheError, code="config"):
    """An option, a config file or an argument is invalid."""


class OriginError(ShardcacheError, code="origin"):
    """A request to the object store failed.

    Subclasses with a counterpart among Python's OSErrors also derive from that OSError. So `except
    IOError` catches a missing shard, a denied shard and an unreachable object store, just as in a
    loader that opens files itself.
    """


class NotFoundError(OriginError, FileNotFoundError, code="not_found"):
    """The object or bucket does not exist, or the pattern matches nothing."""

    default_remedy = (
        'check the url for typos, and end a prefix or folder with "/"; '
        "list the bucket or folder with the object store's own tool"
    )


class AccessDeniedError(OriginError, PermissionError, code="access_denied"):
    """The object store rejects the daemon's credentials."""

    default_remedy = (
        "give the daemon credentials that can read this url (AWS_PROFILE, "
        "GOOGLE_APPLICATION_CREDENTIALS, an instance role, or an [[origin]] table of its "
        "config), or `anon = true` for public data"
    )


class NotAllowedError(OriginError, code="not_allowed"):
    """The url is outside the prefixes that this daemon is allowed to fetch."""

    default_remedy = "ask the node's operator to add the prefix to --allow"


class MissingPackageError(OriginError, code="missing_package"):
    """The url's filesystem, or its compression, needs a Python package that the daemon lacks."""


class NotAnIndexError(OriginError, code="not_an_index"):
    """A url has the name of an index, such as one in .json, but the object lists no shards."""


class OriginUnavailableError(OriginError, OSError, code="origin_unavailable", retryable=True):
    """All retries failed with timeouts, connection resets, 5xx responses or throttling."""

    default_remedy = (
        "check the network path from this node to the object store, and the store's own health; "
        "then retry"
    )
    retry_after_s = 0
    """Seconds that the object store asks to wait before the next attempt."""
    has_expired = False
    """True if the object store refuses the credentials because they have expired."""


class OriginBusyError(OriginUnavailableError, code="origin_busy"):
    """The object store throttles requests: 503 SlowDown or 429."""

    default_remedy = (
        "lower --max-connections on the nodes that read from this object store, or ask its "
        "operator for a higher rate"
    )


class ShardChangedError(OriginError, code="shard_changed", retryable=True):
    """The object was replaced while it was being fetched."""

    default_remedy = "wait until the shard is completely written before training reads it"


class OutdatedError(OriginError, code="outdated"):
    """The object store no longer holds the version that an index file or a running job names."""

    default_remedy = (
        "if the dataset uses an index file, update it: `shardcache index INDEX -o INDEX` reads "
        "only the shards that changed; then restart the job, which lists the shards again"
    )


class ShardError(ShardcacheError, code="shard"):
    """The object was fetched, but is not a shard that can be served."""


class NotATarError(ShardError, code="not_a_tar"):
    """The object is not a tar archive."""

    default_remedy = (
        "point the dataset at shards of a format that it reads (docs: Formats); shardcache write "
        "makes tars from folders, parquet and JSONL"
    )


class TruncatedShardError(ShardError, code="truncated"):
    """The tar ends early: inside a member, or without an end-of-archive block."""

    default_remedy = (
        "write and upload the shard again; it was cut short before it reached the object store"
    )


class TrailingDataError(ShardError, code="trailing_data"):
    """Data follows the tar's end-of-archive block, where other readers stop silently."""

    default_remedy = (
        "if the file consists of several tars, join them with `tar --concatenate`; if zeros "
        "replaced part of the shard, write and upload it again; if the data is irrelevant, set "
        "`ignore_trailing_data = true` in its [[origin]] table"
    )


class TornSampleError(ShardError, code="torn_sample"):
    """Members of one sample are not adjacent in the tar.

    A reader would take each part of the sample for a whole sample.
    """

    default_remedy = (
        "extract the tar and pack it again with `tar --sort=name`, or have `shardcache write` make "
        "shards of the folder; if the order is intended, set `require_adjacent = false` in its "
        "[[origin]] table"
    )


class CorruptShardError(ShardError, code="corrupt"):
    """Data does not match the checksum recorded by the object store or the cache."""

    default_remedy = (
        "upload the shard again; if its copy in the object store is right, check the disk of the "
        "node's cache (dmesg)"
    )


class UnsupportedShardError(ShardError, code="unsupported_shard"):
    """Decompressing or indexing the shard needs more memory than one shard is allowed."""

    default_remedy = (
        "compress the shard with a smaller window (`xz -9`, `zstd --long=27`), or not at all"
    )


class TokensError(ShardError, code="bad_tokens"):
    """A sample of the shard has no array of tokens, or one of another type."""

    default_remedy = (
        "write the tokens of each sample as one array of integers with one dimension, all of one "
        "type"
    )


class MetadataError(ShardError, code="bad_metadata"):
    """A sample's metadata is not a JSON object, or too large for the table of samples."""

    default_remedy = (
        "write it as one JSON object, and keep only what select() asks for: "
        "shardcache index URL... -o index.json --samples --metadata json:width,height"
    )


class CountMismatchError(ShardError, code="count_mismatch"):
    """The number of samples in a shard differs from the manifest."""

    default_remedy = "rebuild the dataset's index: shardcache index URL... -o FILE"


class CacheError(ShardcacheError, code="cache"):
    """The node's cache cannot serve the request."""


class ExhaustedError(CacheError, code="exhausted", retryable=True):
    """The daemon has run out of file descriptors, memory or connections."""

    default_remedy = (
        "raise the daemon's limits: LimitNOFILE= and MemoryMax= in its unit, or ulimit -n and -v"
    )


class CapacityError(CacheError, code="capacity"):
    """The shard does not fit into the cache next to the shards in use."""

    default_remedy = "raise --capacity, or write smaller shards"


class DiskError(CacheError, code="disk", retryable=True):
    """The cache's disk or folder is unusable; cached shards that are still readable are served."""


class DiskFullError(DiskError, code="disk_full"):
    """The cache's filesystem is full, regardless of the configured capacity."""

    default_remedy = "free space on the cache's filesystem or lower --capacity"


class DiskFailedError(DiskError, code="disk_failed"):
    """The disk fails to read or write: I/O errors, or the kernel remounted it read-only."""

    default_remedy = (
        "see dmesg for the kernel's disk errors; repair or replace the disk, the daemon then "
        "recovers by itself"
    )


class CacheDirError(DiskError, code="cache_dir"):
    """The cache folder is missing, not writable, or in use by another daemon."""


class CacheFormatError(CacheDirError, code="cache_format"):
    """The format of the cache folder is unknown to this release."""


class DaemonError(ShardcacheError, code="daemon"):
    """Communication with the daemon failed."""


class NoDaemonError(DaemonError, code="no_daemon", retryable=True):
    """Nothing listens on the socket, or the connection was lost."""

    default_remedy = "start it: shardcache serve --cache-dir /path/on/local/disk --capacity 500GB"


class StoppingError(NoDaemonError, code="stopping"):
    """The daemon is shutting down and accepts no new requests."""

    default_remedy = "retry once the daemon has been restarted; everything fetched so far is kept"


class SocketInUseError(DaemonError, code="socket_in_use"):
    """Another daemon listens on the socket."""

    default_remedy = "stop the other daemon, or give this one its own --socket"


class VersionMismatchError(DaemonError, code="version_mismatch"):
    """Client and daemon have no protocol version in common."""


class ProtocolError(DaemonError, code="protocol"):
    """A message violates the protocol."""


class ShardTimeoutError(DaemonError, code="shard_timeout", retryable=True):
    """A shard did not arrive within the reader's timeout."""


class InputError(ShardcacheError, code="input"):
    """A file to be written to shards is missing or malformed, or changes while it is being read."""


class SampleError(ShardcacheError, code="sample"):
    """One sample of an intact shard, or one to be written, is unusable.

    Two of its members have the same name, for example.
    """


class DecodeError(SampleError, code="decode"):
    """The function that decodes samples raised an exception."""


class MissingMemberError(SampleError, code="missing_member"):
    """A sample lacks a member that it was expected to have."""

    @classmethod
    def of(
        cls,
        extension: str,
        sample: Mapping[str, Any],
        unread: Iterable[str] = (),
        *,
        is_named: bool = True,
    ) -> Self:
        """Build for a sample.

        Args:
            extension: extension of the missing member.
            sample: the sample, a dict with its `__key__`, `__url__` and members.
            unread: extensions of members in the shard that were not read.
            is_named: True if the dataset names the member. If not, other samples have the member,
                and the option `missing` has no effect until the dataset names it.
        """
        present = sorted(name for name in sample if not name.startswith("__"))
        not_read = sorted(unread)
        listed = ", ".join(present) or "none of those read"
        if not_read:
            listed += f"; not read: {', '.join(not_read)}"
        return cls(
            f"the sample {sample.get('__key__')!r} has no member {extension!r} (it has: {listed})",
            url=sample.get("__url__"),
            remedy=member_remedy(extension, present, not_read, is_named=is_named),
        )


class UnmatchedKeyError(SampleError, code="unmatched_key"):
    """A sample has no partner with its key, or several, in the shards it is joined with."""

    default_remedy = (
        "if the partners are in other shards, write tables of the keys next to both index files: "
        "shardcache index URL... -o index.json --samples; else rewrite the shards, "
        "or give Joined missing='skip', or default values of the members"
    )


class SampleKeyError(SampleError, KeyError, code="sample_key"):
    """No sample has the key that was asked for, or several have it."""


class RanksError(ShardcacheError, code="ranks"):
    """The ranks of a training job are inconsistent."""


class RankTimeoutError(RanksError, code="rank_timeout"):
    """A rank did not show up within the other ranks' timeout."""

    default_remedy = (
        "check what that rank is doing: it may have failed, ended its epoch early, or never "
        "created the dataset; if only one rank uses a dataset, create it with rank=0, world_size=1"
    )


class ManifestMismatchError(RanksError, code="manifest_mismatch"):
    """Ranks got different shard lists for the same urls."""

    default_remedy = (
        "use one list for all ranks: initialise torch.distributed before creating the dataset, "
        "so that every rank uses rank 0's list; or give the dataset an index file as its url "
        "(shardcache index)"
    )


class EpochMismatchError(RanksError, code="epoch_mismatch"):
    """A rank has abandoned an epoch that the other ranks are still reading, more than once."""

    default_remedy = (
        "call dataset.set_epoch(epoch) before each iteration, on every rank; to iterate on one "
        "rank alone, create a dataset with rank=0, world_size=1"
    )


def internal_error(exn: Exception, url: str | None = None) -> ShardcacheError:
    """Return the error for an unexpected exception in the daemon, whose log has the traceback."""
    remedy = "this is a fault of shardcache; report it with what the daemon's log says of it"
    return ShardcacheError(f"internal error in the daemon: {exn!r}", url=url, remedy=remedy)


def from_json(fields: dict[str, Any]) -> ShardcacheError:
    """Rebuild an error from `to_json`; an unknown code becomes its nearest known parent class.

    A newer daemon may send codes that this client does not know. The client still gets the message,
    and a class to catch. Malformed fields are dropped: the error matters more than its details.
    """
    error_class = _nearest_class(fields)
    error = error_class(
        str(fields.get("message", "")),
        url=_text_or_none(fields.get("url")),
        remedy=_text_or_none(fields.get("remedy")),
    )
    error.yielded = _yielded(fields)
    return error


def _nearest_class(fields: dict[str, Any]) -> type[ShardcacheError]:
    """Return the class with an error's code, else the class of its nearest known parent."""
    nearest_first = [fields.get("code")]
    parents = fields.get("parents")
    if isinstance(parents, list | tuple):
        nearest_first += parents
    known = ShardcacheError.by_code()
    for code in nearest_first:
        if isinstance(code, str) and code in known:
            return known[code]
    return ShardcacheError


def _yielded(fields: dict[str, Any]) -> int:
    """Return the field `yielded` of an error's JSON; 0 if it is missing or malformed."""
    yielded = fields.get("yielded")
    return yielded if isinstance(yielded, int) else 0


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None
