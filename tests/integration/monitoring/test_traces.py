"""Traces that a real daemon sends to a collector."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shardcache_client import ShardDataset
from support.programs.daemon import Daemon
from support.shards.tars import write_shards


class Collector(ThreadingHTTPServer):
    """Takes traces by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Desk)
        self.spans: list[Any] = []


class Desk(BaseHTTPRequestHandler):
    """Takes one request."""

    def do_POST(self) -> None:  # http.server's name for it
        """Keep the spans of a request."""
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        plain = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
        for resource in ExportTraceServiceRequest.FromString(plain).resource_spans:
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that listens."""
    with Collector() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, str]:
    """Return a span's attributes that are texts."""
    return {each.key: each.value.string_value for each in span.attributes}


def test_a_job_is_traced_to_the_end(tmp_path: Path, collector: Collector) -> None:
    """Each shard's transfer and each wait, with the stages of both; the last are sent when the daemon stops."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 2, 10, {"bin": 40_000})]
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}"}
    with Daemon(tmp_path, env=env) as daemon:
        assert len(list(ShardDataset(urls, socket=daemon.socket, job="traced"))) == 20
        assert daemon.stop() == 0

    wholes = [span for span in collector.spans if not span.parent_span_id]
    transfers = [span for span in wholes if span.name == "transfer"]
    assert sorted(attributes(span)["shardcache.url"] for span in transfers) == urls
    for whole in transfers:
        stages = [span for span in collector.spans if span.parent_span_id == whole.span_id]
        assert {span.name for span in stages} == {"asking", "space", "network", "disk"}
        assert min(span.start_time_unix_nano for span in stages) == whole.start_time_unix_nano
        assert max(span.end_time_unix_nano for span in stages) == whole.end_time_unix_nano
    waits = [span for span in wholes if span.name == "lease wait"]
    assert {attributes(span)["shardcache.job"] for span in waits} == {"traced"}
    assert {attributes(span)["shardcache.url"] for span in waits} <= set(urls)
