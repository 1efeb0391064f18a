"""How the bytes of a shard come from a DataLoader's worker to its trainer without being copied.

Between processes a Buffer is pickled as a reference: which file, from where to where. The receiver maps the same file,
once for as long as any Buffer of it lives there. Until it has done so the file must stay, so the worker keeps its own
map until it holds no Buffer of the shard any more, in whatever queue, and has a receipt for every message in which one
was sent. What is mapped by anybody the cache leaves in place; that the worker keeps its lease as long saves it trying.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Collection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from shardcache.tarindex import Tables
from shardcache_client.reading.cutting import Column, Slices, as_bytes
from shardcache_client.reading.reader import map_file, unreadable
from shardcache_client.sharing.buffers import WORTH_IT_BYTES, Buffer, Form, Values, forms, span
from shardcache_client.sharing.receipts import Receipt, Receipts

_BY_VALUE = 4  # the protocol from which on pickles hold large bytes well; out-of-band buffers are not for pipes

_WHOLES: weakref.WeakValueDictionary[tuple[str, int], Buffer] = weakref.WeakValueDictionary()
"""The shards that this process received something of, as long as it holds on to any of it."""


class Handover:
    """Shared by the process that will receive, the one that made it or says so, and the workers that it starts.

    In that process, and after any other pickling, Buffers are sent by value: nobody is known to be able to follow a
    reference.

    Args:
        extensions: of the members that are not copied; None for all.

    Attributes:
        receipts: what messages carry along.
    """

    def __init__(self, extensions: Collection[str] | None = None) -> None:
        self.extensions = extensions
        self.receipts = Receipts()
        self._lent: set[Loan] = set()

    def __repr__(self) -> str:
        return f"Handover({self.receipts!r})"

    def lend(self, mapped: mmap.mmap, path: Path | None, inode: int, url: str) -> Loan:
        """Return what gives out a mapped file's bytes and knows when it may be let go.

        Args:
            mapped: the whole of it, read-only.
            path: where another process finds the file as long as this one has it mapped; None where it finds it
                nowhere, and gets its bytes by value.
            inode: by which it is known again.
            url: of the shard, for errors.
        """
        return Loan(self, mapped, path, inode, url)

    def keep(self, loan: Loan) -> None:
        """Hold a loan until it is settled: the epoch may be over while its last messages are on their way."""
        self._lent.add(loan)

    def settle(self) -> None:
        """Let go of what has arrived: before a shard is waited for that may need the room, and meanwhile."""
        self._lent = {loan for loan in self._lent if not loan.settled()}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lent": set()}


class Loan:
    """One mapped shard, and what of it is still on its way to other processes."""

    def __init__(self, handover: Handover, mapped: mmap.mmap, path: Path | None, inode: int, url: str) -> None:
        self._handover = handover
        self._map = mapped
        self._file = (os.fspath(path or ""), inode, len(mapped), url)
        self._expected: list[Receipt] = []
        self._whole: weakref.ref[Buffer] | None = None
        self._forms: list[Form] | None = None
        self._sender_pid = os.getpid() if handover.receipts.inherited and path is not None else None

    def __repr__(self) -> str:
        return f"Loan({self._file[0]!r}, expected={len(self._expected)})"

    def whole(self) -> Buffer:
        """Return the shard's bytes, to cut samples from. Every Buffer that is cut keeps the loan open."""
        whole = self._living()
        if whole is None:
            whole = Buffer.over(self._map)
            whole.lender = self
            self._whole = weakref.ref(whole)
            if self.refers:
                self._handover.keep(self)
        return whole

    def columns(self, tables: Tables) -> list[Column]:
        """Return how each extension's values are sliced: those that are copied do not keep the loan open."""
        if self._forms is None:
            self._forms = forms(tables, self._handover.extensions)
        if Form.VIEW not in self._forms and Form.BY_SIZE not in self._forms:
            return as_bytes(tables.extensions, self._map)
        whole = self.whole()
        slices: dict[Form, Slices] = {Form.BYTES: self._map, Form.BY_SIZE: Values(self._map, whole)}
        slices[Form.VIEW] = whole  # type: ignore[assignment]  # numpy's stubs do not know that slices are Buffers
        return [(extension, slices[form]) for extension, form in zip(tables.extensions, self._forms, strict=True)]

    @property
    def refers(self) -> bool:
        """Whether its Buffers are sent as references: by whoever borrowed it, if its parent can follow."""
        return os.getpid() == self._sender_pid

    def settled(self) -> bool:
        """Whether all that was handed over has arrived, so that lease and map may go. Asks nobody, waits for nothing.

        Asked of a reader that has let go of `whole()` and of the last sample.
        """
        if not self.refers:
            return True  # the Buffers keep the map by themselves, and nobody has to find the file
        # In this order: as long as a Buffer lives, it may be sent.
        if self._living() is not None:
            return False
        self._expected = [receipt for receipt in self._expected if not self._handover.receipts.came(receipt)]
        return not self._expected

    def _living(self) -> Buffer | None:
        return None if self._whole is None else self._whole()

    def __reduce__(self) -> tuple[Any, ...]:
        # Once for each message: all Buffers of it share what their loan was pickled as.
        receipt = self._handover.receipts.expect()
        self._expected.append(receipt)
        return _receive, (receipt, *self._file)


def _reduce(value: Buffer) -> tuple[Any, ...]:
    place = span(value) if value.size >= WORTH_IT_BYTES else None
    if place is not None:
        whole, start, stop = place
        if isinstance(whole.lender, Loan) and whole.lender.refers:
            return _cut, (whole.lender, start, stop)
    by_value: tuple[Any, ...] = value.__reduce_ex__(_BY_VALUE)
    return by_value


def _cut(whole: Buffer, start: int, stop: int) -> Any:
    return whole[start:stop]


def _receive(receipt: Receipt, path: str, inode: int, size_bytes: int, url: str) -> Buffer:
    """Map the file, if it is not mapped already, and say so; return the whole of it.

    Raises ShardGoneError when it is not there, CacheDirError when it may not be read, ConfigError when the sender
    cannot be told.
    """
    whole = _WHOLES.get((path, inode))
    if whole is None:
        try:
            whole = Buffer.over(map_file(Path(path), size_bytes, inode, in_order=False))
        except OSError as exn:
            raise unreadable(exn, Path(path), url) from exn
        _WHOLES[path, inode] = whole
    receipt.hand_in()
    return whole


# What a DataLoader's queues pickle with. Any other pickle may go anywhere, and takes the bytes along.
ForkingPickler.register(Buffer, _reduce)
