"""Runtime settings: changes apply immediately and last until the daemon exits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import structlog
from pydantic import TypeAdapter, ValidationError

from shardcache.access.rules import Peer
from shardcache.cache.residency.evictor import Evictor
from shardcache.config import Amount, Settings
from shardcache.errors import ConfigError, NotAllowedError, did_you_mean
from shardcache.fetch.download import Downloader
from shardcache.observability.logs import threshold
from shardcache.store.disk.files import total_bytes
from shardcache.store.store import Store

log = structlog.get_logger()

Json = dict[str, Any]
# Applies a parsed value; returns further fields for the answer.
Apply = Callable[[Any], Awaitable[Json]]

_NONE = "none"  # removes a limit


class RuntimeSettings:
    """Reads and changes runtime settings, by their names in `Settings`."""

    def __init__(self, settings: Settings, store: Store, evictor: Evictor, downloader: Downloader) -> None:
        self._settings = settings
        self._store = store
        self._evictor = evictor
        self._downloader = downloader
        self._max_bandwidth: int | None = settings.max_bandwidth
        self._apply: dict[str, Apply] = {
            "capacity": self._set_capacity,
            "max_bandwidth": self._set_max_bandwidth,
            "log_level": self._set_log_level,
        }

    def rows(self) -> list[Json]:
        """Return name, present value and description of each setting."""
        present = {
            "capacity": self._store.space.capacity_bytes,
            "max_bandwidth": self._max_bandwidth,
            "log_level": threshold.level,
        }
        return [
            {"name": name, "value": present[name], "description": Settings.model_fields[name].description}
            for name in self._apply
        ]

    async def set(self, name: str, text: str, peer: Peer) -> Json:
        """Change a setting, given its value as in a flag; return its row, the `former` value and any effects.

        Raises NotAllowedError if the user is not trusted, ConfigError for an invalid setting or value, CapacityError if
        the cache cannot shrink to the new capacity.
        """
        if not peer.is_trusted:
            raise NotAllowedError(
                "only the daemon's own user and root can change its settings",
                remedy="ask the node's operator, or use sudo",
            )
        if name not in Settings.model_fields:
            raise ConfigError(
                f"there is no setting {name!r}{did_you_mean(name, self._apply)}",
                remedy=f"choose one of {', '.join(map(_flag, self._apply))}",
            )
        if name not in self._apply:
            raise ConfigError(
                f"{_flag(name)} cannot be changed while the daemon runs",
                remedy=f"choose one of {', '.join(map(_flag, self._apply))}, or restart the daemon with another value",
            )
        former = self._row(name)["value"]
        told = await self._apply[name](_read(name, text))
        row = self._row(name)
        log.info("setting changed", name=name, value=row["value"], former=former, uid=peer.uid)
        return row | {"former": former} | told

    def _row(self, name: str) -> Json:
        return next(row for row in self.rows() if row["name"] == name)

    async def _set_capacity(self, amount: Amount) -> Json:
        filesystem_bytes = await asyncio.to_thread(total_bytes, self._store.layout.root)
        told: Json = {"freed_bytes": await self._evictor.resize(amount.of(filesystem_bytes))}
        warning = amount.excess(filesystem_bytes)
        return told | {"warning": warning} if warning else told

    async def _set_max_bandwidth(self, limit_bytes_per_s: int | None) -> Json:
        self._max_bandwidth = limit_bytes_per_s
        self._downloader.limit(limit_bytes_per_s)
        return {}

    async def _set_log_level(self, level: str) -> Json:
        threshold.level = level
        return {}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _read(name: str, text: str) -> Any:
    field = Settings.model_fields[name]
    kind: Any = Annotated[field.annotation, field]
    try:
        return TypeAdapter(kind).validate_python(None if text == _NONE else text)
    except ValidationError as exn:
        reason = exn.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"invalid {_flag(name)} {text!r}: {reason}", remedy="run `shardcache set` for the settings and their values"
        ) from None
