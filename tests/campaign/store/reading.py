"""An epoch of a dataset before a store that misbehaves, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from campaign.result import Result
from campaign.store.place import HANG_S, StorePlace, samples
from shardcache.errors import ShardcacheError, ShardTimeoutError
from shardcache_client import ShardDataset


class Reading:
    """Reads every shard once, as samples; goes on without those that fail, and asks for them again in the end."""

    def __init__(self, place: StorePlace, result: Result) -> None:
        self._place, self._result = place, result
        self._shard_of = {
            str(sample["__key__"]): number for number in range(len(place.urls)) for sample in samples(number)
        }
        self._bins = {
            str(sample["__key__"]): sample["bin"] for number in range(len(place.urls)) for sample in samples(number)
        }
        self._seen: Counter[str] = Counter()
        self._failed: set[str] = set()

    def epoch(self) -> None:
        """Read while answers are spoiled: of a shard that does not fail every sample comes, and once."""
        self._read(self._place.urls)
        for key, number in self._shard_of.items():
            if self._seen[key] != 1 and not (self._seen[key] == 0 and self._place.urls[number] in self._failed):
                self._result.fail("lost", f"sample {key} came {self._seen[key]} times")

    def make_up(self) -> None:
        """Read what failed, now that the store is healed."""
        healed_s = time.monotonic()
        for url in sorted(self._failed):
            self._failed.clear()
            self._seen.clear()
            self._read([url])
            wanted = {key for key, number in self._shard_of.items() if self._place.urls[number] == url}
            if set(self._seen) == wanted:
                self._result.recovery_s.append(time.monotonic() - healed_s)
            else:
                self._result.fail("lost", f"{url} gives {len(self._seen)} of {len(wanted)} samples")

    def _read(self, urls: Sequence[str]) -> None:
        socket = self._place.daemon.socket
        for sample in ShardDataset(urls, socket=socket, even=None, timeout_s=HANG_S, on_error=self._go_on):
            key = sample["__key__"]
            self._seen[key] += 1
            if sample["bin"] != self._bins[key]:
                self._result.fail("wrong", f"sample {key} is not the one in the store")

    def _go_on(self, exn: Exception) -> bool:
        if isinstance(exn, ShardTimeoutError):
            self._result.fail("hangs", str(exn))
        elif not isinstance(exn, ShardcacheError) or exn.url is None:
            self._result.fail("untyped", repr(exn))
        if isinstance(exn, ShardcacheError) and exn.url is not None:
            self._failed.add(exn.url)
        return True
