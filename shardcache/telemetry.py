"""Traces of what took the daemon how long, sent by OpenTelemetry where the environment asks for them.

The variables are OpenTelemetry's own: an endpoint or an exporter turns traces on, `OTEL_SDK_DISABLED` or the exporter
`none` off. Without any of them nothing of it is imported.
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
# How OpenTelemetry's packages call what they install.
_OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
# A collector that does not answer shall not hold up the daemon's end.
_FLUSH_S = 2.0
_REMEDY = "pip install 'shardcache[otel]', which brings OTLP over http/protobuf, or the exporter's own package"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took its time. Moments are of the monotonic clock, in seconds.

    Attributes:
        url: of the shard.
        stages: what it consisted of: name, begin and end of each.
        error: what it ended with.
    """

    name: str
    url: str
    begun_s: float
    ended_s: float
    attributes: Mapping[str, str | int]
    stages: tuple[tuple[str, float, float], ...] = ()
    error: ShardcacheError | None = None


class Traces:
    """Where spans go."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("shardcache", __version__)

    def record(self, span: Span) -> None:
        """Take a span that is over: a trace of its own, with a child for each stage."""
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
    """Send traces during the block, if the environment asks for that; what is left at its end is sent, if it can be."""
    name = exporter_name(env)
    provider = None if name is None else _provider(name)
    if provider is None:
        yield None
        return
    log.info("traces are on", exporter=name)
    try:
        yield Traces(provider)
    finally:
        sending = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _FLUSH_S)


def exporter_name(env: Mapping[str, str]) -> str | None:
    """Return the installed name of the exporter that the environment asks for, None where it asks for no traces."""
    chosen = env.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(env.get, _ENDPOINTS)) else "none")
    if chosen == "none" or env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if chosen != "otlp":
        return chosen
    protocol = next(filter(None, map(env.get, _PROTOCOLS)), "http/protobuf")
    return _OTLP.get(protocol, protocol)


def _provider(exporter: str) -> TracerProvider | None:
    """Return what makes spans and sends them; None, with a warning, where that is not installed."""
    found = entry_points(group="opentelemetry_traces_exporter", name=exporter)
    if not found:
        log.warning("no traces: their exporter is not installed", exporter=exporter, remedy=_REMEDY)
        return None
    (kind,) = found
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # Below that, each single try to reach a collector that is away is a line in the log.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    own = {"service.name": "shardcache", "service.version": __version__}
    resource = Resource.create(own | dict(OTELResourceDetector().detect().attributes))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(kind.load()()))
    return provider
