"""The order of a reader's epoch whose samples are not counted. Pure.

Shards are uncounted if their numbers of samples are unknown until they are opened.

- A share is the shards that are dealt to one reader. If an epoch has a fixed number of samples, a
  reader that has read its own share goes on with further shares: see `ShardDeal.mix`.
- A mix is the order of a share's samples (see `mixes`). Its pieces are the share's shards, numbered
  in the order in which they are read.
- A step takes some samples of each of a few pieces. A reader reads its share step by step.
- A place is the number of a sample in the order in which the reader reads them, from 0. The error
  of a sample or shard that cannot be read has a place, too.

Which step has a place depends on the unknown numbers of samples. So a reader's position is given by
the share, the step, and the number of places before the step.
"""

from collections.abc import Iterator
from itertools import chain, count
from typing import NamedTuple

from shardcache_client.order.dealing.deal import ShardDeal
from shardcache_client.order.sequences.mixes import Mix
from shardcache_client.order.sequences.permutations import window_of
from shardcache_client.order.topology import Topology


class StepPlace(NamedTuple):
    """The place at which a step begins.

    Attributes:
        share: number of the share that is read; 0 is the reader's own share.
        step: number of the step in the share.
        before: number of places before the step, in all shares since the epoch's beginning; so it
            is also the step's first place.
    """

    share: int = 0
    step: int = 0
    before: int = 0


class UncountedEpoch:
    """The steps of a reader's epoch.

    They are the steps of the reader's share. If the dataset has `samples_per_epoch`, the steps of
    further shares follow endlessly.

    Args:
        deal: divides the shards.
        reader: the rank, or its worker in a plain DataLoader.
        epoch: number of the epoch.
    """

    def __init__(self, deal: ShardDeal, reader: Topology, epoch: int) -> None:
        self._deal = deal
        self._reader = reader
        self._epoch = epoch

    def __repr__(self) -> str:
        return f"UncountedEpoch({self._epoch}, {self._reader})"

    @property
    def is_mixed(self) -> bool:
        """True if the samples of several shards are mixed, or each shard's samples are permuted."""
        return window_of(self._deal.shuffle) > 0

    @property
    def pass_shares(self) -> int:
        """Number of consecutive shares that hold every shard, wherever they begin.

        With R readers, a reader's shares 0 to R - 1 hold every shard. So do its shares R to 2R - 1,
        and each further group of R. Before the first whole group there are at most R - 1 shares, so
        any 2R - 1 consecutive shares contain a whole group.
        """
        return 2 * self._reader.readers - 1

    def has_share(self, share: int) -> bool:
        """Return True if there is a share of this number."""
        return share == 0 or self._deal.samples_per_epoch is not None

    def mix(self, share: int) -> Mix:
        """Return the order of a share, by the share's number."""
        return self._deal.mix(self._epoch, share, self._reader)

    def shards(self, start: StepPlace) -> Iterator[int]:
        """Yield the shards of a share that are needed from a step on, in the order of need."""
        mix = self.mix(start.share)
        if not mix.pieces:
            return iter(())
        # Later steps need no earlier pieces than the first one of this step.
        first_piece = mix.pieces_at(start.step).start
        return mix.pieces.shards(first_piece, len(mix.pieces))

    def shards_after(self, share: int) -> Iterator[int]:
        """Yield the shards of the shares after a share.

        They are endless if the dataset has `samples_per_epoch`.
        """
        if not self.has_share(share + 1):
            return iter(())
        later = count(share + 1)
        return chain.from_iterable(self.shards(StepPlace(number)) for number in later)
