"""Blocks of tokens cut from a shard's documents, checked against concatenating and cutting."""

import re
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, TokensError
from shardcache_client.reading.leased.shards import MappedShard, ShardPlace
from shardcache_client.samples.sample_view import View
from shardcache_client.samples.token_blocks import TokenBlocks
from support.shards.tars import Documents, blocks_of, make_tar, npy, published, token_tar

URL = "s3://bucket/text-000000.tar"
DOCUMENTS: Any = st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=8)


def mapped(folder: Path, tar: bytes, blocks: TokenBlocks) -> MappedShard:
    """Return a tar as a reader has it."""
    return MappedShard(
        ShardPlace(*published(folder / "shard.tar", tar, URL)), URL, view=View(blocks=blocks)
    )


@given(
    documents=DOCUMENTS,
    length=st.integers(1, 12),
    overlap=st.integers(0, 11),
    end=st.none() | st.integers(0, 9),
    dtype=st.sampled_from([None, "uint8", "uint16", "int64"]),
)
def test_blocks_are_those_of_the_documents_put_end_to_end(
    documents: Documents, length: int, overlap: int, end: int | None, dtype: str | None
) -> None:
    """Their tokens, documents, number and keys; one by one, in order and from the middle on."""
    blocks = TokenBlocks(
        length, member="Tok", dtype=dtype, overlap=min(overlap, length - 1), end=end, documents=True
    )
    expected = blocks_of(documents, length, blocks.overlap, end)
    with TemporaryDirectory() as folder:
        shard = mapped(Path(folder), token_tar(documents, extension="tok", dtype=dtype), blocks)
        with closing(shard):
            found = list(shard.samples())
            middle = len(found) // 2
            cut = shard.cutter()
            alone = [cut(number) for number in range(len(shard))]
            rest = [sample["__key__"] for sample in shard.samples(middle)]
        assert blocks.count(sum(map(len, documents)), len(documents)) == len(found) == len(shard)
    for samples in (found, alone):
        assert [
            (sample["tokens"].tolist(), sample["documents"].tolist()) for sample in samples
        ] == expected
    assert {sample["tokens"].dtype for sample in found} <= {np.dtype(dtype or "uint16")}
    assert [sample["__key__"] for sample in found[middle:]] == rest
    for sample in found:
        key, _, first = sample["__key__"].partition(":")
        document = [*documents[int(key)], *([] if end is None else [end])]
        start = int(first)
        tokens = sample["tokens"].tolist()
        assert document[start:][:length] == tokens[: len(document) - start]


def test_a_block_is_the_readers_own(tmp_path: Path) -> None:
    """It can be written to, and outlives the shard."""
    with closing(mapped(tmp_path, token_tar([[1, 2, 3, 4]]), TokenBlocks(2))) as shard:
        first, second = shard.samples()
    first["tokens"][:] = 9
    assert first["tokens"].tolist() == [9, 9]
    assert second["tokens"].tolist() == [3, 4]
    assert first["__url__"] == URL
    assert "documents" not in first


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (
            [{"npy": b"no array"}],
            "'0' has a member that is not a .npy file of integers in one dimension",
        ),
        ([{"npy": npy([1, 2])[:-1]}], "'0' has 3 bytes of tokens instead of 4"),
        (
            [{"npy": npy([])}, {"npy": npy([1])}, {"npy": npy([1], "int32")}],
            "'2' has int32, those before uint16",
        ),
        ([{"npy": npy([[1, 2], [3, 4]])}], "'0' has a member that is not"),  # type: ignore[list-item]
        ([{"npy": npy([1], "float32")}], "'0' has a member that is not"),
        ([{"npy": npy([1], ">u2")}], "'0' has a member that is not"),
    ],
)
def test_members_that_hold_no_token_array_are_errors(
    tmp_path: Path, members: list[dict[str, bytes]], reason: str
) -> None:
    """It names the sample: a shard without some of its tokens would give other blocks."""
    tar = make_tar({"__key__": str(number)} | sample for number, sample in enumerate(members))
    with pytest.raises(TokensError, match=re.escape(reason)) as caught:
        mapped(tmp_path, tar, TokenBlocks(2))
    assert caught.value.url == URL


def test_plain_arrays_of_odd_sizes_and_duplicate_members_are_errors(tmp_path: Path) -> None:
    """So that nothing is left out in silence."""
    odd = make_tar([{"__key__": "a", "tok": b"12"}, {"__key__": "b", "tok": b"123"}])
    with pytest.raises(
        TokensError, match="'b' has 3 bytes of tokens, which is not a multiple of 2"
    ):
        mapped(tmp_path, odd, TokenBlocks(2, member="tok", dtype="uint16"))
    twice = make_tar(
        [{"__key__": "a", "npy": npy([1])}, {"__key__": "b", "npy": npy([1]), "NPY": npy([2])}]
    )
    with pytest.raises(TokensError, match="'b' has two members with the extension 'npy'"):
        mapped(tmp_path, twice, TokenBlocks(2))
    with pytest.raises(ConfigError, match="the end token 65536 is too large for uint16"):
        mapped(tmp_path, token_tar([[1]]), TokenBlocks(2, end=65536))


@pytest.mark.parametrize(
    "arguments",
    [
        {"length": 0},
        {"length": 4, "overlap": 4},
        {"length": 4, "overlap": -1},
        {"length": 4, "dtype": "float32"},
        {"length": 4, "member": ".npy"},
        {"length": 4, "end": -1},
    ],
)
def test_arguments_that_make_no_blocks_are_refused(arguments: dict[str, Any]) -> None:
    """The constructor refuses them."""
    with pytest.raises(ConfigError):
        TokenBlocks(**arguments)
