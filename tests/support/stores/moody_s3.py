"""A store of ten thousand small shards that is in a bad mood now and then, in a process of its own.

The process ends with its standard input. Each line there is the share of answers that go wrong from then on; the
answer to it is a line with how many did so far.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Self

from support.shards.tars import Sample, make_tar, random_samples
from support.stores import aws_env
from support.stores.faulty_s3 import BUCKET, Fault, FaultyS3

SHARDS = 10_000
SAMPLES = 3
_SIZES = {"bin": 2_000}

_OF_HEADERS = (Fault.SLOW_DOWN, Fault.SERVER_ERROR, Fault.SILENCE)
_OF_BODIES = (Fault.STALL, Fault.RESET, Fault.TRUNCATE, Fault.WRONG_RANGE, Fault.IGNORE_RANGE, Fault.WRONG_ETAG)
_OF_GETS = (*_OF_HEADERS, *_OF_BODIES, Fault.CORRUPT)

_TESTS = Path(__file__).parents[2]


def url(number: int) -> str:
    """Return the url of a shard."""
    return f"s3://{BUCKET}/{number:05d}.tar"


def samples(number: int) -> list[Sample]:
    """Return what is in a shard; keys continue from one shard to the next."""
    return random_samples(SAMPLES, _SIZES, first=number * SAMPLES)


@lru_cache(maxsize=2_048)
def body(number: int) -> bytes:
    """Return a shard's bytes."""
    return make_tar(samples(number))


class _Shards(Mapping[str, bytes]):
    """All shards by their keys, made when they are asked for."""

    def __getitem__(self, key: str) -> bytes:
        return body(int(key.removesuffix(".tar")))

    def __iter__(self) -> Iterator[str]:
        return (f"{number:05d}.tar" for number in range(SHARDS))

    def __len__(self) -> int:
        return SHARDS


@dataclass(slots=True)
class MoodyS3(FaultyS3):
    """Breaks a share of its answers, in every way that a retry mends."""

    share: float = 0.0  # of them
    broken: Counter[str] = field(default_factory=Counter)  # how many were
    _dice: random.Random = field(default_factory=lambda: random.Random(0))

    def _fault(self, method: str, key: str, start: int | None) -> Fault | None:
        self.seen.clear()  # ten minutes of requests are of no use to anyone
        if self._dice.random() >= self.share:
            return None
        fault = self._dice.choice(_OF_HEADERS if method == "HEAD" else _OF_GETS)
        self.broken[fault.name.lower()] += 1
        return fault


class Store:
    """One in a process of its own; a context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=_TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.env = aws_env(self._answer())  # what a daemon needs to find it
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer: str = json.loads(self._process.stdout.readline())
        return answer

    def break_share(self, share: float) -> int:
        """Let that share of answers go wrong from now on; return how many did so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{share}\n")
        return int(self._answer())


async def _serve() -> None:
    logging.disable()  # who was cut off is no news here
    async with MoodyS3(_objects=_Shards(), crc32c=True) as store:  # type: ignore[arg-type]
        print(json.dumps(store.endpoint_url), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            store.share = float(line)
            print(json.dumps(store.broken.total()), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
