"""Lists of the nodes of a cluster, its stores, the owners of parts, and limits of time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.cluster.nginx_conf import time_limits
from shardcache.cluster.node_list import parse
from shardcache.cluster.tier_config import Tier, Upstream
from shardcache.errors import ConfigError
from shardcache.origin.tier.tier_state import QUESTION_STALL_SHARE
from support.cluster.ring import Ring, key_of

PART_BYTES = 8 * 1024**2


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a=10.0.0.1,b=10.0.0.2", ["a", "b"]),
        ("a=10.0.0.1 # the first\n\nb=10.0.0.2\n", ["a", "b"]),
        ("10.0.0.{1..3}", ["10.0.0.1", "10.0.0.2", "10.0.0.3"]),
        ("10.0.0.[1-2,9],10.0.1.1", ["10.0.0.1", "10.0.0.2", "10.0.0.9", "10.0.1.1"]),
        ("10.0.0.{1,3} 10.0.0.[5]", ["10.0.0.1", "10.0.0.3", "10.0.0.5"]),
        ("fd00::1,fd00::2", ["fd00::1", "fd00::2"]),
    ],
)
def test_lists_are_read_as_schedulers_and_shells_write_them(text: str, names: list[str]) -> None:
    """Ranges, commas, lines and comments; the order stays."""
    assert [node.name for node in parse(text)] == names


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("a=10.0.0.1,a=10.0.0.2", "name a twice"),
        ("a=10.0.0.1,b=10.0.0.1", "address 10.0.0.1 twice"),
        ("a=10.0.0.1,b=127.0.1.1", "loopback"),
        ("a=somewhere", "not an IP address"),
        ("../a=10.0.0.1", "not a node"),
        ("no-such-host.invalid", "no address"),
        ("10.0.{0..99}.{0..99}", "more than 4,096"),
        ("10.0.0.1,10.0.0.2}", "unbalanced"),
        ("10.0.0.[1-8", "unbalanced"),
    ],
)
def test_a_list_that_cannot_be_used_says_why(text: str, reason: str) -> None:
    """The error names what is wrong, and what to write instead."""
    with pytest.raises(ConfigError, match=reason) as raised:
        parse(text)
    assert raised.value.remedy


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "https://",
        "https://host/bucket",
        "https://host:0",
        "https://host:x",
        "https://user@host",
        "https://host#part",
        "https://h;x",
        "h",
        "https://10.0.9.9",
    ],
)
def test_a_store_is_an_endpoint(url: str) -> None:
    """A bucket, path or nginx syntax is refused, as is unverifiable TLS at an address."""
    with pytest.raises(ConfigError) as refused:
        Upstream.parse(url)
    assert refused.value.remedy


def test_a_list_has_a_limit_however_it_is_written() -> None:
    """4,096 nodes are listed and one more is refused, even over several ranges."""
    many = "10.0.[0-15].[0-255]"
    assert len(parse(many)) == 4096
    with pytest.raises(ConfigError, match="4,097 nodes"):
        parse(f"{many},10.1.0.1")


def _tier(nodes: str) -> Tier:
    return Tier(nodes=parse(nodes), stores=(Upstream.parse("http://store"),))


def _keys(shards: int, parts: int) -> list[str]:
    urls = [
        f"https://data.s3.eu-central-1.amazonaws.com/set/train-{shard:06d}.tar"
        for shard in range(shards)
    ]
    return [key_of(url, part * PART_BYTES, PART_BYTES) for url in urls for part in range(parts)]


@pytest.mark.parametrize(
    ("nodes", "limit"),
    [("10.0.0.{1..8}", 1.1), pytest.param("10.[0-3].0.[0-249]", 1.25, marks=pytest.mark.slow)],
)
def test_owners_have_little_more_than_the_mean(nodes: str, limit: float) -> None:
    """Of 8,192 shards of 256 MiB, on eight nodes as on a thousand; none owns nothing."""
    loads = Ring(_tier(nodes)).loads(_keys(8192, 32))
    assert loads.max() <= limit
    assert loads.min() > 0.5


@pytest.mark.parametrize(
    ("nodes", "moved"), [("10.0.0.{1..8}", 0), ("10.[10-50].0.[231-255]", 1 / 8)]
)
@pytest.mark.slow
def test_a_node_that_leaves_moves_few_parts_but_its_own(nodes: str, moved: float) -> None:
    """None, except that the ring of 1,024 nodes has more points per node than that of 1,025."""
    tier = _tier(nodes)
    keys = _keys(64, 32)
    before, after = (
        Ring(replace(tier, nodes=tier.nodes[:count])).owners(keys) for count in (None, -1)
    )
    assert (before != after)[before != len(tier.nodes) - 1].mean() <= moved


@given(st.floats(1.0, 10_000.0))
def test_the_time_limits_of_the_tier_follow_from_the_stall_timeout(stall_timeout_s: float) -> None:
    """An owner answers before the daemon gives up, and a worker ends before the store."""
    limits = time_limits(stall_timeout_s)
    assert (
        limits["connect_ms"] < 1000 * QUESTION_STALL_SHARE * stall_timeout_s > limits["answer_ms"]
    )
    assert limits["lease_ms"] < limits["store_ms"] < limits["front_ms"]


def test_time_limits_that_nginx_cannot_have_are_refused() -> None:
    """It counts milliseconds, and days."""
    for stall_timeout_s in (0.0, 0.001, 1e6):
        with pytest.raises(ConfigError, match="cannot derive its time limits"):
            time_limits(stall_timeout_s)
