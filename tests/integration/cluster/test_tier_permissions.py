"""Permissions of the tier: a cached part is for those whom the store permits."""

import http.server
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest

from shardcache.cluster.authority import issue
from shardcache.cluster.node_list import parse
from shardcache.cluster.tier_config import Tls
from support.cases import first_quick
from support.cluster.ring import Ring, key_of
from support.cluster.tier_nodes import TierNodes, needs_nginx
from support.network.http_requests import Answer
from support.network.lead import NameServer
from support.programs.daemon import eventually
from support.programs.processes import children

pytestmark = needs_nginx


class ByArgument(http.server.BaseHTTPRequestHandler):
    """Files chosen by an argument of the url; all have one ETag, as of one second and one size."""

    seen: ClassVar[list[str]] = []  # the ranges that it was asked for
    fails: ClassVar[bool] = False

    def do_GET(self) -> None:
        """Answer a range of the file; 503 once the server fails."""
        if self.fails:
            self.send_response(503)
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.seen.append(self.headers["Range"])
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = (self.path.encode() * 100)[first : last + 1]
        self.send_response(206)
        self.send_header("ETag", '"any"')
        self.send_header("Set-Cookie", f"session={self.headers['Cookie']}")
        self.send_header("Content-Range", f"bytes {first}-{last}/1000")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The address of such a server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ByArgument) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def pair(web: str) -> Iterator[TierNodes]:
    """Two nodes in front of it."""
    with TierNodes([web], 2) as nodes:
        yield nodes


def signed(url: str, key: str, signature: str) -> str:
    """Return the url with an access key and a signature, which nobody checks."""
    return f"{url}?X-Amz-Credential={key}%2F20260101&X-Amz-Signature={signature}"


SIGNATURE = (
    "Algorithm",
    "Content-Sha256",
    "Credential",
    "Date",
    "Expires",
    "SignedHeaders",
    "Security-Token",
    "Signature",
)
OTHER_ARGUMENTS = (
    "PartNumber=1",
    "partNumber=1",
    "response-content-encoding=gzip",
    "versionId=1",
    "x-id=GetObject",
    "unknown",
    "X-Amz-Checksum-Mode=ENABLED",
    "x-amz-date=a",
    "X-Amz-Dat%65=a",
    "X-Amz-Date",
    "%58-Amz-Date=a",
    "=",
)


def test_arguments_of_the_signature_alone_leave_the_key(web: str, pair: TierNodes) -> None:
    """Whatever else a url asks for, however it is written, is not cached as the plain file."""
    first = "&".join(f"X-Amz-{name}=a" for name in SIGNATURE)
    second = "&".join(f"X-Amz-{name}=b%2Fc" for name in SIGNATURE)
    plain = _first(pair, f"{web}/get?{first}")
    again = _first(pair, f"{web}/get?{second}&X-Amz-Date=b", Cookie="another")
    assert again.body == plain.body
    assert "set-cookie" not in again.headers
    assert _first(pair, f"{web}/get?a|b").status == 403, "the key of another url"
    for other in OTHER_ARGUMENTS:
        for arguments in (
            f"{other}&{first}",
            *(f"{first}{sign}{other}" for sign in ("&", ";", "#&")),
        ):
            assert _first(pair, f"{web}/get?{arguments}").headers["x-shardcache-tier"] == "MISS", (
                arguments
            )
    for around in (
        "versionId=1&{}&x-id=GetObject",
        "X-Amz-Date=a&x-id=Go&{}",
        "X-Amz-Date=a&x=1&{}&y=2",
    ):
        urls = [f"{web}/get?{around.format(signature)}" for signature in (first, second)]
        cached = [_first(pair, url).headers["x-shardcache-tier"] for url in urls]
        assert cached == ["MISS", "HIT"], "other arguments around a signature are those of one file"


@pytest.mark.parametrize(("trust_s", "questions"), [(300, 1), (0, 24)])
def test_the_store_is_asked_once_whether_a_signed_url_is_permitted(
    trust_s: int, questions: int, web: str
) -> None:
    """One answer holds for all parts and nodes, but not another signature or version."""
    with TierNodes([web], trust_s=trust_s) as nodes:
        for signature, etag in (("a", '"any"'), ("b", '"any"'), ("a", '"new"')):
            ByArgument.seen.clear()
            for node, start in product(nodes.tier.nodes, range(0, 800, 100)):
                headers = {"Range": f"bytes={start}-{start + 99}", "If-Match": etag}
                url = f"{web}/{trust_s}?X-Amz-Signature={signature}"
                assert nodes.get(nodes.front(node), url, headers).status == 206
            assert ByArgument.seen.count("bytes=0-0") == questions


@pytest.mark.parametrize(("same_rights", "questions"), [(False, 3), (True, 1)])
def test_nodes_with_keys_of_their_own_may_have_the_same_rights(
    same_rights: bool, questions: int, web: str
) -> None:
    """Then the store is asked once per object and version, not once for each node's access key."""
    with TierNodes([web], same_rights=same_rights) as nodes:
        ByArgument.seen.clear()
        for number, node in enumerate(nodes.tier.nodes):
            headers = {"Range": "bytes=0-99", "If-Match": '"any"'}
            url = signed(f"{web}/own-keys", f"key{number}", str(number))
            assert nodes.get(nodes.front(node), url, headers).status == 206
        assert ByArgument.seen.count("bytes=0-0") == questions


@pytest.mark.slow
def test_permissions_are_asked_for_past_a_silent_node(web: str) -> None:
    """Of all parts whose owners live, whichever node had asked the store until then."""
    with TierNodes([web], stall_timeout_s=1.0) as nodes:
        ring = Ring(nodes.tier)
        dead = nodes.tier.nodes[2]
        workers = children(nodes.nginx[dead.name].pid)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        urls = [f"{web}/{number}" for number in range(30)]
        owners = ring.owners(key_of(url, 0, 100) for url in urls)
        alive = [
            url
            for url, owner in zip(urls, owners, strict=True)
            if dead.address not in ring.addresses[owner]
        ]
        answers = [_first(nodes, f"{url}?X-Amz-Signature=a") for url in alive]
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert len(alive) > 10
    assert {answer.status for answer in answers} == {206}


def _first(nodes: TierNodes, url: str, **headers: str) -> Answer:
    """Request the first bytes of a file whose ETag is "any"."""
    return nodes.get(
        nodes.front(nodes.tier.nodes[0]),
        url,
        {"Range": "bytes=0-99", "If-Match": '"any"', **headers},
    )


@pytest.mark.parametrize("ipv6", first_quick([True, False]))
def test_addresses_that_cannot_be_reached_cost_no_request(web: str, *, ipv6: bool) -> None:
    """A name may have addresses of both kinds on a node that has a way to only one."""
    named = web.replace("127.0.0.1", "store.test")
    with (
        NameServer(*(f"ff0e::{number}" for number in range(1, 7))) as names,
        TierNodes([named], 1, resolvers=(names.address,), ipv6=ipv6) as nodes,
    ):
        answers = [_first(nodes, f"{named}/get?file={number}") for number in range(20)]
        tried = "".join(str(line["upstream"]) for line in nodes.log(nodes.tier.nodes[0]))
    assert [answer.status for answer in answers] == [206] * 20
    assert ("ff0e" in tried) is ipv6


@pytest.mark.slow
def test_readers_that_refetch_a_part_wait_for_one_fetch(web: str, pair: TierNodes) -> None:
    """All of those who find a part damaged, on whichever node, cost the store one request."""
    url = f"{web}/get?file=refetched"
    fresh = {"X-Shardcache-Fresh": "1"}
    _first(pair, url)
    ByArgument.seen.clear()
    with ThreadPoolExecutor(30) as threads:
        answers = list(threads.map(lambda _: _first(pair, url, **fresh), range(30)))
    assert {answer.status for answer in answers} == {206}
    assert [asked for asked in ByArgument.seen if asked != "bytes=0-0"] == ["bytes=0-99"]


@pytest.mark.parametrize("outage_s", [0, 600])
def test_nodes_read_what_the_store_permitted_lately_while_it_fails(
    outage_s: int, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the operator's choice, for the same key and cached parts; others get its answer.

    A node may have found its permission cached, as another node's with the same url; one that
    joined has not read yet.
    """
    with TierNodes([web], 1, outage_s=outage_s) as nodes:
        owner = nodes.tier.nodes[0].at(nodes.tier.owner_port)
        part = {"Range": "bytes=0-99", "If-Match": '"any"'}

        def read(
            key: str, name: str = "get", node: str = "127.0.0.8", signature: str = ""
        ) -> Answer:
            url = signed(f"{web}/{name}", key, signature or os.urandom(4).hex())
            return nodes.get(owner, url, part, source=node)

        def is_permitted(node: str) -> bool:
            return read("a", node=node).status == 206

        assert read("a").status == 206
        assert read("a", "another").status == 206
        for node in ("127.0.0.8", "127.0.0.9"):
            assert read("a", node=node, signature="hour").status == 206
        monkeypatch.setattr(ByArgument, "fails", True)
        if outage_s:
            # nginx notes a permission after its answer.
            for node in ("127.0.0.8", "127.0.0.9", "127.0.0.10"):
                eventually(partial(is_permitted, node))
        else:
            assert read("a").status == 503
        refused = [read("b"), read("a", "unread")]
    for answer in refused:
        assert answer.status == 503
        assert answer.headers["retry-after"] == "7"


@pytest.mark.parametrize("same_rights", first_quick([False, True]))
def test_a_version_is_told_to_those_who_may_read_it(
    same_rights: bool, web: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any node tells it in an outage, to a permitted key, or to any if rights are equal."""
    issue(parse("node1=127.0.0.2,node2=127.0.0.3,node3=127.0.0.4"), tmp_path, 30)
    tls = Tls(*(tmp_path / "{node}" / file for file in ("ca.pem", "node.pem", "node.key")))
    with TierNodes([web], outage_s=600, same_rights=same_rights, tls=tls) as nodes:

        def asked(key: str, name: str = "told") -> Answer:
            front = nodes.front(nodes.tier.nodes[2])
            url = signed(f"{web}/{name}", key, os.urandom(4).hex())
            return nodes.get(front, url, {"X-Shardcache-Version": "asked"})

        assert asked("a").status == 404
        assert _first(nodes, signed(f"{web}/told", "a", "1")).status == 206
        monkeypatch.setattr(ByArgument, "fails", True)
        again = signed(f"{web}/told", "a", "2")
        # nginx notes a permission after its answer.
        eventually(lambda: _first(nodes, again).status == 206)
        answer = asked("a")
        assert answer.status == 206
        assert answer.headers["etag"] == '"any"'
        assert answer.headers["content-range"] == "bytes 0-0/1000"
        assert asked("b").status == (206 if same_rights else 404)
        assert asked("a", "another").status == 404
