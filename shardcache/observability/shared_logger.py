"""Logger of modules that run in training processes, too, for direct reads."""

from __future__ import annotations

import logging
from typing import Any

import structlog
from structlog.typing import EventDict

from shardcache.redact import redact


class SharedLogger:
    """Writes where structlog is configured to write: in the daemon, to its log.

    Elsewhere it writes to the logger `shardcache` of `logging`, as the client does: stdout, where structlog writes by
    default, belongs to the training program.
    """

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(), method)
        own = logging.getLogger("shardcache")
        return getattr(structlog.wrap_logger(own, [_sentence], structlog.stdlib.BoundLogger), method)


def _sentence(_logger: Any, _method: str, event: EventDict) -> str:
    text = redact(str(event.pop("event")))
    facts = ", ".join(f"{name}={redact(str(value))}" for name, value in event.items())
    return f"{text} ({facts})" if facts else text
