"""The tier of a cluster: nginx on each node, as `shardcache cluster render` configures it."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http.client import IncompleteRead
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from botocore.config import Config

from shardcache.shared.lists import shardlist
from shardcache.shared.protocol import ShardRef
from shardcache_client.dataset import ShardDataset
from shardcache_client.files.filesystem import ShardcacheFileSystem
from support.cluster.ring import Ring, key_of
from support.cluster.tier_nodes import TierNodes, needs_nginx
from support.network.certificates import Authority
from support.network.http_requests import Answer
from support.network.lead import NameServer
from support.programs.cli import shardcache
from support.programs.daemon import Daemon, eventually
from support.shards.tars import make_tar, random_samples
from support.stores.faulty_s3 import FaultyS3
from support.stores.s3_client import s3_client
from support.stores.seaweedfs import DOMAIN, REGION, SeaweedFS

pytestmark = needs_nginx

PART = {"Range": "bytes=0-99999"}
SHARDS = [f"train-{number:06d}.tar" for number in range(12)]
BODIES = {name: os.urandom(200_000) for name in SHARDS}


@dataclass(frozen=True)
class Cluster:
    """A store, three nodes, and the shards' ETags."""

    store: SeaweedFS
    nodes: TierNodes
    etags: dict[str, str]

    def signed(self, name: str, secret: str | None = None, expires_s: int = 600) -> str:
        """Return the signed url of a shard."""
        client = _client(
            self.store.endpoint_url, self.store.access_key, secret or self.store.secret_key
        )
        params = {"Bucket": "data", "Key": name}
        url: str = client.generate_presigned_url("get_object", Params=params, ExpiresIn=expires_s)
        return url

    def part(
        self, name: str, node: int = 0, *, owner: bool = False, url: str | None = None, **more: str
    ) -> Answer:
        """Request the first part of a shard from a node's front, or from its owner."""
        server = self.nodes.tier.nodes[node]
        address = server.at(self.nodes.tier.owner_port) if owner else self.nodes.front(server)
        headers = {
            **PART,
            "If-Match": self.etags[name],
            **{key.replace("_", "-"): more[key] for key in more},
        }
        return self.nodes.get(address, url or self.signed(name), headers)


@cache
def _client(endpoint_url: str, access_key: str, secret_key: str, style: str = "path") -> Any:
    config = Config(signature_version="s3v4", s3={"addressing_style": style})
    return s3_client(endpoint_url, access_key, secret_key, region=REGION, config=config)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that signs the store's certificate."""
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[Cluster]:
    """Three nodes in front of a store that checks signatures, and speaks TLS as well."""
    with SeaweedFS(authority=authority) as store:
        store.make_bucket("data")
        for name, body in BODIES.items():
            store.put("data", name, body)
        etags = {name: store.client.head_object(Bucket="data", Key=name)["ETag"] for name in SHARDS}
        with TierNodes([store.endpoint_url]) as nodes:
            yield Cluster(store, nodes, etags)


@pytest.mark.slow
def test_nginx_and_the_ring_agree_on_owners(cluster: Cluster) -> None:
    """The ring computes the owner that nginx asks for each part, and a shard has all owners."""
    nodes = cluster.nodes
    tier = cluster.nodes.tier
    url = f"{cluster.store.endpoint_url}/data/{os.urandom(8).hex()}.tar"
    starts = range(0, 500_000, 1000)
    for start in starts:
        headers = {"Range": f"bytes={start}-{start + 999}", "If-Match": '"any"'}
        nodes.get(nodes.front(tier.nodes[0]), url, headers)
    ring = Ring(tier)
    wanted = [
        ring.addresses[place] for place in ring.owners(key_of(url, start, 1000) for start in starts)
    ]

    def sent() -> list[str]:  # nginx logs a request after its answer
        rows = nodes.log(tier.nodes[0])
        return [
            row["upstream"]
            for row in rows
            if row["path"] in url and row["port"] != str(tier.owner_port)
        ]

    eventually(lambda: len(sent()) == len(starts))
    assert sent() == wanted
    assert set(wanted) == {node.at(tier.owner_port) for node in tier.nodes}


def test_cached_part_is_only_for_clients_that_the_store_permits(cluster: Cluster) -> None:
    """The front and every owner refuse a wrong, missing or tampered signature."""
    name = SHARDS[0]
    right = cluster.signed(name)
    assert [cluster.part(name, node).status for node in range(3)] == [206, 206, 206]
    tampered = right[:-1] + ("1" if right[-1] == "0" else "0")
    unsigned = right.partition("?")[0]
    for url in (
        cluster.signed(name, "wrong"),
        tampered,
        unsigned,
        cluster.signed(SHARDS[1]).replace(SHARDS[1], name),
    ):
        for node, owner in product(range(3), (True, False)):
            assert cluster.part(name, node, owner=owner, url=url).status == 403


def test_the_tier_leads_to_its_stores_alone(cluster: Cluster) -> None:
    """Requests for other hosts, and requests that are not for a part of a version, lead nowhere."""
    name = SHARDS[0]
    nodes = cluster.nodes
    signed = cluster.signed(name)
    for server in (nodes.front(nodes.tier.nodes[0]), nodes.tier.nodes[0].at(nodes.tier.owner_port)):
        etag = {"If-Match": cluster.etags[name]}
        for host in ("169.254.169.254", "localhost", "127.0.0.1", "evil.example"):
            assert nodes.get(server, signed, {**PART, **etag, "Host": host}).status == 421
        assert nodes.get(server, signed, etag).status == 403
        assert nodes.get(server, signed, PART).status == 403
        assert nodes.get(server, signed, {**etag, "Range": "bytes=0-9,20-29"}).status == 403
        assert nodes.get(
            server, signed.replace("/data/", "/.shardcache/may"), {**PART, **etag}
        ).status in (403, 404)


def test_a_refetch_goes_past_the_cache_and_mends_it(cluster: Cluster) -> None:
    """A damaged part is served until a request asks for a fresh one, and is right after it."""
    name = SHARDS[2]
    cluster.part(name)
    marker = BODIES[name][1000:1100]
    for node in cluster.nodes.tier.nodes:
        for path in cluster.nodes.cached(node):
            path.write_bytes(path.read_bytes().replace(marker, bytes(100)))
    assert cluster.part(name).body != BODIES[name][:100_000]
    assert cluster.part(name, 1, X_Shardcache_Fresh="1").body == BODIES[name][:100_000]
    assert cluster.part(name, 2).body == BODIES[name][:100_000]


@pytest.mark.slow
def test_signatures_are_not_logged(cluster: Cluster) -> None:
    """Neither refusals nor damage nor successes leave a signature in a log, or on disk."""
    name = SHARDS[3]
    folder = cluster.nodes.folder
    cluster.part(name)
    for node in cluster.nodes.tier.nodes:
        for path in cluster.nodes.cached(node):
            os.truncate(path, 5000)
    with pytest.raises(IncompleteRead):
        cluster.part(name)
    cluster.part(name, url=cluster.signed(name, "wrong"))
    kept = [path for path in folder.rglob("*") if path.is_file() and "/run/" not in str(path)]
    assert {"access.log", "node1.log"} <= {path.name for path in kept}
    assert [
        path
        for path in kept
        if re.search(rb"X-Amz-(Signature|Credential)=[0-9A-Za-z]", path.read_bytes())
    ] == []


def test_a_fresh_permission_is_for_the_version_that_the_store_has(cluster: Cluster) -> None:
    """The cached bytes of a replaced object are not for those who ask for them after that."""
    name = "replaced.tar"
    cluster.store.put("data", name, BODIES[SHARDS[0]])
    etag = cluster.store.client.head_object(Bucket="data", Key=name)["ETag"]
    node = cluster.nodes.front(cluster.nodes.tier.nodes[0])
    headers = {**PART, "If-Match": etag}
    urls = [cluster.signed(name, expires_s=expires_s) for expires_s in (600, 601)]
    assert cluster.nodes.get(node, urls[0], headers).status == 206
    cluster.store.put("data", name, BODIES[SHARDS[1]])
    assert cluster.nodes.get(node, urls[1], headers).status == 412


@pytest.mark.slow
def test_new_daemons_read_what_the_tier_has_while_the_store_fails(tmp_path: Path) -> None:
    """A daemon that has lost its cache, and a new one, learn the version from the tier.

    A shard that nobody read is not to be had.
    """
    with SeaweedFS() as store, TierNodes([store.endpoint_url], 2, outage_s=600) as nodes:
        store.make_bucket("data")
        urls = [
            store.put("data", f"{name}.tar", make_tar(random_samples(20)))
            for name in ("read", "unread")
        ]
        first, second = nodes.tier.nodes
        with _daemon(tmp_path / "first", nodes.front(first), store) as daemon:
            assert shardcache("warm", urls[0], socket=daemon.socket).code == 0
        os.kill(store.pid, signal.SIGKILL)
        for name, node in (("again", first), ("new", second)):
            with _daemon(tmp_path / name, nodes.front(node), store, "--attempts", "2") as daemon:
                assert shardcache("warm", urls[0], socket=daemon.socket).code == 0
                assert daemon.status()["counters"]["origin_bytes"] == 0
                assert shardcache("warm", urls[1], socket=daemon.socket).code == 1


@pytest.mark.slow
async def test_simulated_requests_are_those_of_a_run(tmp_path: Path) -> None:
    """No run makes more requests for versions, permissions and parts, and this one nearly as many.

    Two more open the connections; a shard that is read while it arrives is not asked for again.
    """
    index = tmp_path / "index.json"
    async with FaultyS3() as store:
        tar = make_tar(random_samples(20))
        urls = [store.put(f"{number}.tar", tar) for number in range(12)]
        index.write_text(shardlist.write([ShardRef(url, None, len(tar), 20) for url in urls]))

        def read() -> None:
            with TierNodes([store.endpoint_url], 1) as nodes:
                front = nodes.front(nodes.tier.nodes[0])
                with _daemon(tmp_path / "d", front, store, "--listing-ttl-s", "0") as daemon:
                    dataset = ShardDataset(index, shuffle=True, seed=0, socket=daemon.socket)
                    for epoch in range(2):
                        dataset.set_epoch(epoch)
                        assert sum(1 for _ in dataset) == 240

        await asyncio.to_thread(read)
    options = ("--disk", "1GB", "--ranks", "1", "--workers", "1", "--epochs", "2", "--tier")
    simulated = shardcache("simulate", index, *options, "--json").json["policies"]["shardcache"][
        "requests"
    ]
    assert simulated == 12 + 2 * 12 + 12 + 12
    assert 0.8 * simulated <= len(store.seen) <= simulated + 2


def _daemon(root: Path, front: str, store: SeaweedFS | FaultyS3, *flags: str) -> Daemon:
    """Return a daemon with an empty cache whose shards come by way of a front."""
    root.mkdir()
    config = root / "shardcache.toml"
    config.write_text(f'[[origin]]\nmatch = "s3://"\ntier = "{front}"\n')
    return Daemon(root, "--config", str(config), *flags, env=store.env())


# The same store, reached over TLS by its name


def part(cluster: Cluster, nodes: TierNodes, node: int = 0, *, style: str = "virtual") -> Answer:
    """Request the first bytes of a shard from a node, by a url that has the store's name."""
    client = _client(
        *by_name(cluster.store), cluster.store.access_key, cluster.store.secret_key, style
    )
    url = client.generate_presigned_url("get_object", Params={"Bucket": "data", "Key": SHARDS[0]})
    headers = {**PART, "If-Match": cluster.etags[SHARDS[0]]}
    return nodes.get(nodes.front(nodes.tier.nodes[node]), url, headers)


def by_name(store: SeaweedFS, name: str = DOMAIN) -> list[str]:
    """Return the stores of a tier that finds this one by a name."""
    return [store.https_endpoint_url.replace("127.0.0.1", name)]


@pytest.mark.slow
def test_a_store_is_found_by_its_name(cluster: Cluster, authority: Authority) -> None:
    """And the names of its buckets at run time; fetched once over TLS, for all nodes.

    One at the same address, whose certificate has another name, is not trusted.
    """
    (stranger,) = by_name(cluster.store, "store.invalid")
    stores = [*by_name(cluster.store), stranger]
    with (
        NameServer() as names,
        TierNodes(stores, 2, resolvers=(names.address,), store_ca=authority.ca_file) as nodes,
    ):
        for style in ("virtual", "path"):
            answers = [part(cluster, nodes, node, style=style) for node in (0, 1)]
            assert [answer.body for answer in answers] == [BODIES[SHARDS[0]][:100_000]] * 2
            assert [answer.headers["x-shardcache-tier"] for answer in answers] == ["MISS", "HIT"]
        answer = nodes.get(
            nodes.front(nodes.tier.nodes[0]),
            f"{stranger}/data/a.tar?",
            {**PART, "If-Match": '"any"'},
        )
        assert answer.status in (500, 502)
        assert names.asked == {DOMAIN, f"data.{DOMAIN}", "store.invalid"}


@pytest.mark.slow
def test_daemons_share_what_one_fetched_over_tls(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    """Versions and listings come from the store, and parts from the tier, fetched once."""
    stores = by_name(cluster.store)
    url = cluster.store.put("data", "over-tls.tar", make_tar(random_samples(20, {"bin": 50_000})))
    env = {**cluster.store.https_env(), "AWS_ENDPOINT_URL": stores[0]}
    with (
        NameServer() as names,
        TierNodes(stores, 2, resolvers=(names.address,), store_ca=authority.ca_file) as nodes,
    ):
        for node in nodes.tier.nodes:
            root = tmp_path / node.name
            root.mkdir()
            config = root / "shardcache.toml"
            config.write_text(f'[[origin]]\nmatch = "s3://"\ntier = "{nodes.front(node)}"\n')
            with Daemon(root, "--config", str(config), env=env) as daemon:
                assert shardcache("warm", url, socket=daemon.socket).code == 0
                counters = daemon.status()["counters"]
                assert counters["tier_failures"] == 0
                assert counters["origin_bytes"] == 0
                assert counters["tier_bytes"] > 20 * 50_000
        fetched = [
            line for node in nodes.tier.nodes for line in nodes.log(node) if line["cache"] == "MISS"
        ]
        assert len(fetched) == 1


def _read_spans(daemon: Daemon, url: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    files = ShardcacheFileSystem(
        "s3", socket=str(daemon.socket), skip_instance_cache=True, block_size=1024
    )
    found = []
    with files.open(url) as file:
        for start, end in spans:
            file.seek(start)
            found.append(file.read(end - start))
    return found


@pytest.mark.slow
def test_ranges_come_from_the_owners_of_their_parts(tmp_path: Path) -> None:
    """Two nodes read overlapping ranges, and the store sends each part once."""
    kib = 1024
    part_bytes = 64 * kib
    body = os.urandom(40 * part_bytes)
    spans = [
        [(5 * part_bytes, 9 * part_bytes)],
        [(3 * part_bytes + 7, 6 * part_bytes), (8 * part_bytes, 11 * part_bytes)],
    ]
    with SeaweedFS() as store, TierNodes([store.endpoint_url], 2) as nodes:
        store.make_bucket("data")
        url = store.put("data", "weights.bin", body)
        for node, wanted in zip(nodes.tier.nodes, spans, strict=True):
            with _daemon(
                tmp_path / node.name, nodes.front(node), store, "--range-part-size", str(part_bytes)
            ) as daemon:
                assert _read_spans(daemon, url, wanted) == [
                    body[start:end] for start, end in wanted
                ]
                counters = daemon.status()["counters"]
                assert counters["origin_bytes"] == 0
                assert counters["tier_failures"] == 0

        def fetched() -> list[str]:
            return [
                row["range"]
                for node in nodes.tier.nodes
                for row in nodes.log(node)
                if row["cache"] == "MISS"
            ]

        eventually(lambda: len(fetched()) >= 8)
        assert len(set(fetched())) == len(fetched())
