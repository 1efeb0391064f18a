"""The tier in front of a store that is reached over TLS, by its name or by its address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import botocore.session
import pytest
from botocore.config import Config

from support.cluster.tier_nodes import Answer, TierNodes, needs_nginx
from support.network.certificates import Certificate, make_certificate
from support.network.lead import NameServer
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import make_tar, random_samples
from support.stores.seaweedfs import DOMAIN, REGION, SeaweedFS

pytestmark = needs_nginx

BODY = os.urandom(200_000)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Of the store."""
    return make_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def store(certificate: Certificate) -> Iterator[SeaweedFS]:
    """A store that also speaks TLS, with one object."""
    with SeaweedFS(certificate=certificate) as it:
        it.make_bucket("data")
        it.put("data", "a.tar", BODY)
        yield it


def part(store: SeaweedFS, nodes: TierNodes, node: int = 0, *, style: str = "virtual") -> Answer:
    """Request the object's first bytes from a node, by a url that has the store's name."""
    session = botocore.session.Session()
    session.set_credentials(store.access_key, store.secret_key)
    client = session.create_client(
        "s3",
        region_name=REGION,
        endpoint_url=store.https_endpoint_url.replace("127.0.0.1", DOMAIN),
        config=Config(signature_version="s3v4", s3={"addressing_style": style}),
    )
    url = client.generate_presigned_url("get_object", Params={"Bucket": "data", "Key": "a.tar"})
    etag = store.client.head_object(Bucket="data", Key="a.tar")["ETag"]
    return nodes.get(nodes.front(nodes.tier.nodes[node]), url, {"Range": "bytes=0-99999", "If-Match": etag})


def by_name(store: SeaweedFS) -> list[str]:
    """Return the stores of a tier that finds this one by its name."""
    return [store.https_endpoint_url.replace("127.0.0.1", DOMAIN)]


def test_a_store_is_found_by_its_name(store: SeaweedFS, certificate: Certificate) -> None:
    """And the names of its buckets at run time; fetched once over TLS, for all nodes."""
    with (
        NameServer() as names,
        TierNodes(by_name(store), 2, resolvers=(names.address,), store_ca=certificate.ca) as nodes,
    ):
        for style in ("virtual", "path"):
            answers = [part(store, nodes, node, style=style) for node in (0, 1)]
            assert [answer.body for answer in answers] == [BODY[:100_000]] * 2
            assert [answer.headers["x-shardcache-tier"] for answer in answers] == ["MISS", "HIT"]
        assert names.asked == {DOMAIN, f"data.{DOMAIN}"}


def test_a_store_of_another_authority_is_not_trusted(store: SeaweedFS, tmp_path: Path) -> None:
    """The tier answers with an error, and caches nothing: its caller then asks the store itself."""
    other = make_certificate(tmp_path)
    with NameServer() as names, TierNodes(by_name(store), 1, resolvers=(names.address,), store_ca=other.ca) as nodes:
        assert part(store, nodes).status in (500, 502)
        assert nodes.cached(nodes.tier.nodes[0]) == []


def test_a_store_whose_certificate_has_another_name_is_not_trusted(store: SeaweedFS, certificate: Certificate) -> None:
    """A name below another domain, at the same address."""
    url = store.https_endpoint_url.replace("127.0.0.1", "store.invalid")
    with NameServer() as names, TierNodes([url], 1, resolvers=(names.address,), store_ca=certificate.ca) as nodes:
        front = nodes.front(nodes.tier.nodes[0])
        answer = nodes.get(front, f"{url}/data/a.tar?", {"Range": "bytes=0-99", "If-Match": '"any"'})
        assert answer.status in (500, 502)
        assert names.asked == {"store.invalid"}


def test_daemons_share_what_one_fetched_over_tls(store: SeaweedFS, certificate: Certificate, tmp_path: Path) -> None:
    """Versions and listings over TLS from the store, parts from the tier, which alone fetched them, once."""
    store.make_bucket("train")
    url = store.put("train", "a.tar", make_tar(random_samples(20, {"bin": 50_000})))
    env = {**store.https_env(), "AWS_ENDPOINT_URL": by_name(store)[0]}
    with (
        NameServer() as names,
        TierNodes(by_name(store), 2, resolvers=(names.address,), store_ca=certificate.ca) as nodes,
    ):
        for node in nodes.tier.nodes:
            root = tmp_path / node.name
            root.mkdir()
            config = root / "shardcache.toml"
            config.write_text(f'[[origin]]\nmatch = "s3://"\ntier = "{nodes.front(node)}"\n')
            with Daemon(root, "--config", str(config), env=env) as daemon:
                assert shardcache("warm", url, socket=daemon.socket).code == 0
                counters = daemon.status()["counters"]
                assert (counters["tier_failures"], counters["origin_bytes"]) == (0, 0)
                assert counters["tier_bytes"] > 20 * 50_000
        fetched = [line for node in nodes.tier.nodes for line in nodes.log(node) if line["cache"] == "MISS"]
        assert len(fetched) == 1
