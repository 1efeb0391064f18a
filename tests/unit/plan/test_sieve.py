"""SIEVE against the algorithm as its paper prints it."""

from hypothesis import given
from hypothesis import strategies as st

from shardcache.plan.sieve import Sieve
from support.cases import examples


class Paper:
    """Algorithm 1 of the paper over a list, newest last."""

    def __init__(self) -> None:
        self.queue: list[list[object]] = []
        self.hand = 0

    def add(self, key: str) -> None:
        self.queue.append([key, False])

    def visit(self, key: str) -> None:
        next(entry for entry in self.queue if entry[0] == key)[1] = True

    def discard(self, key: str) -> None:
        """Remove from anywhere; the hand stays between the same neighbours."""
        at = next((at for at, entry in enumerate(self.queue) if entry[0] == key), None)
        if at is not None:
            self.remove(at)

    def remove(self, at: int) -> None:
        """Take an entry out; a hand that has come past the newest is before the oldest again."""
        del self.queue[at]
        self.hand -= at < self.hand
        self.hand = self.hand if self.hand < len(self.queue) else 0

    def evict(self) -> str:
        while True:
            entry = self.queue[self.hand]
            if not entry[1]:
                self.remove(self.hand)
                return str(entry[0])
            entry[1] = False
            self.hand = (self.hand + 1) % len(self.queue)


@examples(200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["use", "evict", "discard"]), st.sampled_from("abcdefgh")),
        max_size=80,
    )
)
def test_the_order_is_that_of_the_paper(steps: list[tuple[str, str]]) -> None:
    """The published algorithm evicts the same key, whatever comes, is used and goes."""
    sieve = Sieve()
    paper = Paper()
    here = set[str]()
    for step, key in steps:
        if step == "discard":
            sieve.gone(key)
            paper.discard(key)
            here.discard(key)
        elif step == "use" and key in here:
            sieve.used(key)
            paper.visit(key)
        elif step == "use":
            sieve.arrived(key)
            paper.add(key)
            here.add(key)
        elif here:
            gone = next(sieve.victims())
            sieve.gone(gone)
            assert gone == paper.evict()
            here.remove(gone)


def test_asking_for_victims_moves_nothing() -> None:
    """A question alone moves nothing: the same key goes first, and all others are named too."""
    sieve = Sieve()
    for key in "abc":
        sieve.arrived(key)
    sieve.used("a")
    assert list(sieve.victims()) == list(sieve.victims()) == ["b", "c", "a"]
