"""A Prometheus of its own that scrapes one daemon, and promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.network.ports import free_port
from support.programs.daemon import eventually

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
INSTALL = "needs Prometheus and promtool: apt-get install prometheus"

SCRAPE_INTERVAL_S = 1
_STOP_S = 60.0


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        """Tell whether it answers."""
        try:
            self._get("/-/ready")
        except OSError:
            return False
        return True

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return what an expression gives now, a row for each series. Raises HTTPError where it is none."""
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
    """Run a Prometheus that scrapes a daemon's port with a token, and evaluates rules, each second."""
    assert PROGRAM is not None
    config = {
        "global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "evaluation_interval": f"{SCRAPE_INTERVAL_S}s"},
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
    command = [PROGRAM, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        server = Prometheus(port)
        eventually(server.is_ready, limit_s=_STOP_S)
        yield server
    finally:
        process.terminate()
        process.wait(_STOP_S)
