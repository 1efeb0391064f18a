"""A chunk of samples on its way from a worker process to the trainer.

A parcel takes one block of shared memory, however many arrays the samples have. torch's own way
takes a file descriptor for each tensor.
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

_PICKLE_PROTOCOL = 5  # the first protocol with buffers outside of the pickle


class _Pickler(ForkingPickler):
    """Pickles a value without the memory of its arrays and tensors, which goes into `buffers`."""

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        # The base class takes no keywords. The arguments are file, protocol, fix_imports (True is
        # the default) and buffer_callback.
        super().__init__(file, _PICKLE_PROTOCOL, True, buffers.append)

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value, where it differs from the default; pickle calls this.

        A tensor is pickled as the numpy array of its memory, which pickle puts into `buffers`.
        """
        if type(value) is torch.Tensor and _is_plain(value):
            # A tensor may be a lazy negation or conjugate of its memory. numpy has no such arrays,
            # so the negation or conjugate is computed here.
            array = value.resolve_conj().resolve_neg().numpy()
            return torch.from_numpy, (array,)
        return NotImplemented


# The dtypes of torch that numpy has as well.
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
    """Return True if a numpy array of the tensor's memory and shape represents the tensor fully."""
    is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return is_dense and not tensor.requires_grad and tensor.dtype in _NUMPY_DTYPES


@dataclass(frozen=True, slots=True)
class Parcel:
    """A value as a pickle of its structure, and the memory of its arrays one after another.

    Attributes:
        head: the pickle, without the arrays' memory.
        memory: the bytes of all arrays, as a tensor of uint8; None if there are no such bytes.
        sizes: number of bytes of each array.
    """

    head: bytes
    memory: torch.Tensor | None
    sizes: Sequence[int]

    @classmethod
    def of(cls, value: Any) -> Parcel:
        """Pack a value in a worker process. Raises any error of pickling the value."""
        file = io.BytesIO()
        pickle_buffers: list[pickle.PickleBuffer] = []
        _Pickler(file, pickle_buffers).dump(value)
        buffers = [buffer.raw() for buffer in pickle_buffers]
        sizes = [buffer.nbytes for buffer in buffers]
        memory = None
        if any(sizes):
            memory = _shared_memory(sum(sizes))
            target = memory.numpy().data
            start = 0
            for size, buffer in zip(sizes, buffers, strict=True):
                target[start : start + size] = buffer
                start += size
        return cls(file.getvalue(), memory, sizes)

    def value(self) -> Any:
        """Unpack the value, whose arrays share the parcel's memory."""
        if self.memory is None:
            # All arrays are empty. Their memory must be writable, because torch warns of read-only
            # memory.
            whole = memoryview(bytearray())
        else:
            whole = self.memory.numpy().data
        buffers = [whole[start:stop] for start, stop in pairwise(accumulate(self.sizes, initial=0))]
        return pickle.loads(self.head, buffers=buffers)


def _shared_memory(size_bytes: int) -> torch.Tensor:
    """Return a tensor of bytes in memory that other processes can map.

    torch's `default_collate` uses such memory, too. A queue would copy memory that is not shared.
    """
    storage = torch.UntypedStorage._new_shared(size_bytes)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8).set_(storage)
