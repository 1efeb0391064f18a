"""Access to torch.distributed: this process's rank, the key-value store of the rendezvous, and agreement over it.

Ranks communicate over that store and never by collectives: one rank creating a dataset alone would block or corrupt the
others' next collective, object collectives unpickle data from the network, NCCL's need a device, and DataLoader workers
have no process group.
"""

import json
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, Self

import torch.distributed

from shardcache.errors import ConfigError, RanksError, RankTimeoutError, from_json
from shardcache_client.order.rounds import Topology
from shardcache_client.ranks.environment import ranks_of_environment
from shardcache_client.stages.stage import Agree

if torch.distributed.is_available():
    from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

log = logging.getLogger("shardcache")

_CONNECT_TIMEOUT_S = 60.0
_SHORT_CONNECT_S = 30.0  # for uses that can do without it: torch's server lets some connections wait for 5 s, or 10
_ALONE = Topology()


def ranks() -> Topology | None:
    """Return torch.distributed's rank and world size, also in a process forked after its initialisation."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Topology(torch.distributed.get_rank(), torch.distributed.get_world_size())
    return None


def attempt() -> str:
    """Return the number of times that torchrun has restarted the job's processes, which then count from the start."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a job's key-value store, the number of ranks that share it, and this process's rank."""

    host: str
    port: int
    world_size: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MeetingPlace:
    """Finds the key-value store of the job, for any of its processes, DataLoader workers included.

    The address comes from torch.distributed, in this process or in the one that forked or pickled this object; else
    from the environment variables that `init_method="env://"` reads.
    """

    def __init__(self, inherited: StoreAddress | None = None) -> None:
        self._inherited = inherited
        # With the pid, as a process must not use its parent's connection; the store is None if none answered.
        self._connected: tuple[int, StoreAddress, KeyValueStore | None] | None = None

    def __repr__(self) -> str:
        return f"MeetingPlace({_address_of_process_group() or self._inherited!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MeetingPlace, (_address_of_process_group() or self._inherited,)

    def address(self) -> StoreAddress | None:
        """Return the address of the store that the job's ranks share; None if none is known, or for a single rank."""
        found = _address_of_process_group() or self._inherited or _address_of_environment()
        return found if found is not None and found.world_size > 1 else None

    def store(self) -> "KeyValueStore | None":
        """Return the store that the job's ranks share; None if none is known or, which is logged once, none answers."""
        address = self.address()
        if address is None:
            return None
        if self._connected is None or self._connected[:2] != (os.getpid(), address):
            store = None
            try:
                store = KeyValueStore.connect(address, _SHORT_CONNECT_S)
            except RanksError as exn:
                log.info("cannot check that all ranks read the same shards: %s: %s", address, exn.message)
            self._connected = os.getpid(), address, store
        return self._connected[2]


def _process_group_store() -> Store | None:
    if ranks() is None:
        return None
    # No public API for this exists in all supported releases of torch.
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address_of_process_group() -> StoreAddress | None:
    # After a fork, only the store's address is of use: the connection is the parent's.
    known, store = ranks(), _process_group_store()
    if known is None or not isinstance(store, TCPStore):
        return None
    return StoreAddress(store.host, store.port, known.world_size, known.rank)


def _address_of_environment() -> StoreAddress | None:
    env = os.environ
    if not torch.distributed.is_available() or "MASTER_ADDR" not in env or not env.get("MASTER_PORT", "").isdecimal():
        return None
    known = ranks_of_environment()
    return StoreAddress(env["MASTER_ADDR"], int(env["MASTER_PORT"]), known.world_size, known.rank)


class KeyValueStore:
    """The job's key-value store, under shardcache's prefix. Every method raises RanksError if the connection breaks.

    torchrun's store outlives a restart of its processes: values set before it may still be there.
    """

    def __init__(self, store: Store, where: str, ranks: Topology = _ALONE) -> None:
        self._store = PrefixStore(f"shardcache/{os.environ.get('TORCHELASTIC_RUN_ID', '')}", store)
        self._where = where
        self._ranks = ranks

    def __repr__(self) -> str:
        return f"KeyValueStore({self._where})"

    @classmethod
    def connect(cls, address: StoreAddress, timeout_s: float = _CONNECT_TIMEOUT_S) -> Self:
        """Open a connection for this process. Raises RanksError if no store answers within the timeout."""
        store = _connect(address, timeout_s)
        if store is None:
            raise RanksError(
                "no key-value store of torch.distributed answers at this address",
                url=str(address),
                remedy="initialise torch.distributed before reading; MASTER_ADDR and MASTER_PORT must be its own",
            )
        return cls(store, str(address), Topology(address.rank, address.world_size))

    @classmethod
    def of_process_group(cls) -> Self | None:
        """Return the store of torch.distributed's process group; None if it is not shared. Raises RanksError."""
        address = _address_of_process_group()
        if address is not None:
            # Not torch's own connection: a wait on that would block torch's watchdogs.
            return cls.connect(address)
        store = _process_group_store()
        return cls(store, "file store") if isinstance(store, FileStore) else None

    def set(self, key: str, value: str) -> None:
        """Set a value of at most 8 MiB."""
        self._call("set", key, value)

    def first(self, key: str, value: str) -> str:
        """Set the value unless there is one already; return the value now stored."""
        return str(self._call("compare_set", key, "", value).decode())

    def has(self, key: str) -> bool:
        """Return True if the key has a value."""
        return bool(self._call("check", [key]))

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return the value as soon as there is one; None if there is none within the timeout."""
        return str(self._call("get", key).decode()) if self._comes(key, timeout_s) else None

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0; return the sum."""
        return int(self._call("add", key, amount))

    def delete(self, key: str) -> None:
        """Remove the value, if there is one."""
        self._call("delete_key", key)

    def push(self, queue: str, value: str) -> None:
        """Append to a queue. Raises ConfigError if this release of torch has no queues."""
        if not hasattr(self._store, "queue_push"):
            raise ConfigError(
                "torch's key-value store has no queues in this release", remedy="install torch 2.8 or newer"
            )
        self._call("queue_push", queue, value)

    def pop(self, queue: str, timeout_s: float) -> str | None:
        """Remove and return the first value of a queue that only this process reads; None if none comes in time."""
        return str(self._call("queue_pop", queue).decode()) if self._comes(queue, timeout_s) else None

    def replica(self, name: str, rank: int, world_size: int) -> int:
        """Return the number of this process among those that read for the same rank, from 0; the same each time.

        Processes of one number, one for each rank, can so agree without the others. It makes no difference which ones
        they are, as all that read for a rank read the same samples. The name is unique to those that may agree.
        """
        if world_size == self._ranks.world_size:
            return 0
        each, own = f"replicas/{attempt()}/{name}/{rank}", str(self._ranks.rank)
        return next(number for number in count() if self.first(f"{each}/{number}", own) == own)

    def _comes(self, key: str, timeout_s: float) -> bool:
        try:
            self._call("wait", [key], timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError:  # a FileStore raises nothing more specific on timeout
            return False
        return True

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._store, method)(*args)
        except torch.distributed.DistNetworkError as exn:
            raise RanksError(
                f"the connection to the job's key-value store broke: {exn}",
                url=self._where,
                remedy="see why the process that holds it ended: rank 0, or torchrun on the first node",
            ) from exn


def _connect(address: StoreAddress, timeout_s: float) -> TCPStore | None:
    try:
        # If nothing listens, torch would retry, and log it, until the timeout.
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except OSError:
        return None
    opened: list[TCPStore] = []
    # torch waits indefinitely for a server that accepts a connection but says nothing, such as one of another kind.
    thread = Thread(target=_open, args=(address, timeout_s, opened), name="shardcache-store", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return opened[0] if opened else None


def _open(address: StoreAddress, timeout_s: float, opened: list[TCPStore]) -> None:
    limit = timedelta(seconds=timeout_s)
    try:
        opened.append(TCPStore(address.host, address.port, is_master=False, timeout=limit, wait_for_workers=False))
    except torch.distributed.DistError:
        return  # another protocol: the same as if nothing listened


class Agreement:
    """Agreement among corresponding readers, one per rank, such as DataLoader workers with the same id.

    Rank 0 receives all values over one queue and answers each reader under its own key, so the key-value store keeps
    nothing except what the last round of a killed reader may have left. Values of an abandoned iteration cannot mix
    with those of the next: a reader first says hello under a random name, and rank 0 counts only readers that it has
    greeted itself. Each iteration therefore needs a new Agreement on every rank.

    The channel is the same on all ranks, and unique among readers that may ask at the same time. Replicas, which read
    the same share, are each agreed with one reader of every other rank.
    """

    def __init__(
        self, channel: str, ranks: Topology, timeout_s: float = 300.0, place: MeetingPlace | None = None
    ) -> None:
        self._name = self._channel = channel
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._place = place or MeetingPlace()
        self._store: KeyValueStore | None = None  # connected when first needed
        self._reader_id = secrets.token_hex(8)
        self._greeted: dict[str, int] = {}  # on rank 0: the rank of each reader, by its id

    def __repr__(self) -> str:
        return f"Agreement({self._name!r}, {self._ranks})"

    def greatest(self, name: str, value: int) -> int:
        """Return the greatest of all ranks' values. Every rank must call this, with the names in the same order.

        Raises RankTimeoutError if a rank does not within the timeout, RanksError if one asks under another name or the
        connection breaks, ConfigError if this process has no address of a key-value store.
        """
        rank, world_size = self._ranks.rank, self._ranks.world_size
        if world_size == 1:
            return value
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

    def _ask(self, store: KeyValueStore, message: dict[str, Any]) -> dict[str, Any]:
        store.push(self._channel, json.dumps(message | {"reader": self._reader_id, "rank": self._ranks.rank}))
        key = f"{self._channel}/{self._reader_id}"
        text = store.get(key, self._timeout_s)
        if text is None:
            what = message.get("name", "its greeting")
            raise RankTimeoutError(
                f"rank {self._ranks.rank} waited {self._timeout_s:g} s for rank 0 ({what} of {self._name})"
            )
        store.delete(key)
        answer: dict[str, Any] = json.loads(text)
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
            message: dict[str, Any] = json.loads(text)
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

    def _answer_all(self, store: KeyValueStore, answer: dict[str, Any]) -> None:
        for reader in self._greeted:
            store.set(f"{self._channel}/{reader}", json.dumps(answer))

    def _missing(self, name: str, values: dict[int, int]) -> RankTimeoutError:
        missing = [rank for rank in range(1, self._ranks.world_size) if rank not in values]
        few = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        return RankTimeoutError(
            f"rank 0 waited {self._timeout_s:g} s for {len(missing)} of {self._ranks.world_size} ranks, "
            f"missing: {few} ({name} of {self._name})"
        )


def agreement_of(name: str, timeout_s: float, place: MeetingPlace, reader: Topology) -> Agree:
    """Return the agreement of a reader with the same worker of all other ranks, for one iteration."""
    channel = f"{name}/{reader.worker}of{reader.workers}"
    return Agreement(channel, reader, timeout_s, place).greatest
