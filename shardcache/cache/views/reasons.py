"""Texts that say why readers wait: the stage of a transfer, and the limit that slows it.

The status page, the dashboard and the errors of readers that waited too long show these texts. A
stage is what a transfer does or waits for at present, such as space. A limit holds while a transfer
waits because of it.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardcache.access.urls import store_of
from shardcache.cache.fetching.transfers import Transfers
from shardcache.cache.readers.connected_reader import LISTING
from shardcache.cache.readers.readers import Readers
from shardcache.cache.space.residency import Residency
from shardcache.cache.views.visibility import Visible
from shardcache.cache.waiting.stages import Stage
from shardcache.cache.waiting.transfer import Transfer
from shardcache.cache.waiting.waits import JobKey, PriorityClass, Wait
from shardcache.fetch.download import Downloader
from shardcache.fetch.limits.origin_states import Limit
from shardcache.shared.units import size, user_name
from shardcache.store.shard import Shard
from shardcache.store.space import Space

_MAX_HOLDERS = 3  # maximum number of jobs that are named as holding space
_MAX_PATTERNS = 256  # number of a reader's patterns among which `awaited_pattern` searches


class Reasons:
    """Texts that say why shards have not arrived yet, or patterns are not resolved."""

    def __init__(
        self,
        readers: Readers,
        transfers: Transfers,
        residency: Residency,
        space: Space,
        downloader: Downloader,
    ) -> None:
        self._readers = readers
        self._transfers = transfers
        self._residency = residency
        self._space = space
        self._downloader = downloader

    def of_wait(self, wait: Wait | None, transfer: Transfer) -> str:
        """Return why a reader still waits for a shard, or for a range of it.

        Args:
            wait: the reader's wait; None if the reader waits for more of an arriving shard.
            transfer: the transfer of the shard or object.
        """
        # A range may be in another stage than its transfer. Its wait has stages of its own then.
        if wait is None or wait.stages is None or not wait.has_own_stages:
            return self.of_transfer(transfer)
        stage = wait.stages.present
        if stage is Stage.SPACE:
            in_use = size(self._residency.parts.leased_bytes)
            return (
                f"{stage.value} for a range: {self.space_in_words()}, {in_use} of ranges in use; "
                f"ranges are read in turn ({self._space.remedy}, or read smaller ranges)"
            )
        return self._with_cause(stage, transfer)

    def of_transfer(self, transfer: Transfer) -> str:
        """Return why a transfer has not finished yet."""
        stage = transfer.stages.present
        if stage is Stage.SPACE and transfer.ref.is_file:
            return f"{stage.value} for a whole file: {self.space_in_words()} ({self._space.remedy})"
        if stage is Stage.SPACE:
            needs = "each rank needs space for shuffle_window + 1 shards, two without shuffling"
            return f"{stage.value}: {self.space_in_words()}; {needs} ({self._space.remedy})"
        return self._with_cause(stage, transfer)

    def _with_cause(self, stage: Stage, transfer: Transfer) -> str:
        """Return a stage, with the last failed request if there is one, else as `of_stage` does."""
        failure = self._downloader.failing.get(transfer.ref.url)
        if failure:
            return f"{stage.value}; {failure}"
        return self.of_stage(stage, transfer.ref.url)

    def of_stage(self, stage: str, url: str | None = None) -> str:
        """Return a stage with the limit that holds its transfers back, if there is one.

        Args:
            stage: the stage in words.
            url: url of the transfer; None for transfers in general.
        """
        if stage == Stage.NETWORK:
            for limit in self._downloader.limits(url):
                if limit.holds:
                    return f"{stage}, limited by {limit.text}"
        return str(stage)

    def of_listing(self, patterns: Sequence[str]) -> str:
        """Return why patterns are not resolved: the object store that is asked, its last error.

        Args:
            patterns: the patterns of one reader.
        """
        pattern = self.awaited_pattern(patterns)
        failure = self._downloader.failing.get(pattern)
        reason = f"{LISTING} of {store_of(pattern)}"
        if failure:
            return f"{reason}; {failure}"
        return reason

    def awaited_pattern(self, patterns: Sequence[str]) -> str:
        """Return the pattern for which an origin is being asked; the first one if unknown."""
        for pattern in patterns[:_MAX_PATTERNS]:
            if pattern in self._downloader.asking:
                return pattern
        return patterns[0]

    def limits(self, visible: Visible) -> Iterator[Limit]:
        """Yield all that may hold readers back: configured limits, and present causes.

        Args:
            visible: returns whether the user may see a url.
        """
        yield from self._downloader.limits()

        transfers = self._transfers.all()
        waits_for_space = any(each.stages.present is Stage.SPACE for each in transfers)
        yield Limit("space", self.space_in_words(), holds=waits_for_space)

        being_checked = [each for each in transfers if each.stages.present is Stage.DISK]
        if being_checked:
            has_waiting_reader = any(
                transfer.priority_class is PriorityClass.WAITING for transfer in being_checked
            )
            text = f"arrived shards being checked and indexed: {len(being_checked)}"
            yield Limit("disk", text, holds=has_waiting_reader)

        failing = self._downloader.failing.items()
        failures = [failure for url, failure in failing if visible(url)]
        if failures:
            text = f"requests repeated after errors: {len(failures)}; {failures[-1]}"
            yield Limit("errors", text, holds=True)

    def space_in_words(self) -> str:
        """Return the capacity and its use in words, with the jobs that hold most of it."""
        leased = f"{size(self.leased_bytes())} of it leased"
        holders = self._largest_holders()
        if holders:
            leased += f" ({', '.join(holders)})"
        if self._space.pinned_bytes:
            leased += f", {size(self._space.pinned_bytes)} pinned"
        arriving = size(self._space.reserved_bytes)
        return f"{self._space.explanation}, {leased}, {arriving} reserved by transfers"

    def leased_bytes(self) -> int:
        """Return the size of all leased shards."""
        return sum(shard.kept_bytes for shard in self._residency.leased)

    def _largest_holders(self) -> list[str]:
        """Return, in words, the jobs that hold the most space, the largest first."""
        held: defaultdict[JobKey, set[Shard]] = defaultdict(set)
        for reader in self._readers:
            held[reader.client].update(reader.retained())
        held_bytes: dict[JobKey, int] = {}
        for job, shards in held.items():
            shards_bytes = sum(shard.kept_bytes for shard in shards)
            if shards_bytes:
                held_bytes[job] = shards_bytes

        largest = heapq.nlargest(_MAX_HOLDERS, held_bytes, key=held_bytes.__getitem__)
        return [
            f"{name} of {user_name(uid)} {size(held_bytes[name, uid])}" for name, uid in largest
        ]
