"""Packing of whole samples into blocks of at most `max_tokens`, equally many on every rank. Pure.

The `pack` stage calls it. A block is the samples of one row of a batch, which are trained on
together. Blocks of 8 tokens hold samples of 5, 3, 3, 2, 6 and 1 tokens as 6 + 2, 5 + 3 and 3 + 1.

A reader keeps up to `window` samples waiting, in the order in which they come. From these samples,
`next_group` makes one group of blocks after another. A group has the oldest waiting samples, enough
to fill a number of blocks; the samples after these wait for the next group.

Groups end where their blocks are full. If groups had a fixed number of samples, the last block
would be half empty on average: 5 % of the tokens of ten blocks. As no sample is carried past
others, a group does not depend on earlier groups. So a position is two numbers: the samples before
a group, and the blocks given from this group. To resume, a reader reads on from the group's first
sample and skips the blocks that were given.

The samples of a group all wait at the same time, so fewer than `window` places lie between any two
of them. Samples that are `window` or more places apart are therefore given in order: when a sample
is given, fewer than `window` samples after it have been read.

Ranks make equally many blocks of each group, although their samples have different lengths. They
could all give the same number of samples and agree on the greatest number of blocks that a rank
needs for these samples. But then all other ranks would split blocks in every group, at the cost of
a tenth of the tokens. Instead they agree on the least number of blocks that all ranks can fill, and
give different numbers of samples. Ranks with short samples get ahead. Near the end of an epoch,
these ranks give blocks that are less full, until the rank with the most samples left has caught up.
This adds no training steps, since the rank with the most tokens needs these steps anyway.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import accumulate, chain

from shardcache_client.order.sequences.permutations import permutation

Blocks = list[list[int]]
"""The samples of each block, by their place among the waiting samples, ascending."""

# A rank keeps at least 7/8 as many samples as the rank that has the most left: it gets ahead by at
# most 1/8. With these, it can give as many blocks as that rank, as long as the blocks of that rank
# have 8/7 samples or more on average.
_MAX_LEAD_DIVISOR = 8

# Number of blocks that a rank without samples offers: it limits no other rank, as its blocks are
# empty.
_ANY_NUMBER = 2**31


def _own(value: int) -> int:
    """Return the greatest value of all ranks where there is only one rank: its own value."""
    return value


def next_group(
    waiting: Sequence[int],
    unread: int,
    max_tokens: int,
    key: str,
    greatest: Callable[[int], int] = _own,
    sources: Sequence[object] = (),
) -> Blocks:
    """Return the blocks of a rank's next group, in the order in which to train on them.

    Every rank gets the same number of blocks. Once no rank has samples left, all get none. The
    blocks hold the first samples of `waiting`, each once. A block is empty only if the rank has
    fewer samples left than blocks to give.

    Args:
        waiting: lengths in tokens, from 1 to `max_tokens`, of the next samples: `window` of them,
            or all that are left.
        unread: number of samples of the epoch after the waiting ones. An estimate above 0 will do
            as long as there are any; 0 means that there are none.
        max_tokens: maximum number of tokens in a block.
        key: determines the order of the blocks; see `permutation`.
        greatest: returns the greatest value that any rank passes in the same call. All ranks call
            it equally often.
        sources: the source of each waiting sample: samples of two sources do not share a block.
            Empty if any samples may share one.

    Raises:
        ValueError: a length is not from 1 to `max_tokens`.
    """
    # An invalid length raises here, before the other ranks wait for this rank in `greatest`.
    _check(waiting, max_tokens)
    is_last = greatest(unread) == 0
    if is_last:
        # All ranks give as many blocks as the rank that needs the most, so that no sample is left.
        needed = len(pack(waiting, max_tokens, sources=sources))
        count = greatest(needed)
        blocks = pack(waiting, max_tokens, least=count, sources=sources)
    else:
        # All ranks give as many blocks as the rank that can fill the fewest. `greatest` finds the
        # least value as the one whose negative is the greatest.
        offered = _offer(waiting, unread, max_tokens)
        count = -greatest(-offered)
        blocks = _blocks_keeping_pace(waiting, unread, max_tokens, count, greatest, sources)

    missing = count - len(blocks)
    blocks += [[] for _ in range(missing)]
    return [blocks[number] for number in permutation(count, key)]


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    least: int = 1,
    sources: Sequence[object] = (),
) -> Blocks:
    """Return blocks of all these samples: as few as best fit needs, but at least `least`.

    No block is empty, so there are fewer than `least` blocks if there are fewer samples.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: maximum number of tokens in a block.
        least: minimum number of blocks.
        sources: see `next_group`.

    Raises:
        ValueError: a length is not from 1 to `max_tokens`.
    """
    _check(lengths, max_tokens)
    return _split(_best_fit(lengths, max_tokens, sources), least)


def fill(
    lengths: Sequence[int],
    max_tokens: int,
    count: int,
    sources: Sequence[object] = (),
) -> Blocks:
    """Return exactly `count` blocks of the first samples: about as many samples as fit.

    Args:
        lengths: number of tokens of each sample.
        max_tokens: maximum number of tokens in a block.
        count: number of blocks, at most the number of samples.
        sources: see `next_group`.

    Raises:
        ValueError: a length is not from 1 to `max_tokens`.
    """
    _check(lengths, max_tokens)
    ends = list(accumulate(lengths))
    taken = bisect_right(ends, count * max_tokens)
    blocks = _best_fit(lengths[:taken], max_tokens, sources)

    while len(blocks) > count:
        # The last samples are left out, as many as have the tokens of the surplus blocks. These are
        # taken to be the blocks with the fewest tokens.
        tokens = sorted(sum(lengths[place] for place in block) for block in blocks)
        surplus_tokens = sum(tokens[: len(blocks) - count])
        shorter = bisect_right(ends, ends[taken - 1] - surplus_tokens)
        # At least one sample is left out each time. As many samples as blocks are kept: these
        # always fit, each in a block of its own.
        taken = max(count, min(shorter, taken - 1))
        blocks = _best_fit(lengths[:taken], max_tokens, sources)

    return _split(blocks, count)


def cu_seqlens(lengths: Sequence[int]) -> "array[int]":
    """Return where each sample of a block starts, and where the last ends: int32, from 0.

    Samples of 5 and 3 tokens give 0, 5, 8: the form that attention kernels for variable lengths
    take. `numpy.asarray` and `torch.frombuffer` do not copy the array.
    """
    return array("i", accumulate(lengths, initial=0))


def positions(lengths: Sequence[int]) -> "array[int]":
    """Return the position of each token of a block in its sample: int32, from 0.

    Samples of 5 and 3 tokens give 0, 1, 2, 3, 4, 0, 1, 2.
    """
    return array("i", chain.from_iterable(map(range, lengths)))


def _offer(waiting: Sequence[int], unread: int, max_tokens: int) -> int:
    """Return the maximum number of blocks that a rank can give in a group before the last group.

    For the arguments, see `next_group`.
    """
    if unread:
        # The blocks are to be full, so there are as many as the waiting tokens fill. (If sources
        # do not share blocks, each source may have one block that is not full.)
        return max(1, sum(waiting) // max_tokens)
    if waiting:
        # The rank waits for ranks that have more to read, so its blocks need not be full.
        return len(waiting)
    return _ANY_NUMBER


def _blocks_keeping_pace(
    waiting: Sequence[int],
    unread: int,
    max_tokens: int,
    count: int,
    greatest: Callable[[int], int],
    sources: Sequence[object],
) -> Blocks:
    """Return `count` blocks, of fewer samples if the rank would get too far ahead of others.

    There are fewer blocks only if there are fewer samples than blocks. For the arguments, see
    `next_group`; `count` is the number on which the ranks have agreed.
    """
    samples_left = len(waiting) + unread
    blocks = fill(waiting, max_tokens, min(count, len(waiting)), sources)
    taken = sum(map(len, blocks))

    # The rank keeps a reserve for the groups to come. But it gives at least `count` samples, so
    # that no block is empty.
    most_left = greatest(samples_left - taken)
    reserve = most_left - most_left // _MAX_LEAD_DIVISOR
    max_taken = max(count, samples_left - reserve)
    if taken <= max_taken:
        return blocks
    return fill(waiting[:max_taken], max_tokens, count, sources)


def _check(lengths: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError if a length is not from 1 to `max_tokens`."""
    for length in (min(lengths, default=1), max(lengths, default=1)):
        if not 1 <= length <= max_tokens:
            raise ValueError(
                f"a sample of {length} tokens cannot be packed into blocks of {max_tokens}: "
                f"leave it out, or cut it to 1 to {max_tokens} tokens before"
            )


def _best_fit(lengths: Sequence[int], max_tokens: int, sources: Sequence[object]) -> Blocks:
    """Return blocks made by best fit: each sample, longest first, goes where it fits most tightly.

    The samples of a block come by descending length. Two sources do not share a block. For the
    arguments, see `pack`.
    """
    if not sources:
        return _best_fit_of(range(len(lengths)), lengths, max_tokens)
    by_source: dict[object, list[int]] = {}
    for place in range(len(lengths)):
        by_source.setdefault(sources[place], []).append(place)
    each = (_best_fit_of(places, lengths, max_tokens) for places in by_source.values())
    return [*chain.from_iterable(each)]


def _best_fit_of(places: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Blocks:
    """Return blocks, made by best fit, of the samples at some places.

    Args:
        places: indices into `lengths` of the samples to pack.
        lengths: number of tokens of each sample.
        max_tokens: maximum number of tokens in a block.
    """
    longest_first = sorted(places, key=lengths.__getitem__, reverse=True)
    blocks: Blocks = []
    rooms: list[tuple[int, int]] = []  # pairs of free tokens and the block's number, sorted
    for place in longest_first:
        length = lengths[place]
        tightest = bisect_left(rooms, (length, 0))  # the block with the least room that suffices
        if tightest < len(rooms):
            room, number = rooms.pop(tightest)
        else:
            room = max_tokens
            number = len(blocks)
            blocks.append([])

        blocks[number].append(place)
        insort(rooms, (room - length, number))
    return blocks


def _split(blocks: Blocks, least: int) -> Blocks:
    """Return at least `least` blocks, as far as there are samples, by halving the largest.

    The largest is the block with the most samples. Each half gets every second one of them: by
    descending length, so that both halves have about as many tokens.
    """
    by_samples = sorted(blocks, key=len)
    while 0 < len(by_samples) < least and len(by_samples[-1]) > 1:
        largest = by_samples.pop()
        insort(by_samples, largest[::2], key=len)
        insort(by_samples, largest[1::2], key=len)
    return [sorted(block) for block in by_samples]
