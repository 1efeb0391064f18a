"""Traces are off unless asked for, and tell no secrets."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from shardcache.errors import AccessDeniedError
from shardcache.observability.traces import Span, Traces, exporter_name, tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({}, None),
        ({"OTEL_SERVICE_NAME": "node-a"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        (ENDPOINT, "otlp_proto_http"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_environment_decides(env: dict[str, str], name: str | None) -> None:
    """An endpoint or an exporter turns traces on, OpenTelemetry's own switches turn them off."""
    assert exporter_name(env) == name


async def test_an_exporter_that_is_not_installed_is_no_reason_not_to_serve() -> None:
    """Sites set such variables for every service; the daemon goes on without traces."""
    async with tracing({"OTEL_TRACES_EXPORTER": "no_such_exporter"}) as traces:
        assert traces is None


def test_a_span_has_its_stages_and_not_its_secrets() -> None:
    """A failed transfer: when it was, what it spent where, why it failed, and no signature."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    url = "https://store/a.tar?X-Amz-Signature=abcdef"
    error = AccessDeniedError("the signature has expired", url=url)
    stages = (("asking", 10.0, 10.5), ("network", 10.5, 12.0))
    Traces(provider).record(Span("transfer", url, 10.0, 12.0, {"shardcache.class": "warm"}, stages, error))

    *children, whole = exporter.get_finished_spans()
    assert whole.attributes == {
        "shardcache.url": "https://store/a.tar?X-Amz-Signature=REDACTED",
        "shardcache.class": "warm",
        "error.type": "access_denied",
    }
    assert whole.status.status_code is StatusCode.ERROR
    assert [child.name for child in children] == ["asking", "network"]
    assert whole.context is not None
    assert {child.parent and child.parent.span_id for child in children} == {whole.context.span_id}
    spans = [(span.start_time or 0, span.end_time or 0) for span in (*children, whole)]
    assert [round((end - start) / 1e9, 3) for start, end in spans] == [0.5, 1.5, 2.0]
