"""Which shards are not worth fetching ahead for now. Pure."""

from __future__ import annotations

from shardcache.errors import ShardcacheError

# A shard that fails this often, while others arrive, is left until a reader asks for it.
_TRIES_AHEAD = 3
# Of so many it is remembered; one that was forgotten is tried ahead once more.
_REMEMBERED = 100_000


class Failures:
    """Shards whose transfer failed, by name. A reader that asks for one always gets a try of its own."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._remembered = remembered
        self._tries: dict[str, int] = {}
        self._waiting: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._waiting or self._tries.get(name, 0) >= _TRIES_AHEAD

    def __len__(self) -> int:
        return len(self._tries)

    def failed(self, name: str, exn: ShardcacheError) -> None:
        """Note a failure: one that a retry may mend blocks the shard until some other transfer succeeds."""
        tries = self._tries.pop(name, 0)
        self._tries[name] = tries + 1 if exn.retryable else _TRIES_AHEAD
        self._waiting.add(name)
        if len(self._tries) > self._remembered:
            oldest = next(iter(self._tries))
            del self._tries[oldest]
            self._waiting.discard(oldest)

    def succeeded(self, name: str) -> set[str]:
        """Note a success, which shows that the store answers; return the names that are worth a try again."""
        self._tries.pop(name, None)
        again = {other for other in self._waiting if self._tries.get(other, 0) < _TRIES_AHEAD}
        self._waiting.clear()
        return again - {name}
