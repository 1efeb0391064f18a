"""`shardcache cluster`: configuration, certificates and state of all nodes."""

import asyncio
import http.client
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import click
import pytest

from shardcache.cli.cluster_options import _parse_resolver
from shardcache.cluster.authority import issue
from shardcache.cluster.node_list import Node, parse
from shardcache.cluster.tier_config import PEER_NAME, Tls
from shardcache.cluster.tier_status import ask
from support.cases import first_quick
from support.cluster.tier_nodes import TierNodes, needs_nginx, tier_findings
from support.programs.cli import shardcache

STORE = "http://127.0.0.1:9"


def test_each_node_gets_its_files(tmp_path: Path) -> None:
    """One folder per node, the same but for the name and the address to listen on."""
    nodes = "a=10.0.0.1,b=10.0.0.2"
    ran = shardcache(
        "cluster",
        "render",
        "--nodes",
        nodes,
        "--store",
        "http://10.0.9.9",
        "--out",
        tmp_path,
        "--json",
    )
    assert ran.code == 0, ran.err
    assert [Path(file).parent.name for file in ran.json["files"]] == ["a", "b"]
    texts = [(tmp_path / name / "nginx.conf").read_text() for name in "ab"]
    assert "listen 10.0.0.1:9081 ssl;" in texts[0]
    assert "ssl_verify_client on;" in texts[0]
    for own, others in (
        ("listen 10.0.0.1:", "listen 10.0.0.2:"),
        ('"node": "a"', '"node": "b"'),
        ("own { server 10.0.0.1:", "own { server 10.0.0.2:"),
        ('-From "10.0.0.1:', '-From "10.0.0.2:'),
    ):
        texts[0] = texts[0].replace(own, others)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "wrong", ["dns.example", "10.0.0.53:0", "10.0.0.53:x", "a;b@10.0.0.53", "[::1]x:53", ""]
)
def test_a_resolver_is_an_address(wrong: str) -> None:
    """Anything else could be a piece of nginx's syntax."""
    with pytest.raises(click.BadParameter, match="neither ADDRESS"):
        _parse_resolver(wrong)


def test_a_store_by_name_needs_a_resolver_and_admits_its_buckets(tmp_path: Path) -> None:
    """The names of S3 are resolved repeatedly, and nginx connects to no other names."""
    store = "https://s3.eu-central-1.amazonaws.com"
    common = (
        "cluster",
        "render",
        "--nodes",
        "a=127.0.0.2",
        "--store",
        store,
        "--out",
        tmp_path / "c",
        "--node",
        "a",
    )
    assert shardcache(*common, "--resolver", "10.0.0.53:8600", "--resolver", "fd00::53").code == 0
    text = (tmp_path / "c").read_text()
    assert "resolver 10.0.0.53:8600 [fd00::53]" in text
    assert "https://$http_host;" in text
    assert shardcache(*common, "--resolver", "none").code == 0
    assert "server s3.eu-central-1.amazonaws.com:443;" in (tmp_path / "c").read_text()


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], check=False).returncode != 0,
    reason="no namespaces here",
)
def test_stores_are_found_by_ipv4_alone_without_a_route_by_ipv6(tmp_path: Path) -> None:
    """Half of the addresses of a store that has both kinds could not be reached."""
    command = (
        "-m",
        "shardcache",
        "cluster",
        "render",
        "--nodes",
        "a=127.0.0.2",
        "--store",
        "https://s3.example",
    )
    options = ("--resolver", "10.0.0.53", "--out", str(tmp_path / "c"), "--node", "a")
    subprocess.run(
        ["unshare", "-rn", sys.executable, *command, *options], check=True, capture_output=True
    )
    assert "resolver 10.0.0.53 ipv6=off;" in (tmp_path / "c").read_text()


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates by one authority: of three nodes, of a mere workload, and of any node."""
    folder = tmp_path_factory.mktemp("tls")
    for nodes in (
        parse("node1=127.0.0.2,node2=127.0.0.3,node3=127.0.0.4,workload=127.0.0.9"),
        None,
    ):
        issue(nodes, folder, 30)
    return folder


def _tls(node: Path, *, is_shared: bool = False) -> Tls:
    return Tls(node / "ca.pem", node / "node.pem", node / "node.key", is_shared)


@pytest.fixture(scope="module")
def secure(issued: Path) -> Iterator[TierNodes]:
    """Three nodes with mutual TLS."""
    with TierNodes([STORE], tls=_tls(issued / "{node}")) as nodes:
        yield nodes


def _context(folder: Path, trusted: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(trusted))
    context.check_hostname = False
    if folder != Path():
        context.load_cert_chain(folder / "node.pem", folder / "node.key")
    return context


@needs_nginx
def test_only_nodes_of_the_cluster_reach_an_owner(
    secure: TierNodes, issued: Path, tmp_path: Path
) -> None:
    """An owner refuses a missing certificate, another authority's, or an unlisted name."""
    for nodes in (parse("node1=127.0.0.2"), None):
        issue(nodes, tmp_path, 30)
    owner = secure.tier.nodes[0].at(secure.tier.owner_port)
    trusted = issued / "ca.pem"
    expected = {
        issued / "node1": 200,
        issued / "node2": 200,
        issued / "workload": 403,
        issued / "shared": 403,
        Path(): 400,
        tmp_path / "node1": 400,
        tmp_path / "shared": 400,
    }
    for folder, status in expected.items():
        answer = secure.get(owner, f"{STORE}/.shardcache/peers", {}, _context(folder, trusted))
        assert answer.status == status, folder
    with suppress(http.client.HTTPException, OSError):
        assert secure.get(owner, f"{STORE}/.shardcache/peers", {}).status == 400


@needs_nginx
def test_one_certificate_for_all_admits_no_other_name(issued: Path) -> None:
    """With a shared certificate, owners refuse those of single nodes and workloads."""
    with TierNodes([STORE], 1, tls=_tls(issued / "shared", is_shared=True)) as nodes:
        owner = nodes.tier.nodes[0].at(nodes.tier.owner_port)
        for name, status in (("shared", 200), ("node1", 403), ("workload", 403)):
            context = _context(issued / name, issued / "ca.pem")
            answer = nodes.get(owner, f"{STORE}/.shardcache/peers", {}, context)
            assert answer.status == status, name


async def owner_of(nodes: TierNodes, front: Node, part: dict[str, str]) -> str:
    """Return the address of the owner that a front asks for a part."""
    headers = part | {"X-Shardcache-Owner": "who"}
    answer = await asyncio.to_thread(nodes.get, nodes.front(front), f"{STORE}/a.tar", headers)
    return answer.headers["x-shardcache-owner"]


@pytest.mark.slow
@needs_nginx
@pytest.mark.parametrize("name", ["workload", "node1", "shared"])
async def test_owner_with_the_name_of_another_is_refused(
    name: str, issued: Path, tmp_path: Path
) -> None:
    """A server at a node's address gets no request, unless its certificate has that node's name."""
    folder = shutil.copytree(issued, tmp_path / "tls")
    shutil.rmtree(folder / "node3")
    (folder / name).rename(folder / "node3")
    shutil.copytree(folder / "node3", folder / name)
    with TierNodes([STORE], tls=_tls(folder / "{node}")) as nodes:
        one, _two, third = nodes.tier.nodes
        reports = await ask(nodes.tier.nodes, nodes.tier.owner_port, nodes.tier.tls_of(one))
        parts = [{"Range": f"bytes={start}-{start}", "If-Match": '"any"'} for start in range(50)]
        of_third = [part for part in parts if third.address in await owner_of(nodes, one, part)]
        # A part of the node in question comes first: once its name has been found wrong three
        # times, also by those who ask it for a permission, nothing is requested from it for a
        # while.
        for part in of_third[:1] + parts:
            await asyncio.to_thread(nodes.get, nodes.front(one), f"{STORE}/a.tar", part)
        tried = [row for row in nodes.log(one) if third.address in str(row["upstream"])]
        served = [row for row in nodes.log(third) if row["port"] == str(nodes.tier.owner_port)]
    assert [report.error is None for report in reports] == [True, True, False]
    assert tried
    assert served == []


@needs_nginx
@pytest.mark.parametrize("renewed", first_quick([1, 0, 3]))
async def test_authority_changes_node_by_node(renewed: int, issued: Path, tmp_path: Path) -> None:
    """Nodes with certificates of either authority answer each other while all trust both."""
    folder = shutil.copytree(issued, tmp_path / "tls")
    names = ("node1", "node2", "node3")
    issue(parse("node1=127.0.0.2,node2=127.0.0.3,node3=127.0.0.4"), tmp_path / "new", 30)
    both = (issued / "ca.pem").read_text() + (tmp_path / "new" / "ca.pem").read_text()
    for name in names:
        (folder / name / "ca.pem").write_text(both)
    for name in names[:renewed]:
        for file in ("node.pem", "node.key"):
            shutil.copy(tmp_path / "new" / name / file, folder / name / file)
    with TierNodes([STORE], tls=_tls(folder / "{node}")) as nodes:
        for node in nodes.tier.nodes:
            reports = await ask(nodes.tier.nodes, nodes.tier.owner_port, nodes.tier.tls_of(node))
            assert [report.error for report in reports] == [None] * 3


@needs_nginx
async def test_status_names_the_nodes_that_are_down(secure: TierNodes) -> None:
    """Each node's view of the cluster, and the reason for which it does not answer."""
    tier = secure.tier
    tls = secure.tier.tls_of(secure.tier.nodes[0])
    reports = await ask(tier.nodes, tier.owner_port, tls)
    assert [report.error for report in reports] == [None, None, None]
    assert {report.peers["digest"] for report in reports if report.peers} == {tier.digest}
    secure.nginx[tier.nodes[2].name].kill()
    down = await ask(tier.nodes, tier.owner_port, tls)
    assert [report.peers is None for report in down] == [False, False, True]
    assert down[2].error
    secure.start(tier.nodes[2])


@pytest.mark.slow
@needs_nginx
async def test_status_of_the_living_does_not_wait_for_the_dead(secure: TierNodes) -> None:
    """However many are silent, and wherever in the list: a living node's report is complete."""
    with ExitStack() as stack:
        tier = secure.tier
        silent = parse(",".join(f"127.0.1.{number}" for number in range(1, 251)))
        for node in silent:
            listener = stack.enter_context(socket.socket())
            listener.bind((node.address, tier.owner_port))
            listener.listen()
        tls = tier.tls_of(tier.nodes[0])
        reports = await ask((*silent, *tier.nodes), tier.owner_port, tls, limit_s=3)
    assert [report.error for report in reports] == ["no answer"] * 250 + [None] * 3


def test_certificates_are_renewed_by_the_same_authority(tmp_path: Path) -> None:
    """The second run replaces the nodes' files alone, and keys are for their owner alone."""
    command = ("cluster", "certificates", "--out", tmp_path, "--json")
    first = shardcache(*command, "--nodes", "a=10.0.0.1,b=10.0.0.2")
    assert first.code == 0, first.err
    authority = (tmp_path / "ca.pem").read_bytes()
    former = (tmp_path / "a/node.pem").read_bytes()
    issue(parse("a=10.0.0.1,b=10.0.0.2"), tmp_path, 7)
    assert (tmp_path / "ca.pem").read_bytes() == authority == (tmp_path / "b/ca.pem").read_bytes()
    assert (tmp_path / "a/node.pem").read_bytes() != former
    assert {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*.key")} == {0o600}
    trusted = ("-CAfile", tmp_path / "ca.pem", "-verify_hostname", "a")
    verified = subprocess.run(
        ["openssl", "verify", *trusted, tmp_path / "a/node.pem"], check=False, capture_output=True
    )
    assert verified.returncode == 0
    shared = shardcache(*command, "--shared")
    assert [row["node"] for row in shared.json["certificates"]] == [PEER_NAME]
    (tmp_path / "ca.key").unlink()
    lost = shardcache(*command, "--shared")
    assert lost.code == 2
    assert lost.json["error"]["remedy"]


@pytest.mark.parametrize("options", [(), ("--shared", "--nodes", "a=10.0.0.1")])
def test_a_certificate_is_for_some_nodes_or_for_all(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Neither for none nor for both."""
    assert shardcache("cluster", "certificates", "--out", tmp_path, *options).code == 2


@pytest.mark.slow
@needs_nginx
def test_doctor_names_origins_that_bypass_the_tier(secure: TierNodes, tmp_path: Path) -> None:
    """Without a certificate; nginx that was started otherwise has no figures."""
    front = secure.front(secure.tier.nodes[0])
    (figures,) = tier_findings(tmp_path, front)
    assert figures["state"] == "warning"
    tables = f"""
[[origin]]
match = "gs://data/"
tier = "{front}"
[[origin]]
match = "s3://odd/"
tier = "{front}"
storage_options = {{ config_kwargs = {{}} }}
"""
    bypassing = tier_findings(tmp_path, front, tables, check="tier.bypass")
    assert [finding["cause"] for finding in bypassing] == [
        "only S3 and web servers can have a tier, not gs://",
        "storage_options has config_kwargs, which only the SDK supports",
    ]
