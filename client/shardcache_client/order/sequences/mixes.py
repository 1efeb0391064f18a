"""Mixed orders of the samples of several shards, of which a reader holds a few at a time. Pure.

- A piece is the samples of one shard that a reader reads in one pass over the dataset.
- A mix is an order of the samples of several pieces, in which samples of `window` pieces alternate.
- A place is the number of a sample in such an order, from 0.

A `Mix` counts time in steps. One piece enters per step, and gives its samples in equal parts to
`window` steps, of which the first is the step in which the piece enters. Within a step, the samples
of all its pieces come in random order. With three pieces of 4 samples and a window of 2:

    step             0    1    2     3
    pieces in it     0    0,1  1,2   2
    samples of each  2    2+2  2+2   2
    places           0-1  2-5  6-9   10-11

So piece 1 is held from place 2 on, when its first samples come, until before place 10. A reader
that resumes at place 7 computes step 2 alone, which needs pieces 1 and 2, and skips its first
sample.

The first sample of a mix needs only the first shard. A reader knows in advance when it needs each
shard, it never holds more than `window` shards, and no sample waits in a buffer. Samples that are
next to each other in a shard are a third of a window's samples apart on average. Any step can be
computed from the sizes of the pieces in it, so reading can start anywhere without delay.

(MosaicML's py1e shifts each sample by a random distance and sorts. Steps are the same idea with
parts of equal size, so that no step depends on the random numbers of the others.)
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardcache_client.order.sequences.permutations import permutation
from shardcache_client.order.sequences.rounds import Pieces


@dataclass(frozen=True)
class Mix:
    """A mixed order of the samples of pieces; the module's docstring has an example.

    Attributes:
        pieces: the pieces, in the order in which they enter.
        window: number of steps in which each piece takes part, and so the maximum number of pieces
            in a step. 1 permutes the samples of each piece alone, and 0 leaves them in file order.
    """

    pieces: Pieces
    window: int = 0

    @property
    def _steps_of_piece(self) -> int:
        """Number of steps in which a piece takes part."""
        return max(1, self.window)

    @property
    def steps(self) -> int:
        """Number of steps until the last piece has given all of its samples."""
        if not self.pieces:
            return 0
        return len(self.pieces) + self._steps_of_piece - 1

    def pieces_at(self, step: int) -> range:
        """Return the numbers of the pieces that give samples to a step."""
        return range(max(0, step - self._steps_of_piece + 1), min(step + 1, len(self.pieces)))

    def part(self, piece: int, step: int, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples of a piece that come in a step, in order.

        Args:
            piece: number of the piece.
            step: number of the step.
            numbers: the numbers in the tar of all samples of the piece, in the piece's order.
        """
        start, stop = self._part_range(len(numbers), step - piece)
        return numbers[start:stop]

    def interleaved(self, step: int, sizes: Sequence[int]) -> list[int]:
        """Return the piece of each sample of a step, as an index into `pieces_at(step)`.

        Args:
            step: number of the step.
            sizes: number of samples that each piece of `pieces_at(step)` gives to the step.
        """
        by_piece = [nth for nth, size in enumerate(sizes) for _ in range(size)]
        if len(sizes) <= 1:
            return by_piece
        # A step's random order has the key of the piece that enters in it. After the last piece has
        # entered, steps have that piece's key and a number from 0, `beyond`. So the first of them
        # has the same key as the step before it: saved states rely on this.
        entering = self.pieces[min(step, len(self.pieces) - 1)]
        beyond = max(0, step - len(self.pieces))
        key = f"{entering.order_key}:{entering.start}+{beyond}"
        return [by_piece[drawn] for drawn in permutation(len(by_piece), key)]

    def _part_range(self, size: int, nth: int) -> tuple[int, int]:
        """Return start and stop of the samples that a piece gives to its nth step, from 0.

        Args:
            size: number of samples of the piece.
            nth: number of the step, counted from the one in which the piece enters.
        """
        # The bounds are rounded up, so that no part is larger than the first.
        start = -(-size * nth // self._steps_of_piece)
        stop = -(-size * (nth + 1) // self._steps_of_piece)
        return start, stop

    # The methods below need pieces whose numbers of samples are known.

    def __len__(self) -> int:
        return self.pieces.before(len(self.pieces))

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one place of the order to a later one."""
        return Segment(self, start, stop)

    def find(self, place: int) -> tuple[int, int]:
        """Return the step that contains a place of the whole order, and the place's index in it.

        For the place after the last, this is the step after the last and index 0.
        """
        # In file order, the place would belong to `piece`. In the mixed order, the place is in one
        # of the steps of this piece:
        # 1. Before the piece's first step, only samples of earlier pieces have come. They are at
        #    most `place` samples.
        # 2. By the end of the piece's last step, all samples of the piece and of all earlier
        #    pieces have come. They are more than `place` samples.
        piece = self.pieces.number_at(place)
        steps = range(piece, min(piece + self._steps_of_piece, self.steps))
        step = piece + bisect_right(steps, place, key=self._samples_through)
        return step, place - self.samples_before(step)

    def enters(self, piece: int) -> int:
        """Return the first place at which the reader holds a piece's shard."""
        return self.samples_before(piece)  # it enters in the step of its own number

    def leaves(self, piece: int) -> int:
        """Return the first place at which the reader no longer holds a piece's shard."""
        return self.samples_before(piece + self._steps_of_piece)

    def samples_before(self, step: int) -> int:
        """Return the number of samples in all steps before this one."""
        return self._samples_through(step - 1) if step else 0

    def _samples_through(self, step: int) -> int:
        """Return the number of samples up to the end of a step."""
        # Pieces before the first one of this step have given all of their samples. Pieces of this
        # step have given their parts up to this step, but hold back those of later steps.
        pieces = self.pieces_at(step)
        starts = [self.pieces.before(piece) for piece in range(pieces.start, pieces.stop + 1)]
        samples = starts[0]
        for piece, (start, stop) in zip(pieces, pairwise(starts), strict=True):
            _, given = self._part_range(stop - start, step - piece)
            samples += given
        return samples


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of a mix's order, which may begin and end within steps.

    The number of samples of every piece must be known.

    Attributes:
        mix: the whole order.
        start: the first place of the range.
        stop: the place after the last.
    """

    mix: Mix
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.stop - self.start

    @property
    def is_mixed(self) -> bool:
        """True if the samples of several shards are mixed, or each shard's samples are permuted."""
        return self.mix.window > 0

    def between(self, start: int, stop: int) -> "Segment":
        """Return the part from one place of this segment, counted from 0, to a later place."""
        return Segment(self.mix, self.start + start, self.start + stop)

    @property
    def pieces(self) -> range:
        """Numbers of the pieces that samples come from, in the order in which they enter."""
        if self.start >= self.stop:
            return range(0)
        first_step, _ = self.mix.find(self.start)
        last_step, _ = self.mix.find(self.stop - 1)
        return range(self.mix.pieces_at(first_step).start, self.mix.pieces_at(last_step).stop)
