"""`Settings`: the single definition of the daemon's options.

Each field is a flag (`--part-size`), an environment variable (`SHARDCACHE_PART_SIZE`) and a key of
the TOML file (`part_size`), in this order of precedence. The command line loads the settings, and
the composition root (`daemon.running`) passes them to the daemon's components.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, ByteSize, Field

from shardcache.access.rules import AllowRule
from shardcache.config.amounts import MIB, Capacity, PartSize, Rate, Size
from shardcache.config.option_sources import VARIABLE_PREFIX, Sources
from shardcache.config.origin_table import OriginTable
from shardcache.shared.exceptions import ConfigError
from shardcache.shared.socket_paths import CONFIG_ENV, DEFAULT_CONFIG, SOCKET_ENV
from shardcache.shared.units import size
from shardcache.shared.wording.remedies import did_you_mean

# Variables that are not options of the daemon: the client and the command line read them.
_OTHER_VARIABLES = {CONFIG_ENV, SOCKET_ENV, "SHARDCACHE_JOB", "SHARDCACHE_TUNE_MALLOC"}
# Kubernetes sets these variables in every pod if there is a service named shardcache. They are not
# misspelt options.
_SERVICE_LINK = re.compile(r"SHARDCACHE_(?:SERVICE_|PORT(?:_|$))")


def _tables(value: object) -> object:
    """Return the tables of a config file unchanged; parse the text of a variable as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        example = '[{"match": "s3://bucket/", …}]'
        raise ValueError(f"write the tables as a JSON list: {example}") from None


def config_file(path: Path | None = None) -> Path:
    """Return `path`, else the file that `$SHARDCACHE_CONFIG` names, else the node's config file."""
    if path is not None:
        return path
    return Path(os.environ.get(CONFIG_ENV) or DEFAULT_CONFIG)


def default_cache_dir() -> Path:
    """Return root's cache folder, or one in the user's own cache directory."""
    if os.getuid() == 0:
        return Path("/var/cache/shardcache")
    cache_home = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache_home) if cache_home else Path.home() / ".cache"
    return base / "shardcache"


class Settings(pydantic.BaseModel):
    """Every option of `shardcache serve`."""

    model_config = pydantic.ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,  # a default may be a text to parse, such as "80%"
        allow_inf_nan=False,
    )

    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="folder for cached shards, on a local disk",
    )
    capacity: Capacity = Field(
        "80%",  # type: ignore[assignment]  # parsed by DiskAmount.parse; help shows it as written
        description="maximum size of the cache, such as 200GB or 1.5TiB, or a share of its "
        "filesystem, such as 80%",
    )
    min_free: Size = Field(
        "5%",  # type: ignore[assignment]
        description="free space to leave on the cache's filesystem",
    )
    max_pinned: Size = Field(
        "80%",  # type: ignore[assignment]
        description="maximum total size of pinned shards, or their share of the capacity",
    )
    socket: Path | None = Field(
        None,
        description="Unix socket for jobs and commands [default: automatic]",
    )
    group: str | None = Field(
        None,
        description="group that may use the socket and read the cache [default: the daemon's own]",
    )
    allow: tuple[Annotated[AllowRule, BeforeValidator(AllowRule.parse)], ...] = Field(
        (),
        description="url prefix that shards may be fetched from; repeatable [default: any]",
    )
    http: str | None = Field(
        None,
        description="HOST:PORT that serves read-only status over TCP, such as 127.0.0.1:9300 "
        "[default: off]",
    )
    http_token_file: Path | None = Field(
        None,
        description="file with the token that TCP requests must carry; required beyond loopback "
        "[default: none]",
    )
    s3: str | None = Field(
        None,
        description="HOST:PORT that serves S3 clients from the cache, on loopback only, such as "
        "127.0.0.1:9099 [default: off]",
    )
    s3_key_life_s: float = Field(
        43_200.0,
        gt=0,
        description="seconds until a key for the S3 endpoint expires",
    )
    s3_stall_s: float = Field(
        60.0,
        gt=0,
        description="seconds without progress after which the S3 endpoint disconnects a client",
    )
    socket_connections: int | None = Field(
        None,
        ge=8,
        description="maximum connections to the socket [default: as many as the limit on open "
        "files allows]",
    )
    user_connections: int | None = Field(
        None,
        ge=4,
        description="maximum connections per user, except root and the daemon's own user "
        "[default: half of all]",
    )
    max_connections: int = Field(
        16,
        ge=1,
        le=1024,
        description="maximum connections to all origins together",
    )
    shard_connections: int = Field(
        8,
        ge=1,
        le=256,
        description="maximum connections per shard",
    )
    max_transfers: int = Field(
        4,
        ge=1,
        le=256,
        description="maximum shards prefetched at the same time; shards that a reader waits for "
        "do not count",
    )
    max_bandwidth: Annotated[ByteSize | None, Rate] = Field(
        None,
        ge=64 * 1024,
        description="maximum bytes per second from all origins together, such as 500MB [default: "
        "no limit]",
    )
    part_size: PartSize = Field(
        ByteSize(8 * MIB),
        ge=64 * 1024,
        le=1024 * MIB,
        description="size of a part, the unit that is checksummed and recorded; one request "
        "fetches one to four parts",
    )
    range_part_size: PartSize = Field(
        ByteSize(256 * 1024),
        ge=64 * 1024,
        le=64 * MIB,
        description="size of a part if only ranges of an object are read",
    )
    whole_from_percent: int | None = Field(
        None,
        ge=1,
        le=100,
        description="percentage of an object's parts that have to be read before the whole "
        "object is fetched [default: once they have cost as much as the whole, by both prices of "
        "the origin; 50 without prices]",
    )
    plan_memory: ByteSize = Field(
        ByteSize(2048 * MIB),
        ge=1 * MIB,
        description="maximum memory for the plans of all readers together; "
        "one reader may use half of it",
    )
    attempts: int = Field(
        10,
        ge=1,
        le=100,
        description="attempts to fetch a part before its shard fails",
    )
    stall_timeout_s: float = Field(
        20.0,
        gt=0,
        description="seconds below 1 KiB/s after which a part is requested again",
    )
    listing_ttl_s: float = Field(
        60.0,
        ge=0,
        description="seconds for which the listing of a prefix is reused",
    )
    scrub_rate: Annotated[ByteSize, Rate] = Field(
        ByteSize(10 * MIB),
        ge=0,
        description="bytes per second at which cached shards are read again and verified "
        "(scrubbed); 0 turns scrubbing off",
    )
    scrub_pause_s: float = Field(3600.0, ge=0, description="seconds between two scrub rounds")
    idle_exit_s: float | None = Field(
        None,
        gt=0,
        description="seconds without readers and changes after which the daemon stops [default: "
        "never; private: 600]",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="minimum log level",
    )
    log_format: Literal["text", "json"] = Field("text", description="format of log lines")
    origin: Annotated[tuple[OriginTable, ...], BeforeValidator(_tables)] = Field(
        (),
        description="[[origin]] tables of the config file; a JSON list in the environment; there "
        "is no flag",
    )

    @pydantic.field_validator("allow", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Return a list of prefixes unchanged; split the text of a variable at its commas."""
        if not isinstance(value, str):
            return value
        return tuple(prefix for prefix in value.split(",") if prefix)

    @classmethod
    def load(cls, flags: Mapping[str, Any], config: Path | None = None) -> "Settings":
        """Build from flags, environment and file.

        Args:
            flags: only the flags that the user has given.
            config: the config file; None for the one that `config_file` finds.

        Raises ConfigError, which names every invalid option, or says why the config file cannot be
        read.
        """
        path = config_file(config)
        is_named = config is not None or bool(os.environ.get(CONFIG_ENV))
        if is_named:  # without a name, it is the node's config file, which may be missing
            _must_be_file(path)
        return _from_sources(Sources(flags, os.environ, path))

    @classmethod
    def read(cls, file: Path) -> "Settings":
        """Build from a config file alone.

        Raises ConfigError, which names every invalid option, or says why the file cannot be read.
        """
        _must_be_file(file)
        return _from_sources(Sources(flags={}, env={}, file=file))


def unknown_variables() -> Iterator[tuple[str, str | None]]:
    """Yield each unknown SHARDCACHE_ variable, with the closest known name or None."""
    known = {VARIABLE_PREFIX + name.upper() for name in Settings.model_fields} | _OTHER_VARIABLES
    for name in sorted(os.environ):
        if not name.startswith(VARIABLE_PREFIX) or _SERVICE_LINK.match(name):
            continue
        if name.upper() not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            closest = similar[0] if similar else None
            yield name, closest


def _from_sources(sources: Sources) -> Settings:
    """Return the settings that flags, environment and file make up. Raises ConfigError."""
    try:
        return Settings(**sources.values(Settings.model_fields))
    except pydantic.ValidationError as exn:
        problems = [f"{sources.place(error['loc'])}: {_reason(error)}" for error in exn.errors()]
        raise ConfigError("; ".join(problems), remedy="see `shardcache serve --help`") from None
    except (ValueError, OSError) as exn:  # a TOML file that is malformed or not readable
        remedy = f"correct the file; check it with: shardcache config check {sources.file}"
        raise ConfigError(f"cannot read {sources.file}: {exn}", remedy=remedy) from None


def _must_be_file(path: Path) -> None:
    """Raise ConfigError unless there is a file at a path."""
    try:
        is_file = path.is_file()
    except OSError as exn:
        raise ConfigError(
            f"cannot read {path}: {exn}",
            remedy="make its folder accessible",
        ) from None
    if not is_file:
        raise ConfigError(f"no config file at {path}", remedy="correct the path, or omit it")


def _reason(error: Mapping[str, Any]) -> str:
    """Return what is wrong with one option, in the user's terms rather than pydantic's.

    Args:
        error: one of `ValidationError.errors()`.
    """
    # For the forms of `loc`, see `Sources.place`. Its last element is the name of an option or of a
    # table's key, or the number of an entry.
    *outer, name = error["loc"]
    if error["type"] == "extra_forbidden":
        known = OriginTable.model_fields if outer else Settings.model_fields
        return f"unknown option{did_you_mean(str(name), known)}"
    if error["type"] == "tuple_type" and name in ("origin", "allow"):
        return f"write [[{name}]], once per table"
    # pydantic's text would give the bound of a size as a number of bytes. The annotation is
    # compared as text, because an optional size is a union.
    field = Settings.model_fields.get(str(name))
    is_size = field is not None and "ByteSize" in str(field.annotation)
    bounds = error.get("ctx", {})
    if is_size and "ge" in bounds:
        return f"at least {size(bounds['ge'])}"
    if is_size and "le" in bounds:
        return f"at most {size(bounds['le'])}"
    return str(error["msg"]).removeprefix("Value error, ")
