"""The dashboard's queries and the alerts in a real Prometheus that scrapes a real daemon."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardcache_client.dataset import ShardDataset
from support.monitoring.queries import RULES, Query, alerts, panels
from support.network.ports import free_port
from support.programs.daemon import Daemon, eventually
from support.programs.processes import logged
from support.programs.raw_session import RawSession
from support.shards.tars import write_shards

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
INSTALL = "needs Prometheus and promtool: apt-get install prometheus"

SCRAPE_INTERVAL_S = 1
_STOP_S = 60.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the rows of an expression, one for each series. Raises HTTPError on a fault."""
        answer = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expr})))
        rows: list[dict[str, Any]] = answer["data"]["result"]
        return rows

    def rules(self) -> dict[str, str]:
        """Return the health of each rule that it has, by name."""
        groups = json.loads(self._get("/api/v1/rules"))["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            body: bytes = answer.read()
            return body


@contextmanager
def scraping(folder: Path, target_port: int, token_file: Path, rules: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes a port and evaluates rules each second."""
    assert PROGRAM is not None
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
            "evaluation_interval": f"{SCRAPE_INTERVAL_S}s",
        },
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "shardcache",
                "authorization": {"credentials_file": str(token_file)},
                "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    port = free_port()
    command = [
        PROGRAM,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    process = logged(command, folder / "prometheus.log", cwd=folder)
    try:
        server = Prometheus(port)
        eventually(server.is_ready, limit_s=_STOP_S)
        yield server
    finally:
        process.terminate()
        process.wait(_STOP_S)


pytestmark = [
    pytest.mark.skipif(PROGRAM is None or PROMTOOL is None, reason=INSTALL),
    pytest.mark.timeout(400),
]

TOKEN = "0123456789abcdef0123456789abcdef"
VARIABLES = {"$__rate_interval": f"{60 * SCRAPE_INTERVAL_S}s", "$node": ".*", "$job_name": ".*"}
# What has nothing to show where all is well, and where there is no tier.
TIER = {
    "Copies from the object store",
    "Bytes by source",
    "Owners left out, tiers failing or stale",
    "Days until certificates expire",
    "Cached by the tier",
}
SILENT = {"Errors and retries", "Transfers in progress", *TIER}
LIMIT_S = 120.0


def promtool(*args: str, cwd: Path | None = None, given: bytes | None = None) -> str:
    """Run promtool; return what it says, raise where it finds fault."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *args], cwd=cwd, input=given, capture_output=True, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def filled_in(query: Query) -> str:
    expr = query.expr
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return expr


def soon(prometheus: Prometheus, expr: str) -> None:
    """Return once an expression has a result. Raises TimeoutError, naming it, if it has none."""
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
    """Prometheus scrapes with the token, and each panel has something to show."""
    (tmp_path / "data").mkdir()
    urls = [f"file://{path}" for path in write_shards(tmp_path / "data", 3, 10, {"bin": 40_000})]
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    port = free_port()
    flags = ("--http", f"127.0.0.1:{port}", "--http-token-file", str(token_file))
    with (
        Daemon(tmp_path, *flags) as daemon,
        scraping(tmp_path, port, token_file, RULES) as prometheus,
    ):
        soon(prometheus, "shardcache_hits_total")
        with RawSession(daemon, job="train") as reader:
            reader.plan(urls, [0])
            assert reader.take(0)["type"] == "leased"
            # A rate needs a sample from before and one from after what it is of.
            soon(prometheus, 'shardcache_job_sessions{job_name="train"} > 0')
            assert len(list(ShardDataset(urls, socket=daemon.socket, job="train"))) == 30
            # Each in its own time: on a busy machine a scrape may be late, and then nothing is
            # known of its second.
            for query in panels():
                if query.where not in SILENT:
                    soon(prometheus, filled_in(query))
            soon(prometheus, "up == 1")
        eventually(lambda: set(prometheus.rules().values()) == {"ok"}, limit_s=LIMIT_S)
        assert promtool("check", "metrics", given=daemon.request("GET", "/metrics")) == ""
