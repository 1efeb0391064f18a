"""A chunk of samples on its way from a worker process.

It takes one block of shared memory, however many arrays the samples have.
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

_PICKLE_PROTOCOL = 5  # the first with buffers outside of the pickle


class _Pickler(ForkingPickler):
    """Pickles a value without the memory of its arrays and tensors, which goes into `buffers`.

    torch's own way takes a file descriptor for each tensor.
    """

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # By position, as it takes no keywords: protocol, fix_imports, buffer_callback.
        super().__init__(file, _PICKLE_PROTOCOL, True, buffers.append)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            # numpy's arrays have no negation or conjugation that is yet to be computed.
            return torch.from_numpy, (value.resolve_conj().resolve_neg().numpy(),)
        return NotImplemented


# The dtypes that numpy has as well.
_NUMPY_DTYPES = {
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
    """Return True if the tensor's memory and shape, as numpy has them, are all there is to it."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and not tensor.requires_grad and tensor.dtype in _NUMPY_DTYPES


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
        pickle_buffers: list[pickle.PickleBuffer] = []
        _Pickler(file, pickle_buffers).dump(value)
        buffers = [buffer.raw() for buffer in pickle_buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        memory = None
        if sum(sizes):
            # Shared from the start, as by torch's `default_collate`: a queue would copy any other.
            storage = torch.UntypedStorage._new_shared(sum(sizes))  # type: ignore[no-untyped-call]  # noqa: SLF001
            memory = torch.empty(0, dtype=torch.uint8).set_(storage)
            target = memory.numpy().data
            start = 0
            for size, buffer in zip(sizes, buffers, strict=True):
                target[start : start + size] = buffer
                start += size
        return cls(file.getvalue(), memory, sizes)

    def value(self) -> Any:
        """Unpack the value, whose arrays share the parcel's memory."""
        if self.memory is None:
            # For arrays without elements: writable, as torch warns of read-only memory.
            whole = memoryview(bytearray())
        else:
            whole = self.memory.numpy().data
        buffers = [whole[start:stop] for start, stop in pairwise(accumulate(self.sizes, initial=0))]
        return pickle.loads(self.head, buffers=buffers)
