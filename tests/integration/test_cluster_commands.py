"""`shardcache cluster`: certificates, a node's nginx as a service runs it, and the state of all nodes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardcache.cluster.certificates import issue_all
from shardcache.cluster.nodes import parse
from shardcache.cluster.running import finish, prepare
from shardcache.cluster.status import ask
from shardcache.cluster.tier import PEER_NAME, Tls
from support.cli import shardcache
from support.guard import GUARD_S
from support.ports import free_port
from support.tier_nodes import NGINX, TierNodes, needs_nginx

STORE = "http://127.0.0.1:9"


def test_each_node_gets_its_files(tmp_path: Path) -> None:
    """One folder per node, the same but for the name and the address to listen on."""
    nodes = "a=10.0.0.1,b=10.0.0.2"
    ran = shardcache("cluster", "render", "--nodes", nodes, "--store", "https://10.0.9.9", "--out", tmp_path, "--json")
    assert ran.code == 0, ran.err
    assert [Path(file).parent.name for file in ran.json["files"]] == ["a", "b"]
    texts = [(tmp_path / name / "nginx.conf").read_text() for name in "ab"]
    assert "listen 10.0.0.1:9081 ssl;" in texts[0] and "ssl_verify_client on;" in texts[0]
    assert texts[0].replace("listen 10.0.0.1:", "listen 10.0.0.2:").replace('"node": "a"', '"node": "b"') == texts[1]


def test_a_store_by_name_needs_a_resolver_and_admits_its_buckets(tmp_path: Path) -> None:
    """nginx resolves the names of S3 again and again, and connects to no name outside the store's."""
    store = "https://s3.eu-central-1.amazonaws.com"
    common = ("cluster", "render", "--nodes", "a=127.0.0.2", "--store", store, "--out", tmp_path / "c", "--node", "a")
    assert shardcache(*common, "--resolver", "10.0.0.53").code == 0
    text = (tmp_path / "c").read_text()
    assert "resolver 10.0.0.53;" in text and "https://$http_host;" in text
    assert shardcache(*common, "--resolver", "none").code == 0
    assert "server s3.eu-central-1.amazonaws.com:443;" in (tmp_path / "c").read_text()


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of three nodes."""
    folder = tmp_path_factory.mktemp("tls")
    issue_all(parse("node1=127.0.0.2"), folder, 30)
    return folder


@pytest.fixture(scope="module")
def secure(issued: Path) -> Iterator[TierNodes]:
    """Three nodes with mutual TLS."""
    files = issued / "node1"
    with TierNodes([STORE], tls=Tls(files / "ca.pem", files / "node.pem", files / "node.key")) as nodes:
        yield nodes


def _context(folder: Path, trusted: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    context.check_hostname = False
    if folder != Path():
        context.load_cert_chain(folder / "node.pem", folder / "node.key")
    return context


@needs_nginx
def test_only_nodes_of_the_cluster_reach_an_owner(secure: TierNodes, issued: Path, tmp_path: Path) -> None:
    """Without a certificate, or with one of another cluster, an owner tells nothing."""
    issue_all(parse("stranger=127.0.0.9"), tmp_path, 30)
    owner = secure.tier.nodes[0].at(secure.tier.owner_port)
    trusted = issued / "ca.pem"
    for folder, status in ((issued / "node1", 200), (Path(), 400), (tmp_path / "stranger", 400)):
        answer = secure.get(owner, f"{STORE}/.shardcache/peers", {}, _context(folder, trusted))
        assert answer.status == status, folder
    with suppress(http.client.HTTPException, OSError):
        assert secure.get(owner, f"{STORE}/.shardcache/peers", {}).status == 400


@needs_nginx
async def test_status_tells_who_is_down(secure: TierNodes) -> None:
    """Each node's share, its view of the cluster, and the reason for which it does not answer."""
    tier, tls = secure.tier, secure.tier.tls
    reports = await ask(tier.nodes, tier.owner_port, tls)
    assert [report.error for report in reports] == [None, None, None]
    assert {report.peers["digest"] for report in reports if report.peers} == {tier.digest}
    assert sum(report.share for report in reports) == pytest.approx(1)
    secure.kill(tier.nodes[2])
    down = await ask(tier.nodes, tier.owner_port, tls)
    assert [report.peers is None for report in down] == [False, False, True]
    assert down[2].error
    secure.start(tier.nodes[2])


def test_certificates_are_renewed_by_the_same_authority(tmp_path: Path) -> None:
    """The second run keeps the authority and replaces the nodes' files; the keys are for their owner alone."""
    command = ("cluster", "certificates", "--nodes", "a=10.0.0.1,b=10.0.0.2", "--out", tmp_path, "--json")
    first = shardcache(*command)
    assert first.code == 0, first.err
    authority, former = (tmp_path / "ca.pem").read_bytes(), (tmp_path / "a/node.pem").read_bytes()
    assert shardcache(*command, "--days", "7").code == 0
    assert (tmp_path / "ca.pem").read_bytes() == authority == (tmp_path / "b/ca.pem").read_bytes()
    assert (tmp_path / "a/node.pem").read_bytes() != former
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.key")} == {0o600}
    verified = (
        "openssl",
        "verify",
        "-CAfile",
        tmp_path / "ca.pem",
        "-verify_hostname",
        PEER_NAME,
        tmp_path / "a/node.pem",
    )
    assert subprocess.run(verified, check=False, capture_output=True).returncode == 0
    (tmp_path / "ca.key").unlink()
    lost = shardcache(*command)
    assert lost.code == 2 and lost.json["error"]["remedy"]


@needs_nginx
def test_a_shared_certificate_is_that_of_every_node(tmp_path: Path) -> None:
    """An owner that has it answers whoever has it, and nobody who has the one of another authority."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        ran = shardcache("cluster", "certificates", "--shared", "--out", folder, "--json")
        assert ran.code == 0 and [row["node"] for row in ran.json["certificates"]] == ["shared"], ran.err
    files = ours / "shared"
    with TierNodes([STORE], 2, tls=Tls(files / "ca.pem", files / "node.pem", files / "node.key")) as nodes:
        front, owner = nodes.front(nodes.tier.nodes[0]), nodes.tier.nodes[1].at(nodes.tier.owner_port)
        assert nodes.get(front, f"{STORE}/.shardcache/nodes/1/peers", {}).status == 200, "one node reaches the other"
        stranger = _context(theirs / "shared", ours / "ca.pem")
        assert nodes.get(owner, f"{STORE}/.shardcache/peers", {}, stranger).status == 400
    assert shardcache("cluster", "certificates", "--out", ours).code == 2
    assert shardcache("cluster", "certificates", "--out", ours, "--shared", "--nodes", "a=10.0.0.1").code == 2


def test_parts_survive_a_crash_and_not_a_power_loss(tmp_path: Path) -> None:
    """The cache is cleared if the machine booted since it was used, unless the tier was stopped before."""
    part = tmp_path / "parts" / "a"
    part.parent.mkdir()
    part.write_text("bytes")
    assert prepare(tmp_path, "boot 1"), "a folder of unknown history"
    part.parent.mkdir()
    part.write_text("bytes")
    assert not prepare(tmp_path, "boot 1"), "nginx was killed"
    finish(tmp_path)
    assert not prepare(tmp_path, "boot 2"), "an orderly reboot"
    assert part.exists()
    assert prepare(tmp_path, "boot 3"), "the power failed"
    assert not part.exists()


@needs_nginx
def test_a_node_runs_follows_its_list_and_stops(tmp_path: Path) -> None:
    """`cluster run` starts nginx, publishes figures, uses a changed list of nodes, and ends cleanly."""
    assert NGINX is not None
    listed, front, owner_port = tmp_path / "nodes", free_port(), free_port()
    listed.write_text("one=127.0.0.2\n")
    status = ("cluster", "status", "--nodes", listed, "--owner-port", str(owner_port), "--json")
    command = (
        *(sys.executable, "-m", "shardcache", "cluster", "run", "--nodes", listed, "--node", "one", "--store", STORE),
        *("--front", f"127.0.0.1:{front}", "--owner-port", str(owner_port), "--workers", "1"),
        *("--cache-dir", tmp_path / "cache", "--run-dir", tmp_path / "run"),
        *(("--user", "root") if os.geteuid() == 0 else ()),
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + GUARD_S

        def until(expected: str) -> None:
            while expected not in (said := json.dumps(shardcache(*status).json)):
                assert process.poll() is None and time.monotonic() < deadline, (said, (tmp_path / "log").read_text())
                time.sleep(0.1)

        until('"cached_bytes": 0')
        listed.write_text("one=127.0.0.2\ntwo=127.0.0.3\n")
        while "reloaded: 2 nodes" not in (tmp_path / "log").read_text():
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
        shown = shardcache(*status)
        assert shown.code == 1 and [node["up"] for node in shown.json["nodes"]] == [True, False]
        found = _tier_findings(tmp_path, front)
        assert [finding["state"] for finding in found] == ["ok", "failed"]  # the second node is not there
        assert found[1]["found"] == "node 2 of the tier does not answer"
        process.send_signal(signal.SIGTERM)
        assert process.wait(GUARD_S) == 0
        assert [finding["state"] for finding in _tier_findings(tmp_path, front)] == ["failed"]
        assert (tmp_path / "cache" / "clean").exists()
    finally:
        process.kill()
        process.wait()


@needs_nginx
def test_doctor_compares_the_nodes_and_names_who_bypasses_the_tier(secure: TierNodes, tmp_path: Path) -> None:
    """By way of its own nginx, without a certificate: a node that has another list, and origins without a tier."""
    nodes, front = secure.tier.nodes, secure.front(secure.tier.nodes[0])
    assert [finding["state"] for finding in _tier_findings(tmp_path, front)] == ["warning"]  # no figures
    config = secure.folder / "node2.conf"
    secure.kill(nodes[1])
    config.write_text(config.read_text().replace(secure.tier.digest, "0" * 16))
    secure.start(nodes[1], config)
    try:
        found = [finding["found"] for finding in _tier_findings(tmp_path, front)]
    finally:
        secure.kill(nodes[1])
        secure.start(nodes[1])
    assert found[1:] == ["node2 has another list of the tier's nodes"]
    tables = f"""
[[origin]]
match = "gs://data/"
tier = "{front}"
[[origin]]
match = "s3://odd/"
tier = "{front}"
storage_options = {{ config_kwargs = {{}} }}
"""
    bypassing = _tier_findings(tmp_path, front, tables, check="tier.bypass")
    assert [finding["cause"] for finding in bypassing] == [
        "only S3 and web servers can have a tier, not gs://",
        "storage_options has config_kwargs, which only the SDK supports",
    ]


def _tier_findings(folder: Path, front: int | str, tables: str = "", check: str = "tier.reach") -> list[dict[str, str]]:
    """Return what doctor finds about the tier of an origin."""
    config = folder / "shardcache.toml"
    address = front if isinstance(front, str) else f"127.0.0.1:{front}"
    config.write_text(f'[[origin]]\nmatch = "s3://"\ntier = "{address}"\n{tables}')
    ran = shardcache("doctor", "--quick", "--config", config, "--cache-dir", folder / "daemon", "--json", STORE)
    return [dict(finding) for finding in ran.json["findings"] if finding["check"] == check]
