"""A tier of many nodes: who owns what, and how much of the nodes' lines is in use.

`python -m benchmarks.downloads.egress` prints the figures of docs/cluster.md. It simulates
decisions, by the real ring, and the daemon's own rules and limits of time for late parts; no byte
is moved, and no packet lost.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np

from shardcache.cluster.nginx_conf import time_limits
from shardcache.cluster.node_list import parse
from shardcache.cluster.tier_config import Tier, Upstream
from shardcache.fetch.limits.hedging import Hedging
from support.cluster.ring import Ring, key_of

SHARDS = 8192
PARTS = 32
PART_BYTES = 8 * 1024**2
CONNECTIONS = 16
STALL_TIMEOUT_S = 20.0
FAIL_TIMEOUT_S = 10.0
LINE_BYTES_PER_S = 1.25e9
PER_SHARD = "owners of shards"
PER_PART = "owners of parts"
_STORE = "https://s3.eu-central-1.amazonaws.com"
_STEPS_PER_PART = 2
_HORIZON = 1500


def ring(nodes: int) -> Ring:
    listed = parse(
        ",".join(
            f"10.{number // 62500}.{number // 250 % 250}.{number % 250}" for number in range(nodes)
        )
    )
    return Ring(Tier(nodes=listed, stores=(Upstream.parse(_STORE),)))


def keys(shards: int, *, whole: bool = False) -> Iterator[str]:
    for shard, part in product(range(shards), range(PARTS)):
        key = key_of(f"{_STORE}/dataset/train-{shard:06d}.tar", part * PART_BYTES, PART_BYTES)
        yield key.partition("bytes=")[0] if whole else key


def loads(nodes: int, *, whole: bool = False) -> "np.typing.NDArray[np.float64]":
    return ring(nodes).loads(keys(SHARDS, whole=whole))


def hot_spot(nodes: int, shards: int, *, whole: bool, own_orders: bool) -> str:
    """Let all nodes fetch the same shards from a warm tier; return the used share of their lines.

    Time is counted in parts at line rate. An owner shares its line equally among its requests; so
    does a node that would get more than its own.
    """
    random = np.random.default_rng(1)
    total = min(shards, _HORIZON // PARTS + 1) * PARTS
    owners = ring(nodes).owners(keys(shards, whole=whole)).reshape(shards, PARTS)
    longest = _HORIZON // PARTS + 1
    if own_orders:
        order = [random.permutation(shards)[:longest] for _ in range(nodes)]
    else:
        order = [np.arange(min(shards, longest)) for _ in range(nodes)]
    sequence = np.array([owners[each].reshape(-1) for each in order])
    part_s = PART_BYTES / LINE_BYTES_PER_S
    limits = [Hedging(0.03) for _ in range(nodes)]
    rows = np.repeat(np.arange(nodes), CONNECTIONS).reshape(nodes, -1)
    place = np.tile(np.arange(CONNECTIONS), (nodes, 1))
    left = np.ones(place.shape)
    took = 0.0
    begun = np.zeros(place.shape)
    asked = 0
    moved = 0.0
    while took < _HORIZON:
        busy = place < total
        if not busy.any():
            break
        to = sequence[rows, np.minimum(place, total - 1)]
        rates = np.where(busy, 1 / np.bincount(to[busy], minlength=nodes).clip(1)[to], 0.0)
        rates /= np.maximum(1, rates.sum(axis=1, keepdims=True))
        sent = np.minimum(rates / _STEPS_PER_PART, left)
        left = left - sent
        took = took + 1 / _STEPS_PER_PART
        moved = moved + sent[busy].sum()
        for node, slot in np.argwhere(busy & (left <= 1e-9)):
            limits[node].record_time(PART_BYTES, (took - begun[node, slot]) * part_s)
        late = busy & (left > 0) & ((took - begun) * part_s >= 0.04 * STALL_TIMEOUT_S)
        if int(took * _STEPS_PER_PART) % 64 == 0:
            asked += sum(
                _is_late(
                    limits[node], rates[node], left[node, slot], (took - begun[node, slot]) * part_s
                )
                for node, slot in np.argwhere(late)
            )
        done = busy & (left <= 1e-9)
        following = place.max(axis=1, keepdims=True) + np.cumsum(done, axis=1)
        place = np.where(done, following, place)
        left = np.where(done, 1.0, left)
        begun = np.where(done, took, begun)
    speed = f"{moved / nodes / took:.3f} of the lines, {took * part_s:.1f} s"
    return f"{speed}, {asked} requests past the tier"


def _is_late(
    hedging: Hedging, rates: "np.typing.NDArray[np.float64]", left: float, elapsed_s: float
) -> bool:
    """Return whether a daemon requests a part from the store as well."""
    usual_s = hedging.usual_s(PART_BYTES, STALL_TIMEOUT_S)
    received = int((1 - left) * PART_BYTES)
    others = list(rates[rates > 0] * LINE_BYTES_PER_S)
    left_s = hedging.left_s(PART_BYTES, received, elapsed_s, usual_s, others, STALL_TIMEOUT_S)
    return left_s is not None and hedging.spend()


def waiting(nodes: int, silent: float = 0.01) -> float:
    """Return a node's mean number of connections that wait for silent owners."""
    until_next_s = FAIL_TIMEOUT_S + nodes * PART_BYTES / LINE_BYTES_PER_S
    return silent * nodes * time_limits(STALL_TIMEOUT_S)["connect_ms"] / 1000 / until_next_s


def main() -> None:
    for nodes in (64, 1000, 4000):
        for name, found in ((PER_SHARD, loads(nodes, whole=True)), (PER_PART, loads(nodes))):
            idle = (found == 0).sum()
            print(
                f"{nodes} nodes, {name}: {found.max():.2f} of the mean at most, {idle} own nothing"
            )
    for nodes, shards in ((5, 32), (1000, SHARDS), (1000, 1)):
        for whole, own in ((True, False), (False, False), (False, True)):
            unit = PER_SHARD if whole else PER_PART
            order = "an order per node" if own else "one order"
            print(
                f"{nodes} nodes, {shards} shards, {unit}, {order}:",
                hot_spot(nodes, shards, whole=whole, own_orders=own),
                flush=True,
            )
    for nodes in (1000, 10_000):
        stuck = f"{waiting(nodes):.1f} of {CONNECTIONS} connections wait"
        print(f"{nodes} nodes, 1 % of them silent: {stuck}")


if __name__ == "__main__":
    main()
