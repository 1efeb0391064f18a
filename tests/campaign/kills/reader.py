"""`python -m campaign.kills.reader SOCKET SEED URL…`: a reader of shards, which goes on until it is killed.

It writes a line once it has its first shard.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from support.programs.raw_session import RawSession

HELD = 3


def main() -> None:
    """Hold up to `HELD` shards at a time, for ever."""
    socket, seed, *urls = sys.argv[1:]
    rng = random.Random(seed)
    reads = [rng.randrange(len(urls)) for _ in range(100_000)]
    with RawSession(Path(socket), job="mortal") as session:
        session.plan(urls, reads)
        held: list[int] = []
        for position in range(len(reads)):
            held.append(session.take(position)["lease"])
            if position == 0:
                print("reading", flush=True)
            if len(held) > rng.randrange(1, HELD + 1):
                session.send(type="release", lease=held.pop(rng.randrange(len(held))))


if __name__ == "__main__":
    main()
