"""A reader's staged epoch, or the rest of one: its items, and the reader's states.

A stage makes items, such as blocks of tokens, from groups of samples. An epoch is staged if a stage
regroups its samples, if a filter leaves some out, or if they are uncounted. Without a stage, each
sample is an item. `stage_run` and the loaders pass the samples in and take the items and the
states.

- A reader is a rank, or one of its workers in a plain DataLoader.
- A place is the number of a sample in the reader's share of the epoch, before any filter or stage.
- A mark is the reader's position between two items: see `Mark`.
- Shards are uncounted if their numbers of samples are unknown. They are read in steps: see
  `rank_chunks`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache_client.order.dealing.deal import Deal, SpanDeal
from shardcache_client.order.topology import Topology
from shardcache_client.order.uncounted import StepPlace
from shardcache_client.position.staged_state import Reached, Resume, StagedState
from shardcache_client.stages.stage import EpochFacts, Mark, Placed, Stage, one_by_one


@dataclass(frozen=True)
class StagedForm:
    """The values that all staged epochs of a dataset have in common.

    Attributes:
        dataset: identifier of the dataset in states; see `RankState`.
        deal: division of the dataset's samples among readers, or of its shards if these are
            uncounted.
        stage: regroups the samples; None if each sample is an item.
        seed: seed of the dataset.
        seeds: seeds that were drawn at random; see `RankState`.
        leaves_out: True if samples may be left out before the stage. Ranks that have given the same
            number of items may then be at different places.
    """

    dataset: str
    deal: Deal
    stage: Stage | None
    seed: int
    seeds: Mapping[str, int]
    leaves_out: bool = False

    @property
    def is_in_step(self) -> bool:
        """True if workers of the same number are at the same place on all ranks."""
        # If samples are left out, or whole shards are dealt, a rank's place does not follow from
        # the number of its items.
        if self.leaves_out or not self.deal.counted:
            return False
        return self.stage is not None and self.stage.is_in_step

    def ends_together(self, reader: Topology) -> bool:
        """Return True if all readers end after the same number of items."""
        if reader.readers == 1:
            return True
        # A stage gives all ranks the same number of items, but a worker does not know how many
        # items the rank's other workers give.
        return self.stage is not None and reader.workers == 1


class StagedEpoch:
    """The items of one reader's epoch, or of the rest of one.

    Args:
        form: what all staged epochs of the dataset have in common.
        resume: position from which the epoch is read.
        reader: the rank or worker that reads.
        places: number of places in the reader's share; None if it is unknown.
        quota: number of samples that the reader gets in the epoch, not counting bad samples; None
            for all samples of its share.

    Attributes:
        reached: position of the reader after the last item.
        is_read: True if nothing is left of the epoch.
        begun_steps: steps of uncounted shards that were begun, from the step of `reached` on. The
            code that reads the samples appends each step; steps that are over are removed here.
    """

    def __init__(
        self,
        form: StagedForm,
        resume: Resume,
        reader: Topology,
        places: int | None,
        quota: int | None,
    ) -> None:
        self._form = form
        self._resume = resume
        self._reader = reader
        self._places = places
        self._quota = quota
        # Places of the samples that the stage has taken and not yet given in items. They are kept
        # only to count the samples of a quota.
        self._pending_places: deque[int] = deque()
        self.reached = resume.reached
        self.is_read = False
        self.begun_steps: deque[StepPlace] = deque()

    def __repr__(self) -> str:
        return f"StagedEpoch({self.reached!r}, quota={self._quota})"

    @property
    def epoch(self) -> int:
        """Number of the epoch."""
        return self._resume.progress.epoch

    def samples_left(self, reached: Reached) -> int | None:
        """Return the number of samples after a position of the reader; None if it is unknown.

        The number is a maximum if samples may be left out.
        """
        if self._quota is not None:
            return self._quota - reached.samples
        if self._places is None:
            return None
        return max(0, self._places - reached.mark.place)

    def items(self, samples: Iterator[Placed]) -> Iterator[Any]:
        """Yield the stage's items, and set `reached` to the position after each item.

        Args:
            samples: samples from the mark of `reached` on, with their places.
        """
        stage = self._form.stage
        if self._quota is not None:
            samples = self._up_to_quota(samples, self._quota)
        if stage is None:
            regrouped = one_by_one(samples)
        else:
            facts = EpochFacts(
                self._reader,
                seed=self._form.seed,
                epoch=self.epoch,
                start=self.reached.mark,
                places=self._places,
            )
            regrouped = stage.regrouped(samples, facts)

        for item, mark in regrouped:
            self._move_to(mark)
            if self._quota == self.reached.samples:
                # All samples of the quota were given. This is recorded before the last item is
                # yielded, since a loop that knows the number of items asks for no further item.
                self.is_read = True
            yield item
        self.is_read = True

    def _up_to_quota(self, samples: Iterator[Placed], quota: int) -> Iterator[Placed]:
        """Yield the samples that are left of the quota, and record their places as pending."""
        for _ in range(self.reached.samples, quota):
            sample = next(samples, None)
            if sample is None:
                return
            self._pending_places.append(sample.place)
            yield sample

    def _move_to(self, mark: Mark) -> None:
        """Set the reader's position to a mark: all samples before the mark have been given."""
        samples = self.reached.samples
        while self._pending_places and self._pending_places[0] < mark.place:
            self._pending_places.popleft()
            samples += 1
        # Steps that end at or before the mark are over.
        while len(self.begun_steps) > 1 and self.begun_steps[1].before <= mark.place:
            self.begun_steps.popleft()
        step = self.begun_steps[0] if self.begun_steps else self.reached.step
        self.reached = Reached(mark, samples, step)

    def state(self, reached: Reached, *, ended: bool, over: bool) -> StagedState:
        """Return the reader's state at a position.

        Args:
            reached: the position.
            ended: True if this reader has nothing left of the epoch.
            over: True if no reader has anything left of the epoch.
        """
        form = self._form
        reader = self._reader
        deal = form.deal
        stage_name = "" if form.stage is None else form.stage.name
        mixture = None
        if isinstance(deal, SpanDeal):
            mixture = deal.mixture_of(self.epoch)
        return StagedState(
            form.dataset,
            self._resume.progress,
            reader=reader.reader,
            readers=reader.readers,
            workers=reader.workers,
            reached=reached,
            counted=deal.counted,
            over=over,
            ended=ended,
            in_step=form.is_in_step,
            stage=stage_name,
            mixture=mixture,
            seeds=form.seeds,
        )
