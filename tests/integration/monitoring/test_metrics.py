"""A scrape of a real daemon, and the truth of what is shipped and written about it."""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

from shardcache_client.dataset import ShardDataset
from support.cases import first_quick
from support.monitoring.queries import OF_THE_TARGET, Query, alerts, panels
from support.network.http_requests import ask
from support.network.ports import free_port
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

SHARDS = 3
FRONT = "/run/shardcache-tier/front.sock"
JOB = 'café "a\\b"\nc{d="e"} 1'
SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_info")
UNITS = ("seconds", "bytes", "ratio")


@dataclass(frozen=True, slots=True)
class Scraped:
    """A daemon that has served a job, serves another and has met an error, and its metrics."""

    daemon: Daemon
    port: int
    folder: Path
    text: str

    @classmethod
    def of(cls, daemon: Daemon, port: int, folder: Path) -> Self:
        return cls(daemon, port, folder, daemon.request("GET", "/metrics").decode())

    def again(self) -> Self:
        """Scrape the same daemon once more."""
        return self.of(self.daemon, self.port, self.folder)

    @property
    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in parsed(self.text)}

    def value(self, sample: str, **labels: str) -> float:
        """Return the value of the sample that has these labels."""
        samples = [
            each
            for family in self.families.values()
            for each in family.samples
            if each.name == sample
        ]
        (found,) = [each.value for each in samples if each.labels == labels]
        return found

    def labels(self, sample: str) -> list[set[str]]:
        """Return the labels of each sample of a name."""
        return [
            set(each.labels)
            for family in self.families.values()
            for each in family.samples
            if each.name == sample
        ]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """One daemon for all, with three shards published and read, one missing, and a reader."""
    folder = tmp_path_factory.mktemp("d")
    (folder / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(folder / "data", SHARDS, 10, {"bin": 40_000})]
    port = free_port()
    config = folder / "c.toml"
    prices = '[[origin]]\nmatch = "file://"\nprice_per_gb = 20\nprice_per_1000_requests = 0.5\n'
    config.write_text(f'{prices}[[origin]]\nmatch = "s3://tiered/"\ntier = "{FRONT}"\n')
    flags = ("--http", f"127.0.0.1:{port}", "--scrub-rate", "1GB", "--config", str(config))
    with Daemon(folder, *flags) as daemon:
        for job in (JOB, "again"):
            assert len(list(ShardDataset(urls, socket=daemon.socket, job=job))) == SHARDS * 10
            eventually(lambda: not daemon.sessions())
        eventually(lambda: daemon.status()["scrub"]["last_round_ended_at_s"] is not None)
        with RawSession(daemon, job="reading") as reader:
            reader.plan([urls[0], f"file://{folder}/missing.tar"], [0, 1])
            assert reader.take(0)["type"] == "leased"
            assert reader.take(1)["type"] == "error"
            daemon.request("POST", "/v1/pin", {"urls": urls[:1]})
            yield Scraped.of(daemon, port, folder)


def test_top_shows_the_figures_of_status(scraped: Scraped) -> None:
    """The same numbers under other names: nothing is counted twice."""
    status = scraped.daemon.status()
    cache = status["cache"]
    counters = status["counters"]
    assert scraped.value("shardcache_cache_capacity_bytes") == cache["capacity_bytes"]
    assert scraped.value("shardcache_cache_used_bytes") == cache["used_bytes"]
    assert scraped.value("shardcache_cache_shards") == SHARDS
    assert scraped.value("shardcache_cache_leases") == 1
    assert (
        scraped.value("shardcache_hit_bytes_total")
        == counters["hit_bytes"]
        >= counters["hits"] * 400_000
        > 0
    )
    assert scraped.value("shardcache_tier_failing", tier=FRONT) == 0
    expiry_s = scraped.value("shardcache_tier_certificate_expiry_timestamp_seconds", tier=FRONT)
    assert expiry_s == math.inf
    leases = scraped.value("shardcache_hits_total") + scraped.value("shardcache_misses_total")
    assert leases == 2 * SHARDS + 1
    assert scraped.value("shardcache_origin_received_bytes_total") == counters["origin_bytes"]
    assert scraped.value("shardcache_disk_healthy") == 1
    assert scraped.value("shardcache_origin_connections", origin="file://") == 0


def test_the_bill_has_what_was_fetched_and_what_each_process_would_have(scraped: Scraped) -> None:
    """The metrics and the log have bytes, requests and money, of the node and each job."""
    status = scraped.daemon.status()
    bill = status["bill"]
    jobs = {job["name"]: job["bill"] for job in status["jobs"]}
    first = jobs[JOB]
    again = jobs["again"]
    assert first["read_requests"] == SHARDS
    assert again["read_requests"] == SHARDS
    assert bill["read_requests"] == 2 * SHARDS
    assert (
        first["read_bytes"]
        == first["fetched_bytes"]
        == again["read_bytes"]
        == again["saved_bytes"]
        > 0
    )
    assert (
        bill["fetched_bytes"]
        == status["counters"]["origin_bytes"]
        == bill["saved_bytes"]
        == first["read_bytes"]
    )
    assert bill["saved_requests"] == 2 * SHARDS - status["counters"]["origin_requests"]
    assert jobs["reading"]["fetched_requests"] >= 1, "for the shard that is missing"
    for what in ("fetched", "read"):
        cost = 20 * bill[f"{what}_bytes"] / 1e9 + 0.5 * bill[f"{what}_requests"] / 1000
        assert scraped.value(f"shardcache_{what}_cost_total") == pytest.approx(cost)
        assert bill[f"{what}_cost"] == pytest.approx(cost)
    assert bill["saved_cost"] == pytest.approx(bill["read_cost"] - bill["fetched_cost"])
    log = scraped.daemon.log.read_text()
    left = [row for row in log.splitlines() if "the job's last reader has disconnected" in row]
    assert len(left) == 2
    assert first["text"] in left[0]
    assert again["text"] in left[1]


def test_a_job_has_its_name_whatever_is_in_it(scraped: Scraped) -> None:
    """Quotes, backslashes and line ends come as they are, and make up no line of the scrape."""
    job = {"job_name": JOB, "uid": str(os.getuid())}
    assert scraped.value("shardcache_job_done_shards_total", **job) == SHARDS
    waited = [
        scraped.value("shardcache_job_wait_seconds_total", cause=c, **job)
        for c in ("network", "space", "disk")
    ]
    assert sum(waited) > 0


def test_each_transfer_part_and_wait_is_measured_once(scraped: Scraped) -> None:
    """As many as there were; the stages of a transfer make up the whole of it."""
    assert scraped.value("shardcache_transfer_seconds_count") == SHARDS
    assert scraped.value("shardcache_transfer_seconds_bucket", le="+Inf") == SHARDS
    assert scraped.value("shardcache_part_seconds_count", origin="file://") == SHARDS
    assert scraped.value("shardcache_first_byte_seconds_count", origin="file://") == SHARDS
    assert scraped.value("shardcache_lease_wait_seconds_count") >= 1
    stages = [
        s
        for s in scraped.families["shardcache_transfer_stage_seconds"].samples
        if s.name.endswith("_sum")
    ]
    # A transfer of which a range is wanted first is downloading already when it gets the space of
    # the whole.
    assert {sample.labels["stage"] for sample in stages} | {"space"} == {
        "asking",
        "space",
        "network",
        "disk",
    }
    whole = scraped.value("shardcache_transfer_seconds_sum")
    assert sum(sample.value for sample in stages) == pytest.approx(whole, rel=1e-6)


def test_the_lag_of_the_event_loop_is_measured(scraped: Scraped) -> None:
    """From a moment after the start."""
    eventually(lambda: scraped.again().value("shardcache_event_loop_lag_seconds_count") > 0)


def test_errors_are_recognised_by_their_code(scraped: Scraped) -> None:
    """All codes are there as 0, since a counter that begins with 1 shows no increase."""
    failed = scraped.value("shardcache_failed_transfers_total", code="not_found")
    assert failed >= 1  # it was tried ahead of need, too
    assert scraped.value("shardcache_origin_errors_total", code="not_found") == failed
    assert scraped.value("shardcache_origin_errors_total", code="access_denied") == 0
    assert scraped.value("shardcache_failed_transfers_total", code="corrupt") == 0


def test_metrics_are_served_by_tcp_in_both_formats(scraped: Scraped) -> None:
    """As text by default, as OpenMetrics where that is asked for, with the same families."""
    text = ask(scraped.port, "/metrics")
    strict = ask(scraped.port, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert text.status == 200
    assert strict.status == 200
    assert text.headers["Content-Type"].startswith("text/plain; version=")
    assert strict.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    families = openmetrics(strict.body.decode())
    assert {family.name for family in families} == {
        family.name for family in parsed(text.body.decode())
    }


def test_names_follow_the_conventions(scraped: Scraped) -> None:
    """Prefix, base units at the end, `_total` for counters alone, and a sentence of help each.

    Nothing names a url: who may see which is a matter of rules, and there are too many.
    """
    assert str(scraped.folder) not in scraped.text
    assert "missing.tar" not in scraped.text
    for name, family in scraped.families.items():
        assert re.fullmatch(r"(shardcache|process)_[a-z][a-z0-9_]*", name), name
        assert family.documentation.endswith("."), name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert not re.search(
            r"_(total|count|sum|bucket|milli\w*|ms|kb|mb|minutes|percent)(_|$)", name
        ), name
        assert all(
            sample.name.endswith("_total") for sample in family.samples if family.type == "counter"
        ), name
        for unit in UNITS:
            assert unit not in name or name.endswith(unit), name


@pytest.mark.parametrize("queries", first_quick([panels, alerts]))
def test_metrics_of_all_queries_exist(
    scraped: Scraped, queries: Callable[[], Iterator[Query]]
) -> None:
    """A scrape has each metric that a panel or alert names, with all labels that it uses."""
    for query in queries():
        names = query.metrics()
        # The metric `up` is Prometheus' own.
        found = {name: scraped.labels(name) for name in names if name != "up"}
        assert all(found.values()), query
        for name, samples in found.items():
            assert all(names[name] <= labels | OF_THE_TARGET for labels in samples), (name, query)
        assert query.shown <= OF_THE_TARGET.union(
            *(labels for samples in found.values() for labels in samples)
        ), query
