"""What the scheduler knows of each origin: its limit, its link, its part times and its load."""

from dataclasses import dataclass, field
from typing import NamedTuple

from shardcache.fetch.aimd import Aimd
from shardcache.fetch.hedging import Hedging
from shardcache.fetch.link import Link


@dataclass(frozen=True, slots=True)
class OriginLoad:
    """Load on one origin, for the status page.

    Attributes:
        connections: requests in flight, paused ones excluded.
        limit: the most of them that the origin accepts at present.
        throttled: how often that limit was lowered.
    """

    name: str
    connections: int
    limit: int
    throttled: int


class Limit(NamedTuple):
    """A limit on downloads, in words; `holds` is True while one waits because of it."""

    name: str
    text: str
    holds: bool


@dataclass(slots=True, eq=False)
class OriginState:
    """State of one origin, and what is known of it.

    Attributes:
        held: number of slots that its requests hold.
        cleared: True while claims that no reader waits for are paused for one that is `alone`.
    """

    name: str
    aimd: Aimd
    hedging: Hedging
    link: Link = field(default_factory=Link)
    held: int = 0
    cleared: bool = False

    @property
    def usable(self) -> int:
        """Connections that it accepts and its link can use."""
        return min(self.aimd.limit, self.link.connections or self.aimd.limit)

    @property
    def is_full(self) -> bool:
        """True if it accepts no further request, or its link is cleared and has no room."""
        if self.cleared:
            return self.held >= self.usable
        return self.held >= self.aimd.limit

    @property
    def load(self) -> OriginLoad:
        """Its present load."""
        return OriginLoad(self.name, self.held, self.aimd.limit, self.aimd.generation)
