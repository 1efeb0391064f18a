"""Agreement on numbers among the readers of all ranks while they read."""

from __future__ import annotations

import json
import os
import secrets
import time
from typing import Any

from shardcache.errors import ConfigError, RanksError, RankTimeoutError, from_json
from shardcache_client.ranks.distributed import KeyValueStore, MeetingPlace
from shardcache_client.topology import Ranks

Json = dict[str, Any]


class Agreement:
    """Agreement among corresponding readers, one per rank, such as DataLoader workers with the same id.

    Rank 0 receives all values over one queue and answers each reader under its own key, so the key-value store keeps
    nothing except what the last round of a killed reader may have left. Values of an abandoned iteration cannot mix
    with those of the next: a reader first says hello under a random name, and rank 0 counts only readers that it has
    greeted itself. Each iteration therefore needs a new Agreement on every rank.

    The connection is opened lazily and belongs to the process that first asks. Can be pickled before that.

    Args:
        channel: the same on all ranks, and unique among readers that may ask at the same time. Replicas, which read the
            same share, are each agreed with one reader of every other rank.
        ranks: this process's rank.
        timeout_s: time limit for one question.
    """

    def __init__(self, channel: str, ranks: Ranks, timeout_s: float = 300.0, place: MeetingPlace | None = None) -> None:
        self._name = channel
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._place = place or MeetingPlace()
        self._begin()

    def __repr__(self) -> str:
        return f"Agreement({self._name!r}, {self._ranks})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, (self._name, self._ranks, self._timeout_s, self._place)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._store: KeyValueStore | None = None
        self._channel = self._name
        self._reader_id = secrets.token_hex(8)
        self._greeted: dict[str, int] = {}  # on rank 0: the rank of each reader, by its id

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest of all ranks' values. Every rank must call this, with the names in the same order.

        Raises RankTimeoutError if a rank does not within the timeout, RanksError if one asks under another name or the
        connection breaks, ConfigError if this process has no address of a key-value store.
        """
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if world_size == 1:
            return value
        if self._pid != os.getpid():
            self._begin()  # a forked process must not use its parent's connection
        if self._store is None:
            self._store = self._connect()
            self._channel = f"{self._name}/{self._store.replica(self._name, rank, world_size)}"
            if rank:
                self._ask(self._store, {})
        if rank:
            return int(self._ask(self._store, {"name": name, "value": value})["greatest"])
        return self._gather(self._store, name, value)

    def _connect(self) -> KeyValueStore:
        address = self._place.address()
        if address is None:
            raise ConfigError(
                f"the {self._ranks.world_size} ranks cannot agree: this process has no address of a shared "
                "key-value store",
                remedy="start them with torchrun or Lightning, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE "
                "and initialise torch.distributed with env:// before the DataLoader starts its workers",
            )
        return KeyValueStore.connect(address)

    def _ask(self, store: KeyValueStore, message: Json) -> Json:
        store.push(self._channel, json.dumps(message | {"reader": self._reader_id, "rank": self._ranks.rank}))
        key = f"{self._channel}/{self._reader_id}"
        text = store.get(key, self._timeout_s)
        if text is None:
            what = message.get("name", "its greeting")
            raise RankTimeoutError(
                f"rank {self._ranks.rank} waited {self._timeout_s:g} s for rank 0 ({what} of {self._name})"
            )
        store.delete(key)
        answer: Json = json.loads(text)
        if "error" in answer:
            raise from_json(answer["error"])
        return answer

    def _gather(self, store: KeyValueStore, name: str, value: int) -> int:
        try:
            greatest = max(value, *self._values(store, name).values())
        except RanksError as exn:
            self._answer_all(store, {"error": exn.to_json()})
            raise
        self._answer_all(store, {"greatest": greatest})
        return greatest

    def _values(self, store: KeyValueStore, name: str) -> dict[int, int]:
        values: dict[int, int] = {}
        deadline_s = time.monotonic() + self._timeout_s
        while len(values) < self._ranks.world_size - 1:
            text = store.pop(self._channel, deadline_s - time.monotonic())
            if text is None:
                raise self._missing(name, values)
            message: Json = json.loads(text)
            reader, rank = message["reader"], message["rank"]
            if "value" not in message:
                # Another reader of the same rank is gone.
                self._greeted = {known: owner for known, owner in self._greeted.items() if owner != rank}
                self._greeted[reader] = rank
                store.set(f"{self._channel}/{reader}", "{}")
            elif reader not in self._greeted:
                continue  # from an earlier iteration
            elif message["name"] != name:
                raise RanksError(f"rank {rank} asks for {message['name']} of {self._name}, but rank 0 for {name}")
            else:
                values[rank] = message["value"]
        return values

    def _answer_all(self, store: KeyValueStore, answer: Json) -> None:
        for reader in self._greeted:
            store.set(f"{self._channel}/{reader}", json.dumps(answer))

    def _missing(self, name: str, values: dict[int, int]) -> RankTimeoutError:
        missing = [rank for rank in range(1, self._ranks.world_size) if rank not in values]
        few = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return RankTimeoutError(
            f"rank 0 waited {self._timeout_s:g} s for {len(missing)} of {self._ranks.world_size} ranks, "
            f"missing: {few} ({name} of {self._name})"
        )
