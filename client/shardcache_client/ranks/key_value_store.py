"""The job's key-value store, which is the store of torch.distributed's rendezvous.

Ranks communicate over this store and never by collectives, for four reasons:

- A rank that creates a dataset alone would block or corrupt the others' next collective.
- Object collectives unpickle data from the network.
- NCCL's collectives need a device.
- DataLoader workers have no process group.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from threading import Thread
from typing import Any, Self

import torch.distributed

from shardcache.shared.exceptions import ConfigError, RanksError
from shardcache_client.order.topology import Topology
from shardcache_client.ranks import distributed
from shardcache_client.ranks.environment import ranks_of_environment

# Some builds of torch have no `torch.distributed`. There is no store then, and ranks do not agree.
if torch.distributed.is_available():
    from torch.distributed import (  # type: ignore[attr-defined]
        FileStore,
        PrefixStore,
        Store,
        TCPStore,
    )

log = logging.getLogger("shardcache")

_CONNECT_TIMEOUT_S = 60.0
# Timeout for connections that shardcache can do without. Torch's server lets some connections wait
# for 5 s or 10 s, which must not count as a failure.
_OPTIONAL_CONNECT_TIMEOUT_S = 30.0


def restart_count() -> str:
    """Return the number of times that torchrun has restarted the job's processes, as text.

    Torchrun's store outlives a restart. With this number in its key, a value from before the
    restart is not found afterwards.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Address of a job's key-value store.

    Attributes:
        host: host on which the store runs.
        port: port at which it listens.
        world_size: number of ranks that share it.
        rank: rank of this process.
    """

    host: str
    port: int
    world_size: int
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class StoreLocator:
    """Finds the key-value store of the job, for any of its processes, including DataLoader workers.

    The store's address comes from the first of these that has one:

    1. torch.distributed in this process, or in the process that forked it.
    2. torch.distributed in the process that pickled this object.
    3. The environment variables that `init_method="env://"` reads.

    Args:
        inherited: the address in the process that pickled this object; None if it had none.
    """

    def __init__(self, inherited: StoreAddress | None = None) -> None:
        self._inherited = inherited
        # None if no connection was tried, or if no store answered at the address.
        self._store: KeyValueStore | None = None
        # Process and address of the last attempt to connect. A forked child connects again, as it
        # must not use its parent's connection.
        self._last_attempt: tuple[int, StoreAddress] | None = None

    def __repr__(self) -> str:
        return f"StoreLocator({self._torch_address()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoreLocator, (self._torch_address(),)

    def _torch_address(self) -> StoreAddress | None:
        """Return torch.distributed's address, in this process or in the one that pickled this."""
        return _address_of_process_group() or self._inherited

    def address(self) -> StoreAddress | None:
        """Return the address of the store that the job's ranks share.

        None if no address is known, or if the job has a single rank.
        """
        address = self._torch_address() or _address_of_environment()
        if address is None or address.world_size <= 1:
            return None
        return address

    def store(self) -> KeyValueStore | None:
        """Return a connection to the store that the job's ranks share, the same at each call.

        None if no address is known, or if no store answers there, which is logged once.
        """
        address = self.address()
        if address is None:
            return None
        if self._last_attempt != (os.getpid(), address):
            self._store = None
            try:
                self._store = KeyValueStore.connect(address, _OPTIONAL_CONNECT_TIMEOUT_S)
            except RanksError as exn:
                log.info(
                    "cannot check that all ranks read the same shards: %s: %s",
                    address,
                    exn.message,
                )
            self._last_attempt = (os.getpid(), address)
        return self._store


def _process_group_store() -> Store | None:
    """Return the store of torch.distributed's process group; None if that is not initialised."""
    if distributed.ranks() is None:
        return None
    # Not all supported releases of torch have a public function for this.
    store = torch.distributed.distributed_c10d._get_default_store()  # noqa: SLF001
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _address_of_process_group() -> StoreAddress | None:
    """Return the address of torch.distributed's store; None if it has no address.

    A forked process may use only the address. The connection belongs to its parent.
    """
    topology = distributed.ranks()
    store = _process_group_store()
    if topology is None or not isinstance(store, TCPStore):
        return None
    return StoreAddress(store.host, store.port, topology.world_size, topology.rank)


def _address_of_environment() -> StoreAddress | None:
    """Return the address that the launcher has set; None if it has set none."""
    if not torch.distributed.is_available():
        return None
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT", "")
    if host is None or not port.isdecimal():
        return None
    topology = ranks_of_environment()
    return StoreAddress(host, int(port), topology.world_size, topology.rank)


class KeyValueStore:
    """The job's key-value store, with shardcache's prefix before all keys.

    Every method raises RanksError if the connection breaks.

    torchrun's store outlives a restart of the ranks, so it may have values from before the restart.

    Args:
        store: torch's store.
        description: address or kind of the store, for messages.
        ranks_of_job: rank of this process in the job, and number of ranks; None if `claim_replica`,
            which needs it, is not called.
    """

    def __init__(
        self, store: Store, description: str, ranks_of_job: Topology | None = None
    ) -> None:
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._store = PrefixStore(f"shardcache/{run_id}", store)
        self._description = description
        self._ranks_of_job = ranks_of_job

    def __repr__(self) -> str:
        return f"KeyValueStore({self._description})"

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
        """Return the store of torch.distributed's process group; None if ranks do not share it.

        Raises RanksError if the store does not answer.
        """
        address = _address_of_process_group()
        if address is not None:
            # This opens a second connection, since a wait on torch's own would block its watchdogs.
            return cls.connect(address)
        store = _process_group_store()
        if store is None or not isinstance(store, FileStore):
            return None
        return cls(store, "file store")

    def set(self, key: str, value: str) -> None:
        """Set a value of at most 8 MiB."""
        self._call("set", key, value)

    def set_if_unset(self, key: str, value: str) -> str:
        """Set the value unless the key has one already; return the value that is now stored."""
        return str(self._call("compare_set", key, "", value).decode())

    def has(self, key: str) -> bool:
        """Return True if the key has a value."""
        return bool(self._call("check", [key]))

    def peek(self, key: str) -> str | None:
        """Return the key's value; None if it has none yet."""
        if not self.has(key):
            return None
        return str(self._call("get", key).decode())

    def get(self, key: str, timeout_s: float) -> str | None:
        """Return the value as soon as the key has one; None if it has none within the timeout."""
        if not self._wait_for(key, timeout_s):
            return None
        return str(self._call("get", key).decode())

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 if it was never set; return the sum.

        An amount of 0 reads the number.
        """
        return int(self._call("add", key, amount))

    def delete(self, key: str) -> None:
        """Remove the key's value, if it has one."""
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

        None if no value comes within the timeout.
        """
        if not self._wait_for(queue, timeout_s):
            return None
        return str(self._call("queue_pop", queue).decode())

    def claim_replica(self, name: str, rank: int, world_size: int) -> int:
        """Claim a number, from 0, among the processes that read for the same rank; return it.

        In a mesh, several processes may read for one rank. Processes with the same number, one for
        each rank, agree among themselves. It makes no difference which processes these are, as all
        processes of a rank read the same samples. A process gets the same number at each call.

        Args:
            name: name of the agreement, which the processes that take part in it share.
            rank: rank for which this process reads.
            world_size: number of such ranks.
        """
        assert self._ranks_of_job is not None
        if world_size == self._ranks_of_job.world_size:
            return 0  # Each process reads for a rank of its own.
        own = str(self._ranks_of_job.rank)
        for number in count():
            key = f"replicas/{restart_count()}/{name}/{rank}/{number}"
            if self.set_if_unset(key, own) == own:
                return number
        raise AssertionError("numbers do not end")

    def _wait_for(self, key: str, timeout_s: float) -> bool:
        """Return True as soon as the key has a value; False if it has none within the timeout."""
        # With a negative timeout, torch would wait indefinitely.
        timeout = timedelta(seconds=max(timeout_s, 0.001))
        try:
            self._call("wait", [key], timeout)
        except RuntimeError:  # A FileStore raises nothing more specific on a timeout.
            return False
        return True

    def _call(self, method: str, *args: Any) -> Any:
        """Call a method of torch's store. Raises RanksError if the connection breaks."""
        try:
            return getattr(self._store, method)(*args)
        except torch.distributed.DistNetworkError as exn:
            raise RanksError(
                f"the connection to the job's key-value store broke: {exn}",
                url=self._description,
                remedy="see why the process that holds it ended: rank 0, or torchrun on the "
                "first node",
            ) from exn


def _connect(address: StoreAddress, timeout_s: float) -> TCPStore | None:
    """Return a connection; None if no key-value store answers within the timeout."""
    try:
        # This only checks that something listens. Otherwise torch would retry until the timeout,
        # and log each attempt.
        socket.create_connection((address.host, address.port), timeout=timeout_s).close()
    except OSError:
        return None
    # A thread opens the connection, as torch waits indefinitely for a server that accepts it and
    # sends nothing, such as a server of another protocol. Then the thread is abandoned.
    opened: list[TCPStore] = []
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
    """Open a connection and append it to `opened`; append nothing if that fails."""
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
