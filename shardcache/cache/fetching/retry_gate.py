"""Failed transfers: which shards are worth another attempt ahead of need.

`Transfers` reports the outcome of each transfer here, and `Prefetcher` does not start transfers of
shards that are in the gate. A shard is called by its name in plans.
"""

from shardcache.shared.exceptions import ShardcacheError

# A shard that fails this often, while others succeed, is not prefetched again. It is fetched when a
# reader requests it.
_TRIES_AHEAD = 3

# Number of failed shards remembered. A shard whose failures are forgotten is prefetched again.
_REMEMBERED = 100_000


class RetryGate:
    """Shards whose transfer failed, by name.

    `name in gate` is True for a shard that must not be prefetched for now. A reader's own request
    does not ask the gate: it always gets a fresh attempt.

    Args:
        remembered: the number of failed shards to remember.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        # Failures in a row, by name, the oldest first. An error that a retry cannot help counts as
        # the maximum.
        self._failures: dict[str, int] = {}
        self._blocked: set[str] = set()  # names blocked until another transfer succeeds

    def __contains__(self, name: str) -> bool:
        return name in self._blocked or self._failures.get(name, 0) >= _TRIES_AHEAD

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, name: str, exn: ShardcacheError) -> None:
        """Record a failed transfer, which blocks the shard.

        After a retryable error, this lasts until another transfer succeeds, unless the shard has
        failed too often. After any other error, it lasts until the shard itself is fetched.
        """
        failures = self._failures.pop(name, 0)
        if exn.retryable:
            self._failures[name] = failures + 1
        else:
            self._failures[name] = _TRIES_AHEAD
        self._blocked.add(name)
        if len(self._failures) > self._remembered:
            oldest = next(iter(self._failures))
            del self._failures[oldest]
            self._blocked.discard(oldest)

    def succeeded(self, name: str) -> set[str]:
        """Record a successful transfer, which shows that the origin answers.

        Returns the names of other shards that were blocked and are worth another attempt now.
        """
        self._failures.pop(name, None)
        blocked = self._blocked - {name}
        self._blocked.clear()
        return {other for other in blocked if other not in self}
