"""Lists of the nodes of a cluster, its stores, the ring, and limits of time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.cluster.nginx import time_limits
from shardcache.cluster.tier import Ring, Upstream, key_of, parse
from shardcache.errors import ConfigError
from shardcache.origin.registry import QUESTION


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
    ],
)
def test_a_list_that_cannot_be_used_says_why(text: str, reason: str) -> None:
    """The error names what is wrong, and what to write instead."""
    with pytest.raises(ConfigError, match=reason) as raised:
        parse(text)
    assert raised.value.remedy


@pytest.mark.parametrize(
    "url", ["s3://bucket", "https://", "https://host/bucket", "https://host:0", "https://h;x", "h", "https://10.0.9.9"]
)
def test_a_store_is_an_endpoint(url: str) -> None:
    """A bucket, a path or a piece of nginx's syntax is refused; so is TLS at an address, which nginx cannot verify."""
    with pytest.raises(ConfigError) as refused:
        Upstream.parse(url)
    assert refused.value.remedy


def test_shares_are_those_of_the_keys() -> None:
    """The shares of the nodes sum up to one, and agree with the owners of many keys."""
    ring = Ring([f"10.0.0.{number}:9081" for number in range(1, 9)])
    shares = ring.shares()
    keys = [f"store/data/train-{number:06d}.tar" for number in range(20_000)]
    counted = {address: sum(ring.owner(key) == address for key in keys) / len(keys) for address in shares}
    assert sum(shares.values()) == pytest.approx(1)
    assert counted == pytest.approx(shares, abs=0.01)


def test_a_node_that_leaves_moves_only_its_own_shards() -> None:
    """All others stay where they are."""
    addresses = [f"10.0.0.{number}:9081" for number in range(1, 9)]
    before, after = Ring(addresses), Ring(addresses[:-1])
    for number in range(500):
        key = key_of(f"http://store/data/{number}?X-Amz-Signature=1")
        assert before.owner(key) in (after.owner(key), addresses[-1])


@given(st.floats(1.0, 10_000.0))
def test_the_time_limits_of_the_tier_follow_from_the_stall_timeout(stall_timeout_s: float) -> None:
    """An owner answers before the daemon stops asking, the store has its time, and the front outlasts the owner."""
    limits = time_limits(stall_timeout_s)
    assert limits["connect_ms"] < 1000 * QUESTION * stall_timeout_s > limits["answer_ms"]
    assert limits["store_ms"] < limits["wait_ms"] < limits["front_ms"]


def test_time_limits_that_nginx_cannot_have_are_refused() -> None:
    """It counts milliseconds, and days."""
    for stall_timeout_s in (0.0, 0.001, 1e6):
        with pytest.raises(ConfigError, match="no time limits follow"):
            time_limits(stall_timeout_s)
