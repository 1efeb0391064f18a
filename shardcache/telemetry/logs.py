"""Format of the daemon's log lines, and their redaction.

`SharedLogger` is for modules that also run in training processes.
"""

import contextlib
import logging
import sys
from contextlib import AbstractContextManager
from typing import Any, TextIO, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor

from shardcache.shared.wording.redact import printable, redact

_MAX_CHARS = 512


def about(**facts: object) -> AbstractContextManager[None]:
    """Add facts, such as job, shard or user, to the lines that are logged during the block.

    Tasks that are created in the block add them to all of their lines.
    """
    shown = {name: _shown(value) for name, value in facts.items()}
    return structlog.contextvars.bound_contextvars(**shown)


def _shown(fact: object) -> object:
    """Return a fact as it is logged: a text without secrets, and cut to a maximum length."""
    return redact(fact)[:_MAX_CHARS] if isinstance(fact, str) else fact


def configure(level: str, form: str) -> None:
    """Write the daemon's log lines, and those of libraries, to stderr.

    Lines include the facts set by `about`. Secrets in urls are redacted, and tracebacks omit local
    variables, which may hold credentials.

    Args:
        level: the minimum level: "debug", "info", "warning" or "error".
        form: "text" for people, or "json" with one object per line.
    """
    min_level = logging.getLevelNamesMapping()[level.upper()]
    # Processors for the daemon's own lines and those of libraries, before `rendering`.
    first: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _on_one_line,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _json_processors() if form == "json" else _text_processors()
    rendering.append(_redacted)
    structlog.configure(
        processors=[*first, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(min_level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=True,
    )
    # Lines of libraries.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *first],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    handler.setLevel(min_level)
    handler.addFilter(_is_worth_logging)
    # Messages below "warning" do not help a node's operator, and some contain whole requests.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(capture=True)


def _json_processors() -> list[Processor]:
    """Return the structlog processors that render an event as JSON."""
    tracebacks = structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False))
    return [tracebacks, structlog.processors.JSONRenderer()]


def _text_processors() -> list[Processor]:
    """Return the structlog processors that render an event as text for people."""
    formatter = structlog.dev.plain_traceback  # the default formatter shows local variables
    return [
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=formatter)
    ]


def _on_one_line(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Escape the control characters in an event's texts; a structlog processor."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
    return event


def _redacted(_logger: Any, _method: str, line: Any) -> str:
    """Return a rendered line without secrets; a structlog processor."""
    return redact(str(line))


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Return False for errors about malformed HTTP requests, which are answered with status 400.

    Anyone who can reach the port could fill the disk with them.
    """
    if record.exc_info is None:
        return True
    from aiohttp.http import HttpProcessingError  # already loaded if there is a server

    _class, exn, _traceback = record.exc_info
    return not isinstance(exn, HttpProcessingError)


class _Stderr:
    """Standard error that ignores errors: a full disk must not end the daemon."""

    def write(self, text: str) -> None:
        """Write a line, ignoring errors."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        """Flush standard error, ignoring errors."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class SharedLogger:
    """Logger of modules that run in the daemon and in training processes.

    In the daemon, which calls `configure`, it is structlog's logger. In other processes, it writes
    to the logger `shardcache` of `logging`, as the client does: structlog would write to stdout,
    which belongs to the training program.
    """

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(), method)
        client_logger = logging.getLogger("shardcache")
        logger = structlog.wrap_logger(client_logger, [_sentence], structlog.stdlib.BoundLogger)
        return getattr(logger, method)


def _sentence(_logger: Any, _method: str, event: EventDict) -> str:
    """Return an event as plain text, with its facts in parentheses; a structlog processor."""
    text = redact(str(event.pop("event")))
    facts = ", ".join(f"{name}={redact(str(value))}" for name, value in event.items())
    return f"{text} ({facts})" if facts else text
