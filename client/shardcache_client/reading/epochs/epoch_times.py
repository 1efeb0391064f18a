"""The time of an epoch in the training process, divided by what the training loop spends it on.

The shares are the training step and the loop's waits for a batch. A wait is divided further, by
what the process that makes the batch does in that time. `ShardLoader.stats` reports the shares.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

# Parts of an epoch's time: the training step, followed by the causes of the loop's waits.
SHARES = ("step", "shards", "reading", "decoding", "collating", "handover")


class BatchTimes(NamedTuple):
    """The times of making one batch, in the process that made the batch.

    Times of different processes can be compared: all are of the system's monotonic clock.

    Attributes:
        samples: number of samples in the batch.
        begun_s: time at which the making began.
        ended_s: time at which the making ended.
        waited_s: duration of the waits for shards in between.
        decoding_s: duration of the decoding in between.
        collating_s: duration of the collating in between.
    """

    samples: int
    begun_s: float
    ended_s: float
    waited_s: float
    decoding_s: float
    collating_s: float

    @property
    def lasted_s(self) -> float:
        """Duration of making the batch."""
        return self.ended_s - self.begun_s


class EpochTimes:
    """The time of one epoch, as the training loop passes it.

    1. While the loop waits for a batch that is being made, its wait is divided among the maker's
       shares, in the proportions of the whole batch.
    2. While the loop waits for a worker to begin, or for a finished batch to be delivered, its wait
       counts as "handover".
    3. The maker's work while the loop is busy with a step costs the loop nothing.

    Args:
        epoch: number of the epoch.
        clock: returns the time in seconds.
    """

    def __init__(self, epoch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = epoch
        self.batches = 0
        self.samples = 0
        self._spent_s = dict.fromkeys(SHARES, 0.0)
        self._clock = clock
        self._since_s = clock()  # time up to which the epoch has been accounted for

    def received(self, made: BatchTimes) -> None:
        """Account for the time since the last step, in which the loop waited for this batch."""
        now_s = self._clock()
        # The loop has waited since `_since_s`, and the batch was finished at `ended_s`, before now.
        # So the wait and the making overlap from the later of their beginnings until `ended_s`.
        overlap_begun_s = max(self._since_s, made.begun_s)
        overlap_s = max(0.0, made.ended_s - overlap_begun_s)
        parts = {
            "shards": made.waited_s,
            "decoding": made.decoding_s,
            "collating": made.collating_s,
        }
        parts["reading"] = made.lasted_s - sum(parts.values())
        if made.lasted_s:
            for name, part_s in parts.items():
                self._spent_s[name] += overlap_s * part_s / made.lasted_s
        self._spent_s["handover"] += now_s - self._since_s - overlap_s

        self._since_s = now_s
        self.batches += 1
        self.samples += made.samples

    def stepped(self) -> None:
        """Account for the time since the last batch was received."""
        now_s = self._clock()
        self._spent_s["step"] += now_s - self._since_s
        self._since_s = now_s

    def to_json(self) -> dict[str, Any]:
        """Return the epoch's numbers so far; see `ShardLoader.stats`."""
        passed_s = sum(self._spent_s.values())  # all of the epoch so far
        step_s = self._spent_s["step"]
        shares = {name: spent_s / (passed_s or 1.0) for name, spent_s in self._spent_s.items()}
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "samples": self.samples,
            "seconds": passed_s,
            "samples_per_s": self.samples / passed_s if passed_s else 0.0,
            "ideal_samples_per_s": self.samples / step_s if step_s else None,
            "shares": shares,
        }

    def __str__(self) -> str:
        numbers = self.to_json()
        rate = f"{numbers['samples_per_s']:,.0f} samples/s"
        ideal = numbers["ideal_samples_per_s"]
        if ideal is not None:
            rate += f" ({ideal:,.0f} if data were free)"
        shares = numbers["shares"]
        largest_first = sorted(shares, key=shares.__getitem__, reverse=True)
        percentages = ", ".join(f"{name} {shares[name]:.0%}" for name in largest_first)
        return f"epoch {self.epoch}: {rate}; {numbers['seconds']:,.1f} s: {percentages}"
