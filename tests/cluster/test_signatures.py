"""Requests that the store would refuse are refused by the tier, for parts that it has cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import pytest
from botocore.config import Config

from support.cluster.cluster import Cluster
from support.cluster.node import Node, Store
from support.cluster.tier import Tier
from support.stores.seaweedfs import REGION

pytestmark = pytest.mark.slow  # tests/integration/cluster has the same of nodes on the loopback

MIB = 1024 * 1024
KEYS = [f"{number:06d}.tar" for number in range(6)]
KEY, OTHER_KEY, *_ = KEYS


@dataclass(frozen=True, slots=True)
class Cached:
    """A part that every node has cached for the cluster.

    Attributes:
        headers: of the requests for it.
        body: of the answers.
    """

    tier: Tier
    nodes: list[Node]
    store: Store
    headers: dict[str, str]
    body: bytes

    def signed(self, key: str = KEY, secret_key: str | None = None) -> str:
        """Return the path and query of a signed url."""
        store = self.store
        client = _client(store.endpoint_url, store.access_key, secret_key or store.secret_key)
        where = {"Bucket": "signed", "Key": key}
        parts = urlsplit(client.generate_presigned_url("get_object", Params=where, ExpiresIn=600))
        return f"{parts.path}?{parts.query}"


@cache
def _client(endpoint_url: str, access_key: str, secret_key: str) -> Any:
    session = botocore.session.Session()
    session.set_credentials(access_key, secret_key)
    config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
    return session.create_client("s3", REGION, endpoint_url=endpoint_url, config=config)


@pytest.fixture(scope="module")
def cached(cluster: Cluster) -> Iterator[Cached]:
    """The first part of a shard, fetched by an owner of each node."""
    store, (start, stop) = cluster.store, (0, MIB)
    store.fill("signed", len(KEYS), 2 * MIB)
    with store.host.entered():
        answer = store.client.get_object(Bucket="signed", Key=KEY)
        body = answer["Body"].read()[start:stop]
    headers = {
        "Host": urlsplit(store.endpoint_url).netloc,
        "If-Match": answer["ETag"],
        "Range": f"bytes={start}-{stop - 1}",
    }
    with cluster.tiered(3) as (nodes, tier):
        found = Cached(tier, nodes, store, headers, body)
        for node in nodes:
            assert tier.ask_owner(node, found.signed(), headers) == (206, body)
        yield found


def without(cached: Cached) -> str:
    """Return a url without a signature."""
    return cached.signed().partition("?")[0]


def with_another_key(cached: Cached) -> str:
    """Return a url signed with a wrong secret key."""
    return cached.signed(secret_key="wrong")


def tampered(cached: Cached) -> str:
    """Return a url whose signature has one digit changed."""
    signed = cached.signed()
    return signed[:-1] + ("0" if signed[-1] != "0" else "1")


def of_another_shard(cached: Cached) -> str:
    """Return a url with the signature of another shard's."""
    return cached.signed(OTHER_KEY).replace(OTHER_KEY, KEY)


@pytest.mark.parametrize("url", [without, with_another_key, tampered, of_another_shard])
class TestRefused:
    """Urls that the store does not take."""

    def test_the_store_refuses_it(self, cached: Cached, url: Callable[[Cached], str]) -> None:
        """It is a url that has to be refused."""
        host, _, port = cached.headers["Host"].rpartition(":")
        status, _ = cached.nodes[0].ask(host, int(port), url(cached), cached.headers)
        assert status == 403

    def test_the_front_refuses_it(self, cached: Cached, url: Callable[[Cached], str]) -> None:
        """The same from the nginx that the node's own daemon asks."""
        for node in cached.nodes:
            status, body = cached.tier.ask_front(node, url(cached), cached.headers)
            assert (status, cached.body in body) == (403, False)

    def test_every_owner_refuses_it(self, cached: Cached, url: Callable[[Cached], str]) -> None:
        """The same from the nginx that has it cached, asked as one node asks another."""
        for node in cached.nodes:
            status, body = cached.tier.ask_owner(node, url(cached), cached.headers)
            assert (status, cached.body in body) == (403, False)


def test_a_signature_that_the_store_takes_is_good_for_what_is_cached(cached: Cached) -> None:
    """The part comes from the tier, whoever has signed when, and costs the store next to nothing."""
    before_bytes = cached.store.host.sent_bytes()
    for node in cached.nodes:
        assert cached.tier.ask_front(node, cached.signed(), cached.headers) == (206, cached.body)
    assert cached.store.host.sent_bytes() - before_bytes < len(cached.body) / 10


def test_no_log_holds_a_signature(cached: Cached) -> None:
    """Not even after errors about requests: owners that do not answer, and signatures that are refused."""
    alone, *owners = cached.nodes
    for owner in owners:
        cached.tier[owner].kill()
    try:
        for key in KEYS:
            cached.tier.ask_front(alone, cached.signed(key), cached.headers)
            cached.tier.ask_front(alone, cached.signed(key, "wrong"), cached.headers)
    finally:
        for owner in owners:
            cached.tier[owner].start()
    cached.tier.check_logs()
