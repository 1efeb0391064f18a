"""The dashboard's queries and the alerts in a real Prometheus that scrapes a real daemon."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from shardcache_client import ShardDataset
from support.monitoring.prometheus import INSTALL, PROGRAM, PROMTOOL, SCRAPE_INTERVAL_S, Prometheus, scraping
from support.monitoring.queries import RULES, Query, alerts, panels
from support.network.ports import free_port
from support.programs.daemon import Daemon, eventually
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

pytestmark = [
    pytest.mark.skipif(PROGRAM is None or PROMTOOL is None, reason=INSTALL),
    pytest.mark.timeout(400),
]

TOKEN = "0123456789abcdef0123456789abcdef"
VARIABLES = {"$__rate_interval": f"{60 * SCRAPE_INTERVAL_S}s", "$node": ".*", "$job_name": ".*"}
# What has nothing to show where all is well.
SILENT = {"Errors and retries", "Transfers in progress"}
LIMIT_S = 120.0


def promtool(*args: str, cwd: Path | None = None, given: bytes | None = None) -> str:
    """Run promtool; return what it says, raise where it finds fault."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *args], cwd=cwd, input=given, capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def filled_in(query: Query) -> str:
    """Return a panel's expression as Grafana sends it."""
    expr = query.expr
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def soon(prometheus: Prometheus, expr: str) -> None:
    """Return once an expression has something to show. Raises TimeoutError, which names it, when it has not."""
    eventually(partial(_shows, prometheus, expr), limit_s=LIMIT_S)


def _shows(prometheus: Prometheus, expr: str) -> bool:
    return any(row["value"][1] != "NaN" for row in prometheus.query(expr))


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    """The rules are sound, and their unit tests, which name every alert, pass."""
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    tests = RULES.with_suffix(".test.yml")
    assert "SUCCESS" in promtool("test", "rules", tests.name, cwd=RULES.parent)
    assert {query.where for query in alerts()} <= set(tests.read_text().replace("}", " ").split())


def test_a_real_prometheus_answers_every_panel(tmp_path: Path) -> None:
    """It scrapes with the token, finds no fault with what comes, and each panel has something to show."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 3, 10, {"bin": 40_000})]
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    port = free_port()
    flags = ("--http", f"127.0.0.1:{port}", "--http-token-file", str(token_file))
    with Daemon(tmp_path, *flags) as daemon, scraping(tmp_path, port, token_file, RULES) as prometheus:
        soon(prometheus, "shardcache_hits_total")
        with RawSession(daemon, job="train") as reader:
            reader.plan(urls, [0])
            assert reader.take(0)["type"] == "leased"
            # A rate needs a sample from before and one from after what it is of.
            soon(prometheus, 'shardcache_job_sessions{job_name="train"} > 0')
            assert len(list(ShardDataset(urls, socket=daemon.socket, job="train"))) == 30
            # Each in its own time: on a busy machine a scrape may be late, and then nothing is known of its second.
            for query in panels():
                if query.where not in SILENT:
                    soon(prometheus, filled_in(query))
            soon(prometheus, "up == 1")
        eventually(lambda: set(prometheus.rules().values()) == {"ok"}, limit_s=LIMIT_S)
        assert promtool("check", "metrics", given=daemon.request("GET", "/metrics")) == ""
