"""Agreement among the readers of all ranks on the greatest of their values.

A reader is a DataLoader worker, or a rank's process that reads without workers. A stage uses an
agreement where the work of one rank depends on another's data. To pack samples into blocks, for
example, all ranks have to know if any of them has samples left.
"""

import json
import secrets
import time
from typing import Any

from shardcache.shared.exceptions import ConfigError, RanksError, RankTimeoutError, from_json
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.key_value_store import KeyValueStore, StoreLocator
from shardcache_client.stages.stage import Agree

# Maximum number of missing ranks that an error names.
_MAX_NAMED = 8


class Agreement:
    """Agreement among corresponding readers, one per rank: DataLoader workers with the same id.

    Rank 0 receives all values over one queue and answers each reader under the reader's own key.
    Values and answers are removed as they are received, so the store does not grow.

    A reader first sends a greeting under a random id. Rank 0 ignores the values of readers whose
    greeting it has not answered, so that values of an abandoned iteration do not mix with those of
    the next. Each iteration therefore needs a new Agreement on every rank.

    If several processes read for the same rank, each of these replicas agrees with one replica of
    every other rank.
    """

    def __init__(
        self,
        name: str,
        ranks: Topology,
        timeout_s: float = 300.0,
        locator: StoreLocator | None = None,
    ) -> None:
        """Begin an agreement.

        Args:
            name: name that is the same on all ranks, and unique among the agreements that may be in
                use at the same time.
            ranks: rank of the reader, and number of ranks.
            timeout_s: maximum time to wait for the other ranks.
            locator: finds the ranks' key-value store; None to use torch.distributed's.
        """
        self._name = name
        # Queue of the greetings and values; "" before the store is connected.
        self._channel = ""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._locator = locator or StoreLocator()
        self._store: KeyValueStore | None = None  # connected when first needed
        self._reader_id = secrets.token_hex(8)
        # On rank 0: the rank of each reader whose greeting was answered, by the reader's id.
        self._greeted: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Agreement({self._name!r}, {self._ranks})"

    def greatest(self, value_name: str, value: int) -> int:
        """Return the greatest of all ranks' values.

        Every rank must call this equally often, with the same names in the same order.

        Args:
            value_name: name of the value, by which calls that do not match are detected.
            value: this rank's value.

        Raises:
            RankTimeoutError: a rank did not call this within the timeout.
            RanksError: a rank has passed another name, or the connection breaks.
            ConfigError: this process has no address of a key-value store.
        """
        if self._ranks.world_size == 1:
            return value
        if self._store is None:
            self._store = self._join()
        if self._ranks.rank == 0:
            return self._gather(self._store, value_name, value)
        answer = self._ask(self._store, {"name": value_name, "value": value})
        return int(answer["greatest"])

    def _join(self) -> KeyValueStore:
        """Connect to the ranks' store, and send rank 0 the greeting. Raises as `greatest` does."""
        store = self._connect()
        replica = store.claim_replica(self._name, self._ranks.rank, self._ranks.world_size)
        self._channel = f"{self._name}/{replica}"
        if self._ranks.rank != 0:
            self._ask(store, {})  # A message without a value is the greeting.
        return store

    def _connect(self) -> KeyValueStore:
        """Connect to the ranks' store. Raises ConfigError if its address is unknown."""
        address = self._locator.address()
        if address is None:
            raise ConfigError(
                f"the {self._ranks.world_size} ranks cannot agree: this process has no address of "
                "a shared key-value store",
                remedy="start them with torchrun or Lightning, or set MASTER_ADDR, MASTER_PORT, "
                "RANK and WORLD_SIZE and initialise torch.distributed with env:// before "
                "the DataLoader starts its workers",
            )
        return KeyValueStore.connect(address)

    def _ask(self, store: KeyValueStore, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message to rank 0 and return its answer.

        Raises RankTimeoutError if no answer comes, or the error that the answer contains.
        """
        sent = message | {"reader": self._reader_id, "rank": self._ranks.rank}
        store.push(self._channel, json.dumps(sent))

        key = f"{self._channel}/{self._reader_id}"
        text = store.get(key, self._timeout_s)
        if text is None:
            purpose = message.get("name", "its greeting")
            raise RankTimeoutError(
                f"rank {self._ranks.rank} waited {self._timeout_s:g} s for rank 0 ({purpose} of "
                f"{self._name})"
            )
        store.delete(key)
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise from_json(answer["error"])
        return answer

    def _gather(self, store: KeyValueStore, value_name: str, value: int) -> int:
        """Receive all values, and answer with the greatest or with the error. Rank 0 only.

        For the arguments, see `greatest`.
        """
        try:
            others = self._receive_values(store, value_name)
        except RanksError as exn:
            self._answer_all(store, {"error": exn.to_json()})
            raise
        greatest = max(value, *others.values())
        self._answer_all(store, {"greatest": greatest})
        return greatest

    def _receive_values(self, store: KeyValueStore, value_name: str) -> dict[int, int]:
        """Return the values of all other ranks, by rank, and answer greetings as they come."""
        values: dict[int, int] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(values) < self._ranks.world_size - 1:
            text = store.pop(self._channel, deadline_s - time.monotonic())
            if text is None:
                raise self._timeout_error(value_name, values)
            message: dict[str, Any] = json.loads(text)
            reader = message["reader"]
            rank = message["rank"]
            if "value" not in message:
                self._answer_greeting(store, reader, rank)
            elif reader not in self._greeted:
                continue  # The value is from an earlier iteration.
            elif message["name"] != value_name:
                raise RanksError(
                    f"rank {rank} asks for {message['name']} of {self._name}, but rank 0 for "
                    f"{value_name}"
                )
            else:
                values[rank] = message["value"]
        return values

    def _answer_greeting(self, store: KeyValueStore, reader: str, rank: int) -> None:
        """Answer a reader's greeting, and accept its values from now on."""
        # The rank's previous reader, if any, no longer reads.
        for greeted_reader, its_rank in list(self._greeted.items()):
            if its_rank == rank:
                del self._greeted[greeted_reader]
        self._greeted[reader] = rank
        store.set(f"{self._channel}/{reader}", "{}")

    def _answer_all(self, store: KeyValueStore, answer: dict[str, Any]) -> None:
        """Send an answer to every reader whose greeting was answered."""
        for reader in self._greeted:
            store.set(f"{self._channel}/{reader}", json.dumps(answer))

    def _timeout_error(self, value_name: str, values: dict[int, int]) -> RankTimeoutError:
        """Return the error that names the ranks whose values did not come.

        Args:
            value_name: name of the values.
            values: the values that came, by rank.
        """
        missing = [rank for rank in range(1, self._ranks.world_size) if rank not in values]
        named = ", ".join(map(str, missing[:_MAX_NAMED]))
        if len(missing) > _MAX_NAMED:
            named += ", …"
        return RankTimeoutError(
            f"rank 0 waited {self._timeout_s:g} s for {len(missing)} of {self._ranks.world_size} "
            f"ranks, missing: {named} ({value_name} of {self._name})"
        )


def agreement_of(name: str, timeout_s: float, locator: StoreLocator, reader: Topology) -> Agree:
    """Return the method `greatest` of a new `Agreement` with the same worker of all other ranks.

    Args:
        name: name of the agreement, the same on all ranks.
        timeout_s: maximum time to wait for the other ranks.
        locator: finds the ranks' key-value store.
        reader: rank and worker of the reader.
    """
    channel = f"{name}/{reader.worker}of{reader.workers}"
    return Agreement(channel, reader, timeout_s, locator).greatest
