"""One order for all ranks: a comparison of the options that determine it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from shardcache.errors import RanksError
from shardcache_client.ranks.distributed import MeetingPlace
from shardcache_client.topology import Topology


class OneOrder:
    """Compares the options of one dataset across all ranks. Can be pickled for DataLoader workers.

    Ranks with other options would each read a share of another order: some samples twice, and others never.

    Args:
        name: the same on all ranks, and unique to the dataset.
        place: finds the key-value store.
    """

    def __init__(self, name: str, place: MeetingPlace) -> None:
        self._name = name
        self._place = place
        self._compared_by: dict[str, int] = {}  # by names of options, the process that has compared them

    def __repr__(self) -> str:
        return f"OneOrder({self._name}, {self._place!r})"

    def compare(self, options: Mapping[str, object], topology: Topology) -> None:
        """Raise RanksError if these options differ from those of the first rank to compare.

        For the main process or worker 0 of a rank, at the start of an iteration. It compares once, without waiting for
        others. No-op if there are no options, or if the ranks share no key-value store.

        Args:
            options: values by the names of the arguments; they are compared by their `repr`.
        """
        names = ",".join(options)
        if not names or self._compared_by.get(names) == os.getpid() or (store := self._place.store()) is None:
            return
        mine = {name: repr(value) for name, value in options.items()}
        # Processes restarted by torchrun may have other options than before.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"order/{attempt}/{self._name}/{topology.world_size}/{names}"
        rank, others = json.loads(store.first(name, json.dumps([topology.rank, mine])))
        for option, value in mine.items():
            if others.get(option) != value:
                raise RanksError(
                    f"rank {topology.rank} would read another order or other batches than rank {rank}, as they differ "
                    f"in {option}: {value} here and {others.get(option)} there",
                    remedy="give the dataset the same arguments on all ranks; batch_size may differ with even=None",
                )
        self._compared_by[names] = os.getpid()
