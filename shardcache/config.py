"""`Settings`: the single definition of the daemon's options.

Each field is a flag (`--part-size`), an environment variable (`SHARDCACHE_PART_SIZE`) and a key of
the TOML file (`part_size`), in this order of precedence.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_core import ErrorDetails

from shardcache.access import AllowRule
from shardcache.errors import ConfigError, did_you_mean
from shardcache.front import FRONT
from shardcache.protocol import CONFIG_ENV, DEFAULT_CONFIG, SOCKET_ENV
from shardcache.units import size
from shardcache.unix_socket import MAX_SOCKET_BYTES

VARIABLE_PREFIX = "SHARDCACHE_"
MIB = 1024 * 1024

# Overhead of the smallest shard: sidecar, journal and index.
MIN_CAPACITY_BYTES = 64 * 1024
_BLOCK_BYTES = 4096
_BYTES = pydantic.TypeAdapter(ByteSize)

# Read by the client and the command line.
_OTHER_VARIABLES = {CONFIG_ENV, SOCKET_ENV, "SHARDCACHE_JOB", "SHARDCACHE_TUNE_MALLOC"}
# Kubernetes sets these in every pod if there is a service named shardcache.
_SERVICE_LINK = re.compile(r"SHARDCACHE_(?:SERVICE_|PORT(?:_|$))")


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of the options, in order of precedence: what sets each of them is named in errors."""

    flags: Mapping[str, Any]
    env: Mapping[str, str]
    file: Path

    def values(self) -> dict[str, Any]:
        """Return the values that are set, as they are written.

        Raises OSError or ValueError if the file is unusable.
        """
        found: dict[str, Any] = {}
        if self.file.exists():
            found |= tomllib.loads(self.file.read_text())
        for name in Settings.model_fields:
            variable = self._variable(name)
            if variable is not None:
                found[name] = self.env[variable]
        return found | dict(self.flags)

    def kind(self, name: str) -> str:
        """Return `flag`, `environment` or `file` for an option that is set."""
        if name in self.flags:
            return "flag"
        return "file" if self._variable(name) is None else "environment"

    def place(self, loc: tuple[int | str, ...]) -> str:
        """Return where an option, or a part of one, is set.

        `--capacity`, `$SHARDCACHE_CAPACITY`, or a line of the file.

        Args:
            loc: the option and the way to its part: keys, indices of tables, and pydantic's names
                of validators.
        """
        name = str(loc[0])
        if name in self.flags:
            return "--" + name.replace("_", "-")
        variable = self._variable(name)
        if variable is not None:
            return f"${variable}"

        dotted = ".".join(str(part) for part in loc if not str(part).startswith("function-"))
        place = f"{dotted} in {self.file}"
        line = _line_of(loc, self.file.read_text())
        return place if line is None else f"{place}, line {line}"

    def _variable(self, name: str) -> str | None:
        wanted = VARIABLE_PREFIX + name.upper()
        return next((each for each in self.env if each.upper() == wanted), None)


_HEADER = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]+")


def _line_of(loc: tuple[int | str, ...], toml: str) -> int | None:
    """Return the line number of a key in a TOML file, or else that of its table's header.

    Args:
        loc: `(option,)`; or `(table, number, key)`, where `number` counts the tables of one name
            from 0.
        toml: text of the file, which is well-formed.
    """
    option, *keys = [part for part in loc if isinstance(part, str)]
    number = next((part for part in loc if isinstance(part, int)), 0)
    table = ""  # whose keys the present line is among; empty before the first table
    count = 0  # of tables of that name so far, one after another
    header_line = None
    for line, text in enumerate(toml.splitlines(), 1):
        header = _HEADER.match(text)
        if header is not None:
            count = count + 1 if header[1] == table else 1
            table = header[1]
        is_in_table = table == option and count == number + 1
        if is_in_table and header_line is None:
            header_line = line

        if not table and _sets(text, option):
            return line
        if is_in_table and keys and _sets(text, keys[0]):
            return line
    return header_line


def _sets(text: str, key: str) -> bool:
    """Return True for a line of TOML that sets a key, which may be quoted."""
    return re.match(rf"""\s*["']?{re.escape(key)}["']?\s*=""", text) is not None


@dataclass(frozen=True, slots=True)
class Amount:
    """A size on disk: a number of bytes, or a fraction of the filesystem that holds the cache."""

    value_bytes: int = 0
    fraction: float | None = None

    @classmethod
    def parse(cls, text: object) -> "Amount":
        """Parse `200GB`, `1.5TiB`, `80%` or a plain number of bytes."""
        if isinstance(text, Amount):
            return text
        if isinstance(text, str) and text.strip().endswith("%"):
            percent = float(text.strip().removesuffix("%"))
            if not 0 <= percent <= 100:
                raise ValueError("a percentage must be between 0% and 100%")
            return cls(fraction=percent / 100)
        return cls(value_bytes=int(_BYTES.validate_python(text)))

    def of(self, filesystem_bytes: int) -> int:
        """Return the amount in bytes on a filesystem of the given size."""
        return self.value_bytes if self.fraction is None else int(filesystem_bytes * self.fraction)

    def excess(self, filesystem_bytes: int) -> str | None:
        """Return a warning if the amount exceeds the size of the filesystem, else None."""
        if self.of(filesystem_bytes) <= filesystem_bytes:
            return None
        capacity = size(self.value_bytes)
        filesystem = size(filesystem_bytes)
        return f"the capacity of {capacity} exceeds the size of its filesystem ({filesystem})"


def _holds_a_shard(capacity: Amount) -> Amount:
    is_small = capacity.fraction is None and capacity.value_bytes < MIN_CAPACITY_BYTES
    if is_small or capacity.fraction == 0:
        found = size(capacity.value_bytes)
        raise ValueError(f"{found} cannot hold a single shard; add a unit, such as 500GB or 80%")
    return capacity


Size = Annotated[Amount, BeforeValidator(Amount.parse)]
Capacity = Annotated[Size, AfterValidator(_holds_a_shard)]


def _whole_blocks(value: ByteSize) -> ByteSize:
    """Round to whole disk blocks, so that 8MB is as good as 8MiB."""
    return ByteSize((value + _BLOCK_BYTES // 2) // _BLOCK_BYTES * _BLOCK_BYTES)


def _per_second(text: object) -> object:
    return text.strip().removesuffix("/s") if isinstance(text, str) else text


def _front(text: str | None) -> str | None:
    if text is None:
        return None
    is_socket_path = text.startswith("/") and len(os.fsencode(text)) <= MAX_SOCKET_BYTES
    if not is_socket_path:
        raise ValueError(f"{text!r} is not the path of a Unix socket, such as {FRONT}")
    return text


def _parsed(value: object) -> object:
    """Parse tables that come from the environment."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        raise ValueError('write the tables as a list in JSON: [{"match": "s3://bucket/", …}]') from None


_MAX_PRICE = 1e15  # so that no cost is beyond the numbers of JSON


class OriginTable(pydantic.BaseModel):
    """One `[[origin]]` table: access settings for the urls that begin with `match`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    match: str = Field(description="url prefix that this table applies to; the longest match wins")
    endpoint_url: str | None = Field(None, description="endpoint of S3, Google Cloud Storage or Azure")
    region: str | None = Field(None, description="S3 region")
    profile: str | None = Field(None, description="profile in the AWS config files")
    anon: bool = Field(False, description="send unsigned requests, without credentials")
    tier: Annotated[str | None, AfterValidator(_front)] = Field(
        None,
        description="socket of this node's nginx of the cluster's cache, requested before the origin",
    )
    require_end: bool = Field(
        True,
        description="reject tars without an end-of-archive block; false accepts them as complete",
    )
    ignore_trailing_data: bool = Field(
        False,
        description="accept tars with data after the end-of-archive block and ignore that data, as tar does",
    )
    require_adjacent: bool = Field(
        True,
        description="reject tars in which a key comes again with other members; false takes them "
        "for another sample, as webdataset does, and shards are not read while they "
        "arrive",
    )
    verify_etag: bool = Field(
        True,
        description="verify an ETag that may be an MD5 where S3 has no checksum, and Azure's Content-MD5",
    )
    price_per_gb: float | None = Field(
        None,
        ge=0,
        le=_MAX_PRICE,
        description="price of 10^9 bytes from this store, in any currency",
    )
    price_per_1000_requests: float | None = Field(
        None, ge=0, le=_MAX_PRICE, description="price of 1,000 requests to this store"
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="options for the fsspec filesystem; for web servers: headers, cookies, params and proxy",
        repr=False,
    )

    def cost(self, size_bytes: int, requests: int) -> float | None:
        """Return the price of bytes and requests; None if no price is set."""
        if self.price_per_gb is None and self.price_per_1000_requests is None:
            return None
        of_bytes = size_bytes / 1e9 * (self.price_per_gb or 0)
        of_requests = requests / 1e3 * (self.price_per_1000_requests or 0)
        return of_bytes + of_requests


_NO_TABLE = OriginTable(match="")  # type: ignore[call-arg]  # the other fields have defaults


def rule_of(tables: Sequence[OriginTable], url: str) -> OriginTable:
    """Return the table with the longest `match` that the url begins with; defaults without one."""
    matching = (each for each in tables if url.startswith(each.match))
    return max(matching, key=lambda each: len(each.match), default=_NO_TABLE)


def config_file(given: Path | None = None) -> Path:
    """Return the config file given, else that of `$SHARDCACHE_CONFIG`, else the node's."""
    return given or Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)


def default_cache_dir() -> Path:
    """Return root's cache folder, or one in the user's own cache directory."""
    if os.getuid() == 0:
        return Path("/var/cache/shardcache")
    given = os.environ.get("XDG_CACHE_HOME")
    base = Path(given) if given else Path.home() / ".cache"
    return base / "shardcache"


class Settings(pydantic.BaseModel):
    """Every option of `shardcache serve`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    cache_dir: Path = Field(default_factory=default_cache_dir, description="folder on a local disk for the shards")
    capacity: Capacity = Field(
        "80%",  # type: ignore[assignment]  # parsed by Amount.parse, and shown as written
        description="maximum size of the cache: 200GB, 1.5TiB, or a share of its filesystem such as 80%",
    )
    min_free: Size = Field(
        "5%",  # type: ignore[assignment]
        description="space always kept free on the cache's filesystem",
    )
    max_pinned: Size = Field(
        "80%",  # type: ignore[assignment]
        description="maximum total size of pinned shards: a size, or a share of the capacity",
    )
    socket: Path | None = Field(None, description="Unix socket for jobs and tools [default: automatic]")
    group: str | None = Field(
        None,
        description="group allowed to use the socket and read the cache [default: the daemon's own]",
    )
    allow: tuple[Annotated[AllowRule, BeforeValidator(AllowRule.parse)], ...] = Field(
        (), description="url prefix from which shards may be fetched; repeatable [default: any]"
    )
    http: str | None = Field(
        None,
        description="HOST:PORT for read-only status over TCP, such as 127.0.0.1:9300 [default: off]",
    )
    http_token_file: Path | None = Field(
        None,
        description="file with the token for TCP requests; required beyond loopback [default: none]",
    )
    socket_connections: int | None = Field(
        None,
        ge=8,
        description="maximum connections to the socket [default: as many as there may be open files]",
    )
    user_connections: int | None = Field(
        None,
        ge=4,
        description="maximum connections of one user, root and the daemon's own excepted [default: half]",
    )
    max_connections: int = Field(16, ge=1, le=1024, description="maximum connections to all origins")
    shard_connections: int = Field(8, ge=1, le=256, description="maximum connections for one shard")
    max_transfers: int = Field(
        4,
        ge=1,
        le=256,
        description="maximum shards prefetched in parallel; those a reader waits for are extra",
    )
    max_bandwidth: Annotated[ByteSize | None, BeforeValidator(_per_second)] = Field(
        None,
        ge=64 * 1024,
        description="maximum bytes per second from all origins, such as 500MB [default: no limit]",
    )
    part_size: Annotated[ByteSize, AfterValidator(_whole_blocks)] = Field(
        ByteSize(8 * MIB),
        ge=64 * 1024,
        le=1024 * MIB,
        description="bytes checksummed and recorded together; a request fetches one to four parts",
    )
    plan_memory: ByteSize = Field(
        ByteSize(2048 * MIB),
        ge=1 * MIB,
        description="maximum memory for the plans of all readers together; one reader may use half of it",
    )
    attempts: int = Field(10, ge=1, le=100, description="attempts per part before its shard fails")
    stall_timeout_s: float = Field(
        20.0, gt=0, description="seconds below 1 KiB/s after which a part is requested again"
    )
    listing_ttl_s: float = Field(60.0, ge=0, description="seconds for which a listing of the origin is reused")
    scrub_rate: Annotated[ByteSize, BeforeValidator(_per_second)] = Field(
        ByteSize(10 * MIB),
        ge=0,
        description="bytes per second at which cached shards are re-read and verified (scrubbed); 0 disables it",
    )
    scrub_pause_s: float = Field(3600.0, ge=0, description="seconds between two scrub rounds")
    idle_exit_s: float | None = Field(
        None,
        gt=0,
        description="seconds without a session after which the daemon stops [default: never; private: 600]",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="minimum log level")
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    origin: Annotated[tuple[OriginTable, ...], BeforeValidator(_parsed)] = Field(
        (), description="[[origin]] tables; in the environment, a list in JSON; no flag"
    )

    @pydantic.field_validator("allow", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    @classmethod
    def load(cls, flags: Mapping[str, Any], config: Path | None = None) -> "Settings":
        """Build from flags (only those given), environment and file.

        Raises ConfigError naming every invalid option, or a config file that cannot be read.
        """
        path = config_file(config)
        if config or os.environ.get(CONFIG_ENV):
            _must_be_file(path)
        return _loaded(Sources(flags, os.environ, path))

    @classmethod
    def read(cls, file: Path) -> "Settings":
        """Build from a config file alone.

        Raises ConfigError naming every invalid option, or that it cannot be read.
        """
        _must_be_file(file)
        return _loaded(Sources({}, {}, file))


def _loaded(sources: Sources) -> Settings:
    try:
        return Settings(**sources.values())
    except pydantic.ValidationError as exn:
        wrong = "; ".join(f"{sources.place(one['loc'])}: {_reason(one)}" for one in exn.errors())
        raise ConfigError(wrong, remedy="see `shardcache serve --help`") from None
    except (ValueError, OSError) as exn:  # a TOML file that is malformed or not readable
        remedy = f"correct the file; check it with: shardcache config check {sources.file}"
        raise ConfigError(f"cannot read {sources.file}: {exn}", remedy=remedy) from None


def _must_be_file(path: Path) -> None:
    try:
        is_file = path.is_file()
    except OSError as exn:
        raise ConfigError(
            f"cannot read {path}: {exn}",
            remedy="make its folder accessible",
        ) from None
    if not is_file:
        raise ConfigError(f"no config file at {path}", remedy="correct the path, or omit it")


def unknown_variables() -> Iterator[tuple[str, str | None]]:
    """Yield each unknown SHARDCACHE_ variable with the closest known name, or None."""
    known = {VARIABLE_PREFIX + name.upper() for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in sorted(os.environ):
        if not name.startswith(VARIABLE_PREFIX) or _SERVICE_LINK.match(name):
            continue
        if name.upper() not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            yield name, similar[0] if similar else None


def _reason(error: ErrorDetails) -> str:
    """Return what is wrong with one option, in the user's terms rather than pydantic's."""
    *tables, name = error["loc"]
    if error["type"] == "extra_forbidden":
        known = OriginTable.model_fields if tables else Settings.model_fields
        return f"unknown option{did_you_mean(str(name), known)}"
    if error["type"] == "tuple_type" and name in ("origin", "allow"):
        return f"write [[{name}]], once per table"
    field = Settings.model_fields.get(str(name))
    bounds = error.get("ctx", {})
    if field is not None and "ByteSize" in str(field.annotation) and bounds.keys() & {"ge", "le"}:
        if "ge" in bounds:
            return f"at least {size(bounds['ge'])}"
        return f"at most {size(bounds['le'])}"
    return str(error["msg"]).removeprefix("Value error, ")
