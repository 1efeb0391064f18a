"""The job's key-value store: that of torch.distributed's rendezvous, and where it is.

Ranks communicate over that store and never by collectives: one rank creating a dataset alone would
block or corrupt the others' next collective, object collectives unpickle data from the network,
NCCL's need a device, and DataLoader workers have no process group.
"""

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, Self

import torch.distributed

from shardcache.errors import ConfigError, RanksError
from shardcache_client.order.sequences.rounds import Topology
from shardcache_client.ranks.distributed import ranks
from shardcache_client.ranks.environment import ranks_of_environment

if torch.distributed.is_available():
    from torch.distributed import (  # type: ignore[attr-defined]
        FileStore,
        PrefixStore,
        Store,
        TCPStore,
    )

log = logging.getLogger("shardcache")

_CONNECT_TIMEOUT_S = 60.0
# For uses that can do without it: torch's server lets some connections wait for 5 s, or 10.
_SHORT_CONNECT_S = 30.0
_ALONE = Topology()


def attempt() -> str:
    """Return the number of times that torchrun has restarted the job's processes, as text.

    Epochs are counted from the start after a restart.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a job's key-value store.

    Attributes:
        host: on which it runs.
        port: at which it listens.
        world_size: number of ranks that share it.
        rank: of this process.
    """

    host: str
    port: int
    world_size: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MeetingPlace:
    """Finds the key-value store of the job, for any of its processes, DataLoader workers included.

    The address comes from torch.distributed, in this process or in the one that forked or pickled
    this object; else from the environment variables that `init_method="env://"` reads.
    """

    def __init__(self, inherited: StoreAddress | None = None) -> None:
        self._inherited = inherited
        self._store: KeyValueStore | None = None  # None also if none answers at the address
        # The address of the last attempt, and the process that made it: a child must not use its
        # parent's connection.
        self._connected: tuple[int, StoreAddress] | None = None

    def __repr__(self) -> str:
        return f"MeetingPlace({_address_of_process_group() or self._inherited!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MeetingPlace, (_address_of_process_group() or self._inherited,)

    def address(self) -> StoreAddress | None:
        """Return the address of the store that the job's ranks share.

        None if none is known, or for a single rank.
        """
        address = _address_of_process_group() or self._inherited or _address_of_environment()
        if address is None or address.world_size <= 1:
            return None
        return address

    def store(self) -> "KeyValueStore | None":
        """Return the store that the job's ranks share.

        None if none is known or, which is logged once, none answers.
        """
        address = self.address()
        if address is None:
            return None
        if self._connected != (os.getpid(), address):
            self._store = None
            try:
                self._store = KeyValueStore.connect(address, _SHORT_CONNECT_S)
            except RanksError as exn:
                log.info(
                    "cannot check that all ranks read the same shards: %s: %s",
                    address,
                    exn.message,
                )
            self._connected = (os.getpid(), address)
        return self._store


def _process_group_store() -> Store | None:
    if ranks() is None:
        return None
    # No public API for this exists in all supported releases of torch.
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address_of_process_group() -> StoreAddress | None:
    # After a fork, only the store's address is of use: the connection is the parent's.
    topology = ranks()
    store = _process_group_store()
    if topology is None or not isinstance(store, TCPStore):
        return None
    return StoreAddress(store.host, store.port, topology.world_size, topology.rank)


def _address_of_environment() -> StoreAddress | None:
    if not torch.distributed.is_available():
        return None
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdecimal():
        return None
    topology = ranks_of_environment()
    return StoreAddress(host, int(port), topology.world_size, topology.rank)


class KeyValueStore:
    """The job's key-value store, under shardcache's prefix.

    Every method raises RanksError if the connection breaks.

    torchrun's store outlives a restart of its processes: values set before it may still be there.
    """

    def __init__(self, store: Store, where: str, ranks: Topology = _ALONE) -> None:
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._store = PrefixStore(f"shardcache/{run_id}", store)
        self._where = where
        self._ranks = ranks

    def __repr__(self) -> str:
        return f"KeyValueStore({self._where})"

    @classmethod
    def connect(cls, address: StoreAddress, timeout_s: float = _CONNECT_TIMEOUT_S) -> Self:
        """Open a connection for this process.

        Raises RanksError if no store answers within the timeout.
        """
        store = _connect(address, timeout_s)
        if store is None:
            raise RanksError(
                "no key-value store of torch.distributed answers at this address",
                url=str(address),
                remedy="initialise torch.distributed before reading; MASTER_ADDR and MASTER_PORT "
                "must be its own",
            )
        return cls(store, str(address), Topology(address.rank, address.world_size))

    @classmethod
    def of_process_group(cls) -> Self | None:
        """Return the store of torch.distributed's process group; None if it is not shared.

        Raises RanksError.
        """
        address = _address_of_process_group()
        if address is not None:
            # Not torch's own connection: a wait on that would block torch's watchdogs.
            return cls.connect(address)
        store = _process_group_store()
        if not isinstance(store, FileStore):
            return None
        return cls(store, "file store")

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
        if not self._appears(key, timeout_s):
            return None
        return str(self._call("get", key).decode())

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
                "torch's key-value store has no queues in this release",
                remedy="install torch 2.8 or newer",
            )
        self._call("queue_push", queue, value)

    def pop(self, queue: str, timeout_s: float) -> str | None:
        """Remove and return the first value of a queue that only this process reads.

        None if none comes in time.
        """
        if not self._appears(queue, timeout_s):
            return None
        return str(self._call("queue_pop", queue).decode())

    def replica(self, name: str, rank: int, world_size: int) -> int:
        """Return the number of this process among those that read for the same rank, from 0.

        It is the same each time. Processes of the same number, one for each rank, agree without the
        others. It makes no difference which ones they are, as all that read for a rank read the
        same samples.

        Args:
            name: unique to those that may agree.
        """
        if world_size == self._ranks.world_size:
            return 0
        own = str(self._ranks.rank)
        for number in count():
            key = f"replicas/{attempt()}/{name}/{rank}/{number}"
            if self.first(key, own) == own:
                return number
        raise AssertionError("numbers do not end")

    def _appears(self, key: str, timeout_s: float) -> bool:
        """Return True as soon as the key has a value; False if it has none within the timeout."""
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
                remedy="see why the process that holds it ended: rank 0, or torchrun on the "
                "first node",
            ) from exn


def _connect(address: StoreAddress, timeout_s: float) -> TCPStore | None:
    """Return a connection; None if no key-value store answers within the timeout."""
    try:
        # If nothing listens, torch would retry, and log it, until the timeout.
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except OSError:
        return None
    opened: list[TCPStore] = []
    # torch waits indefinitely for a server that accepts a connection but says nothing, such as one
    # of another kind.
    thread = Thread(
        target=_open,
        args=(address, timeout_s, opened),
        name="shardcache-store",
        daemon=True,
    )
    thread.start()
    thread.join(timeout_s)
    return opened[0] if opened else None


def _open(address: StoreAddress, timeout_s: float, opened: list[TCPStore]) -> None:
    """Open a connection, and append it to `opened`; nothing if another protocol is spoken there."""
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(
            address.host,
            address.port,
            is_master=False,
            timeout=limit,
            wait_for_workers=False,
        )
    except torch.distributed.DistError:
        return
    opened.append(store)
