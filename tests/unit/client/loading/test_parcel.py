"""parcel.py: any chunk arrives equal from a worker, in one block of shared memory."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardcache_client.loading.parcel import Parcel
from support.programs.guard import GUARD_S

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j, 3j]),
    "conjugated": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "without values": lambda: torch.empty(0, 4),
    "single": lambda: torch.tensor(7),
    "transposed": lambda: torch.arange(6).reshape(2, 3).T,
    "strided": lambda: torch.arange(10)[::3],
    "expanded": lambda: torch.tensor([[1], [2]]).expand(2, 3),
    "with gradient": lambda: torch.ones(2, requires_grad=True),
    "sparse": lambda: torch.eye(3).to_sparse(),
}

VALUES: list[Any] = [
    [],
    None,
    {"bytes": b"abc", "empty": b"", "text": "é", "number": 5},
    [{"nested": ({"deep": [b"x" * 5000]},)}, bytearray(b"abc")],
]


def send(value: Any, into: Any, is_received: Any) -> None:
    """Pack a value, send it to another process, and stay until that has it."""
    into.put(Parcel.of(value))
    is_received.wait()


def sent(value: Any) -> Any:
    """Return a value as it arrives from a worker process."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    is_received = context.Event()
    worker = context.Process(target=send, args=(value, queue, is_received))
    worker.start()
    try:
        received: Any = queue.get(timeout=GUARD_S).value()
    finally:
        is_received.set()
        worker.join()
    return received


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_of_any_kind_arrives(kind: str) -> None:
    """With its type, shape and values, and whether it has a gradient."""
    tensor = TENSORS[kind]()
    arrived = Parcel.of([tensor, tensor]).value()[1]
    assert arrived.dtype == tensor.dtype
    assert arrived.shape == tensor.shape
    assert arrived.requires_grad == tensor.requires_grad
    assert arrived.layout == tensor.layout
    assert torch.equal(arrived.to_dense().detach(), tensor.to_dense().detach())


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_value_without_arrays_arrives(value: Any) -> None:
    """Equal, of the same types, and without shared memory."""
    parcel = Parcel.of(value)
    arrived = parcel.value()
    assert arrived == value
    assert type(arrived) is type(value)
    assert parcel.memory is None


def test_arrays_and_tensors_arrive_from_a_worker_process() -> None:
    """All in one block of memory, whatever their order and alignment; they can be written."""
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    value = [
        {"odd": torch.arange(3, dtype=torch.uint8), "wide": torch.arange(4.0)},
        {"array": array, "f": array.T},
    ]
    first, second = sent(value)
    assert first["odd"].tolist() == [0, 1, 2]
    assert first["wide"].tolist() == [0, 1, 2, 3]
    assert np.array_equal(second["array"], array)
    assert np.array_equal(second["f"], array.T)
    first["wide"] += 1
    assert first["wide"].tolist() == [1, 2, 3, 4]


def test_many_tensors_take_one_file_descriptor() -> None:
    """Of a whole chunk; torch's own way takes one for each."""
    parcel = Parcel.of([torch.ones(2) for _ in range(1000)])
    assert isinstance(parcel.memory, torch.Tensor)
    assert parcel.memory.is_shared()
    assert parcel.memory.nbytes == 8000


def test_value_that_cannot_be_pickled_is_an_error() -> None:
    """Of the worker that packs it, with what pickle says."""
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        Parcel.of([lambda: None])
