"""Failed transfers: which shards are worth another attempt ahead of need."""

from shardcache.errors import ShardcacheError

# A shard that fails this often, while others succeed, is not prefetched again; it is fetched when a
# reader asks.
_TRIES_AHEAD = 3

# Number of failed shards remembered; a forgotten one is prefetched again.
_REMEMBERED = 100_000


class RetryGate:
    """Shards whose transfer failed, by name. A reader's own request always gets a fresh attempt."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._tries: dict[str, int] = {}  # failures in a row, by name, the oldest first
        self._blocked: set[str] = set()  # names blocked until another transfer succeeds

    def __contains__(self, name: str) -> bool:
        return name in self._blocked or self._tries.get(name, 0) >= _TRIES_AHEAD

    def __len__(self) -> int:
        return len(self._tries)

    def failed(self, name: str, exn: ShardcacheError) -> None:
        """Note a failure. A retryable one blocks the shard until another transfer succeeds."""
        tries = self._tries.pop(name, 0)
        if exn.retryable:
            self._tries[name] = tries + 1
        else:
            self._tries[name] = _TRIES_AHEAD
        self._blocked.add(name)
        if len(self._tries) > self._remembered:
            oldest = next(iter(self._tries))
            del self._tries[oldest]
            self._blocked.discard(oldest)

    def succeeded(self, name: str) -> set[str]:
        """Note a success, which shows that the origin answers; return the names worth retrying."""
        self._tries.pop(name, None)
        retried = {other for other in self._blocked if self._tries.get(other, 0) < _TRIES_AHEAD}
        self._blocked.clear()
        return retried - {name}
