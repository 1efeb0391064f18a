"""Bills: the bytes and requests that were fetched and read, with their cost if prices are set.

The node has a bill, and so has each client: a job, or a user of the S3 endpoint. Bills are plain
numbers, written only from the event loop, so they need no locks. The status page shows them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from shardcache.shared.units import size

ChargeKind = Literal["fetched", "read"]
"""The amount of a `Bill` to which bytes and requests are added."""


@dataclass(slots=True)
class Charge:
    """Bytes, requests and their cost: one amount of a bill.

    Attributes:
        size_bytes: number of bytes, as stored at the origin.
        requests: number of requests to the origin.
        cost: cost in the currency of the prices; None if the origin has no price.
    """

    size_bytes: int = 0
    requests: int = 0
    cost: float | None = None

    def add(self, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add bytes, requests and their cost; a cost of None adds none."""
        self.size_bytes += size_bytes
        self.requests += requests
        if cost is not None:
            self.cost = (self.cost or 0) + cost

    def priced(self) -> "Charge":
        """Return this amount with a cost of 0 if it has none."""
        return replace(self, cost=self.cost or 0)

    def minus(self, other: "Charge") -> "Charge":
        """Return this amount minus another; the cost is None unless both amounts have a cost."""
        cost = None
        if self.cost is not None and other.cost is not None:
            cost = self.cost - other.cost
        return Charge(self.size_bytes - other.size_bytes, self.requests - other.requests, cost)

    def to_json(self, kind: str) -> dict[str, float | None]:
        """Return the numbers by name; the names begin with `kind`, such as "fetched_bytes"."""
        return {
            f"{kind}_bytes": self.size_bytes,
            f"{kind}_requests": self.requests,
            f"{kind}_cost": self.cost,
        }

    def in_words(self, kind: str) -> str:
        """Return bytes, requests and, if there is a price, the cost, in one line.

        Args:
            kind: first word of the line, such as "fetched".
        """
        # The number of requests that the cache has saved may be negative: a shard that is read
        # counts as one request, but may take several to fetch.
        requests = max(0, self.requests)
        text = f"{kind} {size(self.size_bytes)} in {requests:,} requests"
        if self.cost is not None:
            text += f" ({self.cost:,.2f})"
        return text


@dataclass(slots=True)
class Bill:
    """Bytes and requests fetched from origins, and bytes read.

    Attributes:
        fetched: what the daemon has fetched from origins.
        read: what readers have read. Each shard counts as one request: that is what a process
            without a cache would send.
    """

    fetched: Charge = field(default_factory=Charge)
    read: Charge = field(default_factory=Charge)

    def add(self, kind: ChargeKind, size_bytes: int, requests: int, cost: float | None) -> None:
        """Add bytes, requests and their cost to one of the amounts."""
        amount = self.fetched if kind == "fetched" else self.read
        amount.add(size_bytes, requests, cost)

    def to_json(self) -> dict[str, Any]:
        """Return the amounts fetched, read and saved, and a text that states them.

        Saved is what was read minus what was fetched. While shards are fetched that no reader has
        read yet, that may be negative; the text then leaves it out. Costs are None without a price.
        """
        fetched = self.fetched
        read = self.read
        if fetched.cost is not None or read.cost is not None:
            fetched = fetched.priced()
            read = read.priced()
        saved = read.minus(fetched)

        texts = [fetched.in_words("fetched"), read.in_words("read")]
        if saved.size_bytes > 0:
            texts.append(saved.in_words("saved"))
        return {
            **fetched.to_json("fetched"),
            **read.to_json("read"),
            **saved.to_json("saved"),
            "text": ", ".join(texts),
        }


Cost: TypeAlias = Callable[[str, int, int], float | None]
"""`cost(url, size_bytes, requests)` returns the cost of bytes and requests from a url.

The cost is None if the url's origin has no price.
"""


def _no_price(url: str, size_bytes: int, requests: int) -> None:
    """Stand in for the prices of a config that sets none."""


@dataclass(slots=True)
class Bills:
    """The bill of the node, and one for each client.

    Attributes:
        cost: the prices.
    """

    cost: Cost = _no_price
    # By url, the client to whom fetches from the url are charged now.
    _payers: dict[str, Hashable] = field(default_factory=dict, init=False)
    # The bills by client; the node's bill is at None.
    _by_client: defaultdict[Hashable, Bill] = field(
        default_factory=lambda: defaultdict(Bill),
        init=False,
    )

    @contextmanager
    def charged(self, url: str, client: Hashable) -> Iterator[None]:
        """Charge all fetches from a url during the block to a client."""
        self._payers[url] = client
        try:
            yield
        finally:
            self._payers.pop(url, None)

    def add_fetched(self, url: str, size_bytes: int, requests: int) -> None:
        """Add a fetch to the bills of the node and of the client that is charged for the url."""
        self._add("fetched", url, size_bytes, requests, client=self._payers.get(url))

    def add_read(self, url: str, size_bytes: int, client: Hashable) -> None:
        """Add a shard that was read to the bills of the node and of its reader's client."""
        # Each shard counts as one request: see `Bill.read`.
        self._add("read", url, size_bytes, requests=1, client=client)

    def forget(self, client: Hashable) -> None:
        """Forget the bill of a client."""
        self._by_client.pop(client, None)

    def to_json(self, client: Hashable = None) -> dict[str, Any]:
        """Return the bill of a client, or of the node for None; see `Bill.to_json`."""
        # `get` does not make a bill, unlike `[]`: that of a forgotten client would stay.
        bill = self._by_client.get(client, Bill())
        return bill.to_json()

    def _add(
        self,
        kind: ChargeKind,
        url: str,
        size_bytes: int,
        requests: int,
        client: Hashable,
    ) -> None:
        """Add to the bills of the node and of a client; a client of None means the node alone."""
        cost = self.cost(url, size_bytes, requests)
        for payer in {None, client}:  # None stands for the node
            self._by_client[payer].add(kind, size_bytes, requests, cost)
