"""OpenTelemetry traces of the daemon's transfers and waits, enabled by environment variables.

The variables are OpenTelemetry's own: an endpoint or an exporter turns traces on, `OTEL_SDK_DISABLED` or the exporter
`none` turns them off. OpenTelemetry is imported only if traces are on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import structlog

from shardcache import __version__
from shardcache.errors import ShardcacheError
from shardcache.redact import redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = structlog.get_logger()

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Entry point names of OpenTelemetry's exporters, by protocol.
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
# Limit for flushing spans at shutdown: an unresponsive collector must not delay the daemon's exit.
_FLUSH_S = 2.0
_REMEDY = "pip install 'shardcache[otel]', which brings OTLP over http/protobuf, or the exporter's own package"


@dataclass(frozen=True, slots=True)
class Span:
    """A completed operation. Times are on the monotonic clock, in seconds.

    Attributes:
        url: url of the shard.
        stages: name, begin and end of each stage.
        error: the error that the operation failed with, if any.
    """

    name: str
    url: str
    begun_s: float
    ended_s: float
    attributes: Mapping[str, str | int]
    stages: tuple[tuple[str, float, float], ...] = ()
    error: ShardcacheError | None = None


class Traces:
    """Exporter of spans to OpenTelemetry."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("shardcache", __version__)

    def record(self, span: Span) -> None:
        """Export a span as a trace of its own, with a child span for each stage."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        wall_s = time.time() - time.monotonic()

        def nanoseconds(moment_s: float) -> int:
            return int((moment_s + wall_s) * 1e9)

        attributes = {"shardcache.url": redact(span.url), **span.attributes}
        whole = self._tracer.start_span(span.name, start_time=nanoseconds(span.begun_s), attributes=attributes)
        for stage, begun_s, ended_s in span.stages:
            child = self._tracer.start_span(stage, set_span_in_context(whole), start_time=nanoseconds(begun_s))
            child.end(nanoseconds(ended_s))
        if span.error is not None:
            whole.set_attribute("error.type", span.error.code)
            whole.set_status(Status(StatusCode.ERROR, span.error.message))
        whole.end(nanoseconds(span.ended_s))


@asynccontextmanager
async def tracing(env: Mapping[str, str] = os.environ) -> AsyncIterator[Traces | None]:
    """Send traces during the block, if the environment enables them; at its end, try to flush the remaining spans."""
    name = exporter_name(env)
    provider = None if name is None else _provider(name)
    if provider is None:
        yield None
        return
    log.info("traces enabled", exporter=name)
    try:
        yield Traces(provider)
    finally:
        sending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _FLUSH_S)


def exporter_name(env: Mapping[str, str]) -> str | None:
    """Return the entry point name of the exporter that the environment selects, or None if traces are off."""
    chosen = env.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(env.get, _ENDPOINTS)) else "none")
    if chosen == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if chosen != "otlp":
        return chosen
    protocol = next(filter(None, map(env.get, _PROTOCOLS)), "http/protobuf")
    return _OTLP.get(protocol, protocol)


def _provider(exporter: str) -> TracerProvider | None:
    """Return a provider that uses an exporter; None, with a warning, if the exporter is not installed."""
    found = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not found:
        log.warning("traces disabled: exporter not installed", exporter=exporter, remedy=_REMEDY)
        return None
    (kind,) = found
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # At lower levels, each failed attempt to reach the collector logs a line.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    own = {"service.name": "shardcache", "service.version": __version__}
    resource = Resource.create(own | dict(OTELResourceDetector().detect().attributes))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(kind.load()()))
    return provider
