"""buffer.py: what replaces `bytes` anywhere, copies nothing, and stays right."""

import io
import mmap
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate, default_convert
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from shardcache.shared.tarindex.tables import Samples
from shardcache_client.sharing.buffer import MIN_BUFFER_BYTES, Buffer, collate_buffers
from shardcache_client.sharing.value_forms import Form, ValuesBySize, forms_of

CONTENT = bytes(range(256)) * 64

# torch says it of `bytes`, too.
read_only_is_fine = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.fixture
def mapped(tmp_path: Path) -> mmap.mmap:
    """A mapped file with CONTENT."""
    path = tmp_path / "shard.tar"
    path.write_bytes(CONTENT)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


@pytest.fixture
def value(mapped: mmap.mmap) -> Buffer:
    """A slice of it, as a sample has it."""
    value = Buffer.over(mapped)[512:1536]
    assert type(value) is Buffer
    return value


@pytest.fixture
def collating() -> Iterator[None]:
    """torch's map of collate functions with ours in it, as it was afterwards."""
    default_collate_fn_map[Buffer] = collate_buffers
    yield
    del default_collate_fn_map[Buffer]


@read_only_is_fine
def test_buffers_go_where_bytes_go(value: Buffer) -> None:
    """torch, numpy, streams and memoryviews see the bytes, the first two without a copy."""
    expected = CONTENT[512:1536]
    assert bytes(value) == io.BytesIO(value).read() == memoryview(value).tobytes() == expected
    assert len(value) == len(expected)
    tensor = torch.frombuffer(value, dtype=torch.uint8)
    assert tensor.tolist() == list(expected)
    assert tensor.data_ptr() == value.ctypes.data
    assert np.shares_memory(np.frombuffer(value, np.float32), value)


AS_BYTES: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "hash": hash,
    "format": "{}".format,
    "in a tuple": lambda value: value in (b"0", b"17", b" 2.5\n"),
    "in a set": lambda value: value in {b"0", b"17"},
    "key of a dict": lambda value: {b"17": "seventeen"}.get(value),
    "contains bytes": lambda value: b"7" in value,
    "contains a byte": lambda value: 55 in value,
    "contains text": lambda value: "7" in value,
    "equal": lambda value: value == b"17",
    "unequal": lambda value: value != b"17",
    "equal to a bytearray": lambda value: value == bytearray(b"17"),
    "equal to a memoryview": lambda value: memoryview(b"17") == value,
    "on the right": lambda value: (operator.eq(b"17", value), operator.ne(b"17", value)),
    "equal to text": lambda value: value == "17",
    "unequal to text": lambda value: value != "17",
    "equal to None": lambda value: value == None,  # noqa: E711
    "decode": lambda value: value.decode(),
    "str of an encoding": lambda value: str(value, "utf-8"),
    "startswith": lambda value: value.startswith((b"1", b" ")),
    "split": lambda value: value.split(),
    "strip": lambda value: value.strip(),
    "join": lambda value: b"-".join([value, value]),
    "hex": lambda value: value.hex(),
    "match": lambda value: re.fullmatch(rb"\d+", value) is not None,
    "no attribute": lambda value: value.nothing,
}


@pytest.mark.parametrize("name", AS_BYTES)
@pytest.mark.parametrize("content", [b"17", b"0", b" 2.5\n", b"", b"seven", bytes(5000)])
def test_buffers_convert_and_compare_as_bytes_do(content: bytes, name: str) -> None:
    """Results or kinds of error are the same for all that a decoder does with bytes."""

    def outcome(value: Any) -> Any:
        try:
            return AS_BYTES[name](value)
        except Exception as exn:  # noqa: BLE001
            return type(exn)

    value = Buffer.over(b"x" + content + b"x")[1:-1]
    assert outcome(value) == outcome(content)
    assert type(outcome(value)) is type(outcome(content))


@given(st.binary(max_size=40), st.binary(max_size=3))
def test_buffers_equal_what_their_bytes_equal(content: bytes, other: bytes) -> None:
    """Whatever it is compared with, another Buffer too, and of whatever else is made of it."""
    value = Buffer.over(content)
    others = Buffer.over(other)
    assert (value == others) == (content == other)
    assert (value != others) == (content != other)
    assert (others in value) is (other in content)
    assert (value[::2] == bytes(content[::2])) is True
    assert len({value, Buffer.over(bytes(content)), content}) == 1


def test_small_members_are_bytes(mapped: mmap.mmap) -> None:
    """Members that cost less to copy than to refer to are bytes; only large ones are Buffers."""
    values = ValuesBySize(mapped, Buffer.over(mapped))
    small = values[5 : 5 + MIN_BUFFER_BYTES - 1]
    large = values[5 : 5 + MIN_BUFFER_BYTES]
    assert type(small) is bytes
    assert type(large) is Buffer
    assert large == CONTENT[5 : 5 + MIN_BUFFER_BYTES]
    assert large.startswith(small)  # type: ignore[union-attr]
    assert values[7:7] == b""


@pytest.mark.parametrize(
    ("extensions", "expected"),
    [
        (None, [Form.BY_SIZE, Form.BYTES, Form.VIEW, Form.BYTES]),
        ({"jpg", "cls"}, [Form.BY_SIZE, Form.BYTES, Form.BYTES, Form.BYTES]),
        ({"png"}, [Form.BYTES] * 4),
    ],
)
def test_extensions_are_judged_once_per_shard(
    extensions: set[str] | None, expected: list[Form]
) -> None:
    """Only an extension with members of both kinds is decided member by member."""
    tables = Samples(extensions=["jpg", "cls", "json", "txt"])
    for extension, size_bytes in [
        (0, MIN_BUFFER_BYTES),
        (1, MIN_BUFFER_BYTES - 1),
        (2, 9000),
        (0, 0),
        (1, 4),
        (2, 7000),
    ]:
        tables.extension_ids.append(extension)
        tables.starts.append(512)
        tables.ends.append(512 + size_bytes)
    assert forms_of(tables, extensions) == expected
    assert forms_of(Samples(extensions=["jpg"]), extensions) == [Form.BYTES]


def test_buffers_are_read_only(value: Buffer) -> None:
    """Neither through it, nor through a view, nor by asking for leave."""
    for array in (value, np.asarray(value), value.view(np.uint16)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda value: value + 1, id="sum"),
        pytest.param(lambda value: value == 3, id="comparison"),
        pytest.param(lambda value: value.astype(np.float32), id="astype"),
        pytest.param(lambda value: value.reshape(32, 32), id="reshape"),
        pytest.param(lambda value: np.reshape(value, (2, -1)), id="np.reshape"),
        pytest.param(lambda value: value.view(np.float32), id="view"),
        pytest.param(lambda value: value.copy(), id="copy"),
        pytest.param(lambda value: np.concatenate([value, value]), id="concatenate"),
    ],
)
def test_results_are_plain_numpy(value: Buffer, made: Any) -> None:
    """Arrays and tensors made of it equal those made of an array, and are collated alike."""
    result = made(value)
    assert type(result) is np.ndarray
    assert np.array_equal(
        result, made(np.frombuffer(bytes(value), np.uint8)), equal_nan=result.dtype.kind == "f"
    )
    assert type(default_convert(result)) is torch.Tensor


@pytest.mark.usefixtures("collating")
def test_torch_leaves_it_alone_as_it_does_bytes(value: Buffer) -> None:
    """`default_collate` lists them, `default_convert` and pinning pass them on."""
    batch = default_collate([{"jpg": value, "cls": 1}, {"jpg": value, "cls": 2}])
    assert batch["jpg"][0] is batch["jpg"][1] is value
    assert batch["cls"].tolist() == [1, 2]
    assert default_convert({"jpg": value})["jpg"] is value
    assert pin_memory([{"jpg": value}])[0]["jpg"] is value  # type: ignore[no-untyped-call]
