"""The weights of a mixture's sources, and the number of turns that each has in an epoch. Pure.

A turn is a sample, or a batch if each batch has samples of one source only. A source is due its
weight's part of the turns of each epoch. It is ahead if it has had more turns than it was due, and
behind if it has had fewer. `mixture` asks for the turns of each epoch.

Turns are whole, so an epoch may give a source less than it is due; later epochs make up for it. Two
sources with the weights 1 and 2 are due 3⅓ and 6⅔ of the 10 turns of an epoch. They get 3 and 7, 4
and 6, and 3 and 7: after three epochs, they have had 10 and 20.

The turns up to the end of an epoch are divided between two halves of the sources, as near as
possible to what each half is due by then. The turns of each half are divided likewise, down to
single sources. So where there are two sources, each is within half a turn of what it is due. Where
there are up to four, each is within one turn, and within half a turn more for each further
division.

If weights change between epochs, a source that is ahead may be due nothing while the other source
of its pair is due turns. So the bound after n divisions is E(n) = 2 E(n - 1) + 0.5 turns: 0.5, 1.5,
3.5, 7.5. With one more turn to divide, one part of each division is larger by one, and none is
smaller: a source that is ahead waits, and no epoch has to take turns back. A source that is behind
when its weight becomes 0 waits for an epoch in which it has a weight again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf
from operator import add, sub
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments.values import by_name, plain, shown, whole

SourceWeights = Mapping[str, float] | Sequence[float]
Weights = SourceWeights | Mapping[int, SourceWeights]
"""A weight for each source, by name or in the order of the sources.

Weights that change are given by the epoch from which they hold; the first of these epochs is 0.
"""

_WEIGHTS_REMEDY = (
    'write {"name": weight, …}, or [weight, …]; or {0: …, epoch: …} for weights from an epoch on'
)
_EPOCH_RULE = whole(0)  # a whole number from 0 on

_UNITS_PER_TURN = 1 << 64
"""Number of units in a turn. What a source is due, or is ahead, is counted in these units.

A unit is so small that rounding errors do not add up to a turn even after any number of epochs.
"""


@dataclass(frozen=True, slots=True)
class QuotaStep:
    """Consecutive epochs with the same weights and the same number of turns.

    Attributes:
        first: the first of these epochs.
        due: turns that each source is due in each epoch, in units of which a turn has
            `_UNITS_PER_TURN`. They add up to the turns of an epoch.
        starts: number of turns that each source has had in all epochs before `first`.
        ahead: turns that each source has had before `first` beyond those that it was due, in the
            same units; negative for a source that is behind.
    """

    first: int
    due: tuple[int, ...]
    starts: tuple[int, ...]
    ahead: tuple[int, ...]

    def taken(self, epoch: int) -> tuple[int, ...]:
        """Return the number of turns of each source in all epochs before `epoch`."""
        turns = (epoch - self.first) * sum(self.due) // _UNITS_PER_TURN
        since_first = _divided(turns, self.due, self.ahead)
        return tuple(map(add, self.starts, since_first))

    def then(self, epoch: int, due: tuple[int, ...]) -> "QuotaStep":
        """Return the step that follows this one.

        Args:
            epoch: the first epoch of the new step.
            due: turns that each source is due in each epoch of the new step; see `QuotaStep`.
        """
        starts = self.taken(epoch)
        epochs = epoch - self.first
        ahead = []
        for source, before in enumerate(self.ahead):
            taken = starts[source] - self.starts[source]
            ahead.append(before + _UNITS_PER_TURN * taken - epochs * self.due[source])
        return QuotaStep(epoch, due, starts, tuple(ahead))


@dataclass(frozen=True, slots=True)
class SourceQuotas:
    """The number of turns that each epoch gives to each source.

    Attributes:
        steps: the steps in order; epochs before the first step are unknown.
    """

    steps: tuple[QuotaStep, ...]

    def turns(self, epoch: int) -> tuple[int, ...]:
        """Return the number of turns that each source has in an epoch."""
        return tuple(map(sub, self.starts(epoch + 1), self.starts(epoch)))

    def starts(self, epoch: int) -> tuple[int, ...]:
        """Return the number of turns of each source in all epochs of these steps before `epoch`."""
        step = next(step for step in reversed(self.steps) if step.first <= epoch)
        return step.taken(epoch)


@dataclass(frozen=True, slots=True)
class WeightSchedule:
    """The weights of a mixture's sources, by the epoch from which they hold.

    Attributes:
        steps: pairs of an epoch and the weights from this epoch on, in ascending order. The first
            epoch is 0. The weights of each pair add up to 1.
    """

    steps: tuple[tuple[int, tuple[Fraction, ...]], ...]

    @classmethod
    def of(cls, weights: Weights | None, sizes: Mapping[str, int]) -> "WeightSchedule":
        """Build from the weights that a user gives. Raises ConfigError.

        Args:
            weights: the weights, by name or in the order of `sizes`; None to use the sizes.
            sizes: number of samples of each source, by name.
        """
        by_epoch = _by_epoch(sizes if weights is None else weights)
        names = list(sizes)
        steps = []
        for epoch in sorted(by_epoch):
            checked = _checked(by_epoch[epoch], names)
            total = sum(checked)
            steps.append((epoch, tuple(each / total for each in checked)))
        return cls(tuple(steps))

    def quotas(self, turns: int, rest_of_epoch: tuple[int, int] | None = None) -> SourceQuotas:
        """Return the turns of each source in epochs of `turns` turns.

        Args:
            turns: number of turns of an epoch.
            rest_of_epoch: number of the first epoch, and the number of its turns, if only a part of
                this epoch is left; None for whole epochs from 0 on.
        """
        first, first_turns = rest_of_epoch or (0, turns)
        due_from = {epoch: _due(weights, turns) for epoch, weights in self.steps if epoch > first}
        due_from[first] = _due(self._weights(first), first_turns)
        if first_turns != turns:
            # After the rest of an epoch come whole epochs.
            due_from[first + 1] = _due(self._weights(first + 1), turns)

        # Before the first step, no source has had any turns, or was due any.
        _, first_weights = self.steps[0]
        zeros = (0,) * len(first_weights)
        step = QuotaStep(first, due=zeros, starts=zeros, ahead=zeros)
        steps = []
        for epoch in sorted(due_from):
            step = step.then(epoch, due_from[epoch])
            steps.append(step)
        return SourceQuotas(tuple(steps))

    def _weights(self, epoch: int) -> tuple[Fraction, ...]:
        """Return the weights that hold in an epoch."""
        return next(weights for first, weights in reversed(self.steps) if first <= epoch)


# The schedule of a mixture without sources: a default for `MixtureOptions`, whose users always
# give weights.
NO_WEIGHTS = WeightSchedule(())


def _due(weights: Sequence[Fraction], turns: int) -> tuple[int, ...]:
    """Return what each source is due in an epoch of `turns`; see `QuotaStep`."""
    ends = [
        int(turns * _UNITS_PER_TURN * each) for each in accumulate(weights, initial=Fraction(0))
    ]
    return tuple(stop - start for start, stop in pairwise(ends))


def _divided(turns: int, due: Sequence[int], ahead: Sequence[int]) -> list[int]:
    """Divide turns among sources in proportion to what they are due, less what they are ahead.

    Args:
        turns: number of turns to divide.
        due: see `QuotaStep`.
        ahead: see `QuotaStep`.
    """
    if len(due) == 1:
        return [turns]
    half = len(due) // 2
    first = _turns_of_first(
        turns,
        due=sum(due[:half]),
        due_in_all=sum(due),
        ahead=sum(ahead[:half]),
        ahead_in_all=sum(ahead),
    )
    return [
        *_divided(first, due[:half], ahead[:half]),
        *_divided(turns - first, due[half:], ahead[half:]),
    ]


def _turns_of_first(turns: int, *, due: int, due_in_all: int, ahead: int, ahead_in_all: int) -> int:
    """Return the number of turns of the first of two groups of sources.

    Args:
        turns: number of turns of both groups together.
        due: turns that the first group is due in an epoch; see `QuotaStep` for the unit.
        due_in_all: turns that both groups together are due.
        ahead: turns by which the first group is ahead.
        ahead_in_all: turns by which both groups together are ahead.
    """
    if due == 0:
        return 0
    if due == due_in_all:
        return turns
    # The first group's part of all turns until now, less the turns that the group already had.
    exact = (turns * _UNITS_PER_TURN + ahead_in_all) * due // due_in_all - ahead
    rounded = (exact + _UNITS_PER_TURN // 2) // _UNITS_PER_TURN
    # Turns are never taken back: a group that is further ahead than its part gets none.
    return min(turns, max(0, rounded))


def _by_epoch(weights: Any) -> dict[int, Any]:
    """Return a user's weights by the epoch from which they hold. Raises ConfigError.

    Weights that are not given by epoch hold from epoch 0 on.
    """
    if not isinstance(weights, Mapping) or not any(map(_is_collection, weights.values())):
        return {0: weights}
    by_epoch = {_epoch(key, value): value for key, value in weights.items()}
    if 0 not in by_epoch:
        raise ConfigError(
            "weights has no entry for epoch 0",
            remedy="give the weights of the first epoch under 0",
        )
    return by_epoch


def _epoch(key: object, value: object) -> int:
    """Return the epoch from which weights hold.

    Raises ConfigError unless `key` is the number of an epoch and `value` looks like weights.
    """
    error = ConfigError(f"weights has {shown(key)}: {shown(value)}", remedy=_WEIGHTS_REMEDY)
    if not _is_collection(value):
        raise error
    try:
        return int(_EPOCH_RULE.converted(plain(key)))
    except (TypeError, ValueError):
        raise error from None


def _is_collection(value: object) -> bool:
    """Return True for a mapping, a sequence, an array or a tensor."""
    # An array or a tensor that is not a single number has an `ndim` above 0.
    return isinstance(value, Mapping | Sequence) or bool(getattr(value, "ndim", 0))


def _checked(weights: Any, names: Sequence[str]) -> list[Fraction]:
    """Return the weight of each source, in the order of `names`. Raises ConfigError."""
    if not _is_collection(weights) or isinstance(weights, str) or not len(weights):
        raise ConfigError(f"weights is {shown(weights)}", remedy=_WEIGHTS_REMEDY)
    if not isinstance(weights, Mapping):
        # If there are too many or too few weights, they are named by number: so the error below
        # shows how many there are.
        keys = names if len(weights) == len(names) else range(len(weights))
        weights = dict(zip(keys, weights, strict=True))
    named = by_name(weights.items(), "weights")
    numbers = {name: plain(weight) for name, weight in named.items()}
    if set(numbers) != set(names):
        raise ConfigError(
            f"weights are for {', '.join(map(repr, numbers))}; "
            f"the sources are {', '.join(map(repr, names))}",
            remedy="give a weight for each source; 0 for one that is not read",
        )
    if not all(map(_is_weight, numbers.values())):
        raise ConfigError(f"weights are {shown(numbers)}", remedy="give finite numbers, 0 or more")
    if not any(numbers.values()):
        raise ConfigError(
            "the weights are all 0",
            remedy="give at least one source a weight above 0",
        )
    return [Fraction(numbers[name]) for name in names]


def _is_weight(value: object) -> bool:
    """Return True for a finite number of 0 or more, not too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 <= float(value) < inf
    except OverflowError:
        return False
