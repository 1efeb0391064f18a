"""Nodes and their store, whose link is narrow and whose bytes are counted."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.cluster import network
from support.cluster.network import Network
from support.cluster.node import Dataset, Node, Store
from support.cluster.tier import Tier, why_no_tier
from support.lifetime import Lifetime
from support.programs.cli import Ran
from support.programs.daemon import eventually
from support.programs.guard import GUARD_S

MBIT_PER_S = 800
STALL_TIMEOUT_S = 20.0
"""The daemon's default."""

ONCE = 1.02
"""Copies of a dataset: every byte of it, and the heads of answers and packets."""
NOTHING = 0.01
"""Copies of a dataset: answers to HEADs, and to the tier's questions about signatures."""

_STORE = 100


def why_not() -> str | None:
    """Return why there can be no cluster here, None where there can be one."""
    return network.why_not() or why_no_tier()


@dataclass(frozen=True, slots=True)
class Round:
    store: Store
    dataset: Dataset
    runs: Mapping[Node, Future[Ran]]
    before_bytes: int

    def check(self, nodes: Sequence[Node], limit_s: float = GUARD_S) -> None:
        """Wait for nodes.

        Raises AssertionError unless each then has every shard, byte for byte, and TimeoutError
        beyond the limit.
        """
        deadline_s = time.monotonic() + limit_s
        rans = [(node, self.runs[node].result(deadline_s - time.monotonic())) for node in nodes]
        for node, ran in rans:
            node.check(ran, self.dataset)

    def wait(self) -> None:
        """Return when all nodes have come to an end, well or not."""
        wait(self.runs.values())

    def sent(self) -> float:
        """Return what the store has sent since the beginning, in sizes of the dataset."""
        return (self.store.host.sent_bytes() - self.before_bytes) / self.dataset.size_bytes

    def wait_until_midway(self, node: Node) -> None:
        """Return once a node has a third of the shards."""
        eventually(lambda: len(node.daemon.shards()) >= len(self.dataset) / 3)
        assert not self.runs[node].done()


class Cluster(Lifetime):
    """A store, and hosts for nodes; a context manager that ends everything on leaving.

    Attributes:
        store: runs while the context lasts; its link has `MBIT_PER_S`.
    """

    def __init__(self, hosts: int, *flags: str, root: Path | None = None) -> None:
        """Prepare one whose daemons get `flags`.

        Args:
            root: folder where everything is stored; None for the system's temporary one.
        """
        self._count = hosts
        self._flags = flags
        self._root = root

    def begin(self) -> None:
        network = self.parts.enter_context(Network())
        self.hosts = [network.add(number) for number in range(1, self._count + 1)]
        self.store = self.parts.enter_context(Store(network.add(_STORE), self._root))
        self.store.host.limit(MBIT_PER_S)

    @contextmanager
    def nodes(
        self,
        count: int,
        *flags: str,
        tiered: bool = False,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> Iterator[list[Node]]:
        """Run daemons with empty caches; parts come from the store, or a tier if `tiered`."""
        flags = (*self._flags, "--stall-timeout-s", str(stall_timeout_s), *flags)
        with (
            tempfile.TemporaryDirectory(prefix="sc-", dir=self._root) as name,
            ExitStack() as stack,
        ):
            roots = [Path(name, f"n{number}") for number in range(1, count + 1)]
            nodes = [
                Node(*place, self.store, *flags, tiered=tiered)
                for place in zip(self.hosts, roots, strict=False)
            ]
            for node in nodes:
                stack.enter_context(node)
            yield nodes

    @contextmanager
    def tiered(
        self, count: int, *flags: str, stall_timeout_s: float = STALL_TIMEOUT_S, tls: bool = True
    ) -> Iterator[tuple[list[Node], Tier]]:
        """Run daemons with empty caches, and an empty tier of the same nodes."""
        with (
            self.nodes(count, *flags, tiered=True, stall_timeout_s=stall_timeout_s) as nodes,
            Tier(
                nodes[0].root.parent, self.store, stall_timeout_s=stall_timeout_s, tls=tls
            ) as tier,
        ):
            tier.form(nodes)
            yield nodes, tier

    def fetch(self, nodes: Sequence[Node], dataset: Dataset) -> float:
        """Fetch a dataset on all nodes at once; return the store's bytes in dataset sizes.

        Raises AssertionError unless every node then has every shard, byte for byte.
        """
        with self.fetching(nodes, dataset) as round_:
            round_.check(nodes)
            return round_.sent()

    @contextmanager
    def fetching(self, nodes: Sequence[Node], dataset: Dataset) -> Iterator[Round]:
        """Start to fetch a dataset on all nodes at the same time; leaving waits for all."""
        with ThreadPoolExecutor(len(nodes)) as pool:
            before_bytes = self.store.host.sent_bytes()
            runs = {node: pool.submit(node.warm, dataset.urls) for node in nodes}
            yield Round(self.store, dataset, runs, before_bytes)
