"""The leases of one reader, by the numbers of their requests.

`Reader` adds a lease when it is requested, and drops it when it is released. The table also keeps
the damage found in leased shards until the reader's session has reported it.
"""

from collections.abc import Iterator

from shardcache.cache.readers.leases import Lease
from shardcache.shared.exceptions import CorruptShardError, ProtocolError
from shardcache.store.shard import Shard

# A reader has a file open for each lease, and no reader needs more open files than this.
_MAX_LEASES = 4096


class LeaseTable:
    """The leases of one reader, requested and granted, and the damage found in their shards."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._in_use: dict[int, Lease] = {}  # the leases of them whose state is IN_USE
        self._damage: list[CorruptShardError] = []  # damage found in shards, not reported yet

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def check_new(self, number: int) -> None:
        """Raise ProtocolError if this number is in use, or the reader has too many leases."""
        if number in self._leases:
            raise ProtocolError(f"request {number} has already asked for a lease")
        if len(self._leases) >= _MAX_LEASES:
            raise ProtocolError(f"a reader may have at most {_MAX_LEASES} leases")

    def add(self, lease: Lease) -> None:
        """Add a lease, or a request for one."""
        self._leases[lease.number] = lease

    def mark_in_use(self, lease: Lease) -> None:
        """Record that a lease is in use."""
        self._in_use[lease.number] = lease

    def get(self, number: int) -> Lease | None:
        """Return a lease or request; None if it has ended."""
        return self._leases.get(number)

    def granted(self, number: int) -> Lease:
        """Return a granted lease. Raises ProtocolError if there is none by this number."""
        lease = self._leases.get(number)
        if lease is None or lease.granted is None:
            raise ProtocolError(f"no lease has number {number}")
        return lease

    def drop(self, number: int) -> Lease | None:
        """Remove a lease or request, and return it; None if it has ended already."""
        self._in_use.pop(number, None)
        return self._leases.pop(number, None)

    def latest(self) -> Lease | None:
        """Return the lease that was added last; None without any."""
        return next(reversed(self._leases.values()), None)

    def retained(self) -> list[Shard]:
        """Return the shards retained for the reader."""
        shards = [lease.retained for lease in self._in_use.values()]
        return [shard for shard in shards if shard is not None]

    def note_damage(self, lease: Lease) -> None:
        """Keep the damage found in a lease's shard, to be reported to the reader once."""
        if not lease.is_damage_noted and lease.damage is not None:
            lease.is_damage_noted = True
            self._damage.append(lease.damage)

    def take_damage(self) -> list[CorruptShardError]:
        """Return the damage found in the reader's shards since the last call."""
        for lease in self._in_use.values():
            self.note_damage(lease)
        damage = self._damage
        self._damage = []
        return damage
