"""Numbers on which the readers of all ranks agree while they read."""

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
    """The readers that ask the same question on every rank, one process a rank: DataLoader workers of one number, say.

    Rank 0 is told everybody's value over one queue and answers each under a name of its own, so nothing stays in the
    store but what the last round of a reader that was killed may have left. Nothing of an iteration that was given up
    is taken for the next one's: a reader first says hello, under a name drawn at random, and rank 0 counts nobody
    whom it has not greeted itself. Each iteration therefore takes an Agreement of its own on every rank.

    Made lazily: the connection belongs to the process that first asks. Can be pickled before that.

    Args:
        channel: the same on all ranks, and of no other readers that may ask at the same time.
        ranks: which one this is.
        timeout_s: how long one question may take.
    """

    def __init__(self, channel: str, ranks: Ranks, timeout_s: float = 300.0, place: MeetingPlace | None = None) -> None:
        self._channel = channel
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._place = place or MeetingPlace()
        self._begin()

    def __repr__(self) -> str:
        return f"Agreement({self._channel!r}, {self._ranks})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement, (self._channel, self._ranks, self._timeout_s, self._place)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._store: KeyValueStore | None = None
        self._voice = secrets.token_hex(8)
        self._greeted: dict[str, int] = {}  # on rank 0: the voices, and their ranks

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest of all ranks' values; every rank has to ask, in the same order of names.

        Raises RankTimeoutError when a rank does not within the time, RanksError when one asks for something else or
        the store breaks off, ConfigError when this process knows of no store.
        """
        if self._ranks.world_size == 1:
            return value
        if self._pid != os.getpid():
            self._begin()  # a fork must not speak over its parent's connection
        if self._store is None:
            self._store = self._connect()
            if self._ranks.rank != 0:
                self._ask(self._store, {})
        if self._ranks.rank == 0:
            return self._gather(self._store, name, value)
        return int(self._ask(self._store, {"name": name, "value": value})["greatest"])

    def _connect(self) -> KeyValueStore:
        address = self._place.address(self._ranks.world_size)
        if address is None:
            raise ConfigError(
                f"the {self._ranks.world_size} ranks cannot agree: this process knows of no store that they share",
                remedy="start them with torchrun or Lightning, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE "
                "and initialise torch.distributed with env:// before the DataLoader starts its workers",
            )
        return KeyValueStore.connect(address)

    def _ask(self, store: KeyValueStore, message: Json) -> Json:
        store.push(self._channel, json.dumps(message | {"voice": self._voice, "rank": self._ranks.rank}))
        key = f"{self._channel}/{self._voice}"
        answer = store.get(key, self._timeout_s)
        if answer is None:
            what = message.get("name", "its greeting")
            raise RankTimeoutError(
                f"rank {self._ranks.rank} waited {self._timeout_s:g} s for rank 0 ({what} of {self._channel})"
            )
        store.delete(key)
        said: Json = json.loads(answer)
        if "error" in said:
            raise from_json(said["error"])
        return said

    def _gather(self, store: KeyValueStore, name: str, value: int) -> int:
        try:
            values = self._values(store, name)
        except RanksError as exn:
            self._answer_all(store, {"error": exn.to_json()})
            raise
        greatest = max(value, *values.values())
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
            voice, rank = message["voice"], message["rank"]
            if "value" not in message:
                self._greet(store, voice, rank)
            elif voice not in self._greeted:
                continue  # of an iteration before this one
            elif message["name"] != name:
                raise RanksError(f"rank {rank} asks for {message['name']} of {self._channel}, rank 0 for {name}")
            else:
                values[rank] = message["value"]
        return values

    def _greet(self, store: KeyValueStore, voice: str, rank: int) -> None:
        # Another voice of the same rank is of a reader that has gone.
        self._greeted = {known: owner for known, owner in self._greeted.items() if owner != rank} | {voice: rank}
        store.set(f"{self._channel}/{voice}", "{}")

    def _answer_all(self, store: KeyValueStore, answer: Json) -> None:
        for voice in self._greeted:
            store.set(f"{self._channel}/{voice}", json.dumps(answer))

    def _missing(self, name: str, values: dict[int, int]) -> RankTimeoutError:
        missing = [rank for rank in range(1, self._ranks.world_size) if rank not in values]
        few = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return RankTimeoutError(
            f"rank 0 waited {self._timeout_s:g} s for {len(missing)} of {self._ranks.world_size} ranks, "
            f"missing: {few} ({name} of {self._channel})"
        )
