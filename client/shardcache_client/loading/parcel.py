"""A chunk of samples on its way from a worker process.

It is one block of shared memory, however many arrays the samples have.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


class _Pickler(ForkingPickler):
    """Puts the memory of arrays and tensors aside.

    torch's own way takes a file descriptor for each tensor.
    """

    def __init__(self, file: io.BytesIO, aside: list[pickle.PickleBuffer]) -> None:
        # By position, as it takes no keywords: protocol, fix_imports, buffer_callback.
        super().__init__(file, 5, True, aside.append)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            # numpy has no bits for a sign or a conjugation yet to be computed.
            return torch.from_numpy, (value.resolve_conj().resolve_neg().numpy(),)
        return NotImplemented


# The types of values that numpy has as well.
_OF_NUMPY = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if numpy can have the tensor's memory, and nothing else is to be kept of it."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and not tensor.requires_grad and tensor.dtype in _OF_NUMPY


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value as bytes of its structure, and the memory of its arrays one after another.

    Attributes:
        head: the structure.
        memory: uint8; None if there are no arrays.
        sizes: of each array, in bytes.
    """

    head: bytes
    memory: torch.Tensor | None
    sizes: Sequence[int]

    @classmethod
    def of(cls, value: Any) -> Parcel:
        """Pack a value in a worker process. Raises what pickling raises."""
        file = io.BytesIO()
        aside: list[pickle.PickleBuffer] = []
        _Pickler(file, aside).dump(value)
        buffers = [each.raw() for each in aside]
        sizes = [each.nbytes for each in buffers]
        memory = None
        if sum(sizes):
            # Shared from the start, as by torch's `default_collate`: a queue would copy any other.
            storage = torch.UntypedStorage._new_shared(sum(sizes))  # type: ignore[no-untyped-call]  # noqa: SLF001
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            into = memory.numpy().data
            start = 0
            for size, buffer in zip(sizes, buffers, strict=True):
                into[start : start + size] = buffer
                start += size
        return cls(file.getvalue(), memory, sizes)

    def value(self) -> Any:
        """Unpack the value, whose arrays share the parcel's memory."""
        # Empty arrays have memory that can be written, too, as torch warns of any other.
        whole = memoryview(bytearray()) if self.memory is None else self.memory.numpy().data
        buffers = [whole[start:stop] for start, stop in pairwise(accumulate(self.sizes, initial=0))]
        return pickle.loads(self.head, buffers=buffers)
