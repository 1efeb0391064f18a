"""Samples cut out of the bytes of a tar by its tables; no tar is parsed here."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import islice
from typing import Any

from shardcache.errors import SampleError
from shardcache.tarindex import Tables, fault_of

Sample = dict[str, Any]


def cut(tables: Tables, tar: mmap.mmap, url: str, start: int, stop: int) -> Iterator[Sample]:
    """Yield the samples from number `start` to `stop`: `{"__key__": str, "__url__": str, extension: bytes…}`.

    The bytes are copies. Raises SampleError in place of a bad sample, which ends the iterator.
    """
    keys = tables.keys
    member_end = tables.member_ends[start - 1] if start else 0
    key_end = tables.key_ends[start - 1] if start else 0
    last = tables.member_ends[stop - 1] if stop else 0
    members = zip(
        map(tables.extensions.__getitem__, tables.extension_ids[member_end:last]),
        tables.starts[member_end:last],
        tables.ends[member_end:last],
        strict=True,
    )
    ends = zip(tables.member_ends[start:stop], tables.key_ends[start:stop], strict=True)
    for number, (next_member_end, next_key_end) in enumerate(ends, start):
        if number in tables.faults:
            raise _sample_error(tables, number, url)
        sample: Sample = {"__key__": keys[key_end:next_key_end].decode("utf-8", "surrogateescape"), "__url__": url}
        for extension, first, end in islice(members, next_member_end - member_end):
            sample[extension] = tar[first:end]
        yield sample
        member_end, key_end = next_member_end, next_key_end


def _sample_error(tables: Tables, number: int, url: str) -> SampleError:
    return SampleError(
        fault_of(tables, number) or "",
        url=url,
        remedy="write the shard again, its samples' members as plain files of different extensions; "
        "until then an on_error handler can skip the sample",
    )
