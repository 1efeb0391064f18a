"""Agreement among the readers of all ranks on the greatest of their values.

Stages use it where the ranks' work depends on each other's data. To pack samples into blocks, for
example, all ranks have to know if any of them has samples left.
"""

import json
import secrets
import time
from typing import Any

from shardcache.errors import ConfigError, RanksError, RankTimeoutError, from_json
from shardcache_client.order.topology import Topology
from shardcache_client.ranks.key_value_store import KeyValueStore, MeetingPlace
from shardcache_client.stages.stage import Agree

# Maximum number of missing ranks that an error names.
_MAX_NAMED = 8


class Agreement:
    """Agreement among corresponding readers, one per rank: DataLoader workers with the same id.

    Rank 0 receives all values over one queue and answers each reader under the reader's own key. So
    the key-value store keeps nothing, except for values that a killed reader may have left.

    Values of an abandoned iteration cannot mix with those of the next iteration. A reader first
    sends a greeting under a random id, and rank 0 counts only readers whose greeting it has
    answered itself. Each iteration therefore needs a new Agreement on every rank.

    If several processes read for the same rank, each of these replicas agrees with one reader of
    every other rank.
    """

    def __init__(
        self,
        name: str,
        ranks: Topology,
        timeout_s: float = 300.0,
        place: MeetingPlace | None = None,
    ) -> None:
        """Begin an agreement.

        Args:
            name: name that is the same on all ranks, and unique among readers that may ask at the
                same time.
            ranks: rank of the reader.
            timeout_s: maximum time to wait for the other ranks.
            place: finds the ranks' key-value store; None to use torch.distributed's.
        """
        self._name = name
        # Queue of the greetings and values: `name` and the number of the replica, which is known
        # once the store is connected.
        self._channel = ""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._place = place or MeetingPlace()
        self._store: KeyValueStore | None = None  # connected when first needed
        self._reader_id = secrets.token_hex(8)
        # On rank 0: the rank of each reader whose greeting was answered, by the reader's id.
        self._greeted: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Agreement({self._name!r}, {self._ranks})"

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest of all ranks' values.

        Every rank must call this equally often, with the same names in the same order.

        Args:
            name: name of the value, by which calls that do not match are detected.
            value: this rank's value.

        Raises:
            RankTimeoutError: a rank did not call this within the timeout.
            RanksError: a rank asks under another name, or the connection breaks.
            ConfigError: this process has no address of a key-value store.
        """
        rank = self._ranks.rank
        world_size = self._ranks.world_size
        if world_size == 1:
            return value

        if self._store is None:
            self._store = self._connect()
            replica = self._store.replica(self._name, rank, world_size)
            self._channel = f"{self._name}/{replica}"
            if rank != 0:
                self._ask(self._store, {})  # A message without a value is the greeting.

        if rank != 0:
            answer = self._ask(self._store, {"name": name, "value": value})
            return int(answer["greatest"])
        return self._gather(self._store, name, value)

    def _connect(self) -> KeyValueStore:
        """Connect to the ranks' store. Raises ConfigError if its address is unknown."""
        address = self._place.address()
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
            what = message.get("name", "its greeting")
            raise RankTimeoutError(
                f"rank {self._ranks.rank} waited {self._timeout_s:g} s for rank 0 ({what} of "
                f"{self._name})"
            )
        store.delete(key)
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise from_json(answer["error"])
        return answer

    def _gather(self, store: KeyValueStore, name: str, value: int) -> int:
        """Receive all values, and answer with the greatest or with the error. Rank 0 only.

        For the arguments, see `greatest`.
        """
        try:
            others = self._values_of_others(store, name)
        except RanksError as exn:
            self._answer_all(store, {"error": exn.to_json()})
            raise
        greatest = max(value, *others.values())
        self._answer_all(store, {"greatest": greatest})
        return greatest

    def _values_of_others(self, store: KeyValueStore, name: str) -> dict[int, int]:
        """Return the values of all other ranks, by rank, and answer greetings as they come."""
        values: dict[int, int] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(values) < self._ranks.world_size - 1:
            text = store.pop(self._channel, deadline_s - time.monotonic())
            if text is None:
                raise self._missing(name, values)
            message: dict[str, Any] = json.loads(text)
            reader = message["reader"]
            rank = message["rank"]
            if "value" not in message:
                self._greet(store, reader, rank)
            elif reader not in self._greeted:
                continue  # The value is from an earlier iteration.
            elif message["name"] != name:
                raise RanksError(
                    f"rank {rank} asks for {message['name']} of {self._name}, but rank 0 for {name}"
                )
            else:
                values[rank] = message["value"]
        return values

    def _greet(self, store: KeyValueStore, reader: str, rank: int) -> None:
        """Answer a reader's greeting, and count its values from now on."""
        # A new reader of a rank replaces the rank's previous reader, which no longer reads.
        for greeted, its_rank in list(self._greeted.items()):
            if its_rank == rank:
                del self._greeted[greeted]
        self._greeted[reader] = rank
        store.set(f"{self._channel}/{reader}", "{}")

    def _answer_all(self, store: KeyValueStore, answer: dict[str, Any]) -> None:
        """Send an answer to every reader whose greeting was answered."""
        for reader in self._greeted:
            store.set(f"{self._channel}/{reader}", json.dumps(answer))

    def _missing(self, name: str, values: dict[int, int]) -> RankTimeoutError:
        """Return the error that names the ranks whose values did not come."""
        missing = [rank for rank in range(1, self._ranks.world_size) if rank not in values]
        named = ", ".join(map(str, missing[:_MAX_NAMED]))
        if len(missing) > _MAX_NAMED:
            named += ", …"
        return RankTimeoutError(
            f"rank 0 waited {self._timeout_s:g} s for {len(missing)} of {self._ranks.world_size} "
            f"ranks, missing: {named} ({name} of {self._name})"
        )


def agreement_of(name: str, timeout_s: float, place: MeetingPlace, reader: Topology) -> Agree:
    """Return a reader's agreement with the same worker of all other ranks, for one iteration.

    Args:
        name: name of the agreement, the same on all ranks.
        timeout_s: maximum time to wait for the other ranks.
        place: finds the ranks' key-value store.
        reader: the reader.
    """
    channel = f"{name}/{reader.worker}of{reader.workers}"
    return Agreement(channel, reader, timeout_s, place).greatest
