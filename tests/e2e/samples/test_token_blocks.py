"""Blocks of tokens from a real daemon: by ranks, workers and numbers, resumed and mixed."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardcache.errors import ConfigError, CountMismatchError, TokensError
from shardcache.writing import ShardWriter
from shardcache_client.dataset import Mixture, ShardDataset
from shardcache_client.reader import ShardReader
from shardcache_client.samples.token_blocks import TokenBlocks
from support.cases import examples
from support.programs.cli import shardcache
from support.programs.daemon import Daemon
from support.shards.tars import Documents, blocks_of, token_tar, write_token_shards

SIZES = ((5, 0, 17, 3, 40), (1, 1), (33, 8, 8, 21), (), (64, 2, 2))
LENGTH = 8
Block = tuple[int, ...]
fresh = count()


def numbered(sizes: Sequence[Sequence[int]]) -> list[Documents]:
    """Return documents of these sizes, in which each token is its number in the dataset."""
    tokens = count()
    return [[list(islice(tokens, size)) for size in shard] for shard in sizes]


def expected(shards: Sequence[Documents], length: int, overlap: int = 0) -> list[Block]:
    """Return all blocks in order."""
    return [
        tuple(tokens) for documents in shards for tokens, _ in blocks_of(documents, length, overlap)
    ]


def taken(samples: Iterable[dict[str, Any]]) -> list[Block]:
    """Return the tokens of samples, or of batches of them."""
    return [tuple(row) for sample in samples for row in np.atleast_2d(sample["tokens"]).tolist()]


@pytest.fixture(scope="module")
def index(folder: Path) -> str:
    """The url of an index of five shards, one of which is empty and one too short for a block."""
    return write_token_shards(folder / "text", numbered(SIZES))


@examples(15)
@given(
    sizes=st.lists(st.lists(st.integers(0, 30), max_size=5), min_size=1, max_size=5),
    length=st.integers(1, 9),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(0, 6),
    shuffle=st.booleans(),
)
@pytest.mark.slow
def test_ranks_read_each_block_once_and_resume_on_others(
    folder: Path,
    daemon: Daemon,
    sizes: list[list[int]],
    length: int,
    ranks: tuple[int, int],
    steps: int,
    shuffle: bool,
) -> None:
    """Together they give what concatenating and cutting does, though ranks change midway."""
    shards = numbered(sizes)
    blocks = expected(shards, length)
    url = write_token_shards(folder / f"any-{next(fresh)}", shards)

    def readers(number: int) -> list[ShardReader]:
        options: dict[str, Any] = {
            "shuffle": shuffle,
            "shuffle_window": 2,
            "seed": 3,
            "socket": daemon.socket,
        }
        tokens = TokenBlocks(length)
        return [
            ShardReader(url, tokens=tokens, even=None, rank=rank, world_size=number, **options)
            for rank in range(number)
        ]

    if not blocks:
        with pytest.raises(ConfigError, match="contain no samples"):
            readers(1)
        return
    before = readers(ranks[0])
    # A first sample whose iterator is dropped would be a look.
    iterators = [iter(reader) for reader in before]
    read = [taken(islice(iterator, steps)) for iterator in iterators]
    states = [reader.state_dict() for reader in before]
    after = readers(ranks[1])
    for reader in after:
        reader.load_state_dict(states)
        if reader.epoch == 0:  # else the state is that of the epoch's end
            read.append(taken(reader))
    assert Counter(chain.from_iterable(read)) == Counter(blocks)
    even: dict[str, Any] = {"tokens": TokenBlocks(length), "world_size": 3, "socket": daemon.socket}
    assert len({len(ShardReader(url, rank=rank, **even)) for rank in range(3)}) == 1


@pytest.mark.slow
def test_loader_resumes_within_a_document(index: str, daemon: Daemon) -> None:
    """With workers, from its state; each block is a row of a tensor."""
    blocks = expected(numbered(SIZES), LENGTH, overlap=1)

    def loader() -> Any:
        dataset = ShardDataset(
            index,
            shuffle=True,
            seed=5,
            tokens=TokenBlocks(LENGTH, overlap=1),
            batch_size=2,
            socket=daemon.socket,
        )
        assert len(dataset) == len(blocks)
        return dataset.loader(num_workers=2)

    whole = list(loader())
    assert {batch["tokens"].dtype for batch in whole} == {torch.uint16}
    assert sorted(taken(whole)) == blocks
    for batches in (3, 6):
        first = loader()
        resumed = loader()
        begun = list(islice(first, batches))
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert taken([*begun, *resumed]) == taken(whole)


@pytest.mark.slow
def test_blocks_of_two_datasets_are_mixed(index: str, folder: Path, daemon: Daemon) -> None:
    """By weight, with state; each source has blocks of its own."""
    other = write_token_shards(folder / "code", [[[9] * 50, [8] * 51]])

    def mixture() -> Mixture:
        web, code = (
            ShardDataset(url, tokens=TokenBlocks(length), socket=daemon.socket, batch_size=2)
            for url, length in ((index, LENGTH), (other, 5))
        )
        return Mixture({"web": web, "code": code}, {"web": 1, "code": 1}, samples_per_epoch=40)

    whole = list(mixture())
    assert Counter(sample["__source__"] for sample in whole) == {"web": 20, "code": 20}
    assert {(sample["__source__"], len(sample["tokens"])) for sample in whole} == {
        ("web", LENGTH),
        ("code", 5),
    }
    first = mixture()
    resumed = mixture()
    begun = list(islice(first, 13))
    resumed.load_state_dict(first.state_dict())
    assert [sample["__key__"] for sample in [*begun, *resumed]] == [
        sample["__key__"] for sample in whole
    ]


def test_a_state_of_other_blocks_is_refused(index: str, daemon: Daemon) -> None:
    """Its numbers would mean other places; and that of documents, too."""
    reader = ShardReader(index, tokens=TokenBlocks(LENGTH), socket=daemon.socket)
    for others in (TokenBlocks(LENGTH, documents=True), TokenBlocks(LENGTH, overlap=1), None):
        with pytest.raises(ConfigError, match="another dataset"):
            reader.load_state_dict(
                ShardReader(index, tokens=others, socket=daemon.socket).state_dict()
            )


@pytest.mark.parametrize(("member", "dtype"), [("npy", None), ("tok", "uint32")])
def test_the_index_command_counts_tokens(
    folder: Path, daemon: Daemon, tmp_path: Path, member: str, dtype: str | None
) -> None:
    """Of .npy files and of plain arrays; without these numbers there are no blocks."""
    shards = numbered(SIZES[:3])
    urls = []
    for number, documents in enumerate(shards):
        path = folder / f"{member}-{number}.tar"
        path.write_bytes(token_tar(documents, extension=member, dtype=dtype))
        urls.append(str(path))
    blocks = TokenBlocks(LENGTH, member=member, dtype=dtype)
    plain = tmp_path / "plain.json"
    counted = tmp_path / "tokens.json"
    assert shardcache("index", *urls, "-o", plain, socket=daemon.socket).code == 0
    with pytest.raises(
        ConfigError, match="the tokens of 3 of 3 shards were never counted"
    ) as caught:
        ShardReader(plain, tokens=blocks, socket=daemon.socket)
    assert "--tokens" in caught.value.remedy
    option = member if dtype is None else f"{member}:{dtype}"
    ran = shardcache(
        "index", *urls, "-o", counted, "--tokens", option, "--json", socket=daemon.socket
    )
    assert ran.code == 0, ran.err
    rows = json.loads(counted.read_text())["shardlist"]
    assert [row["ntokens"] for row in rows] == [sum(map(len, documents)) for documents in shards]
    assert [row["nsamples"] for row in rows] == list(map(len, shards))
    assert taken(ShardReader(counted, tokens=blocks, socket=daemon.socket)) == expected(
        shards, LENGTH
    )


def test_an_index_with_other_numbers_is_an_error(folder: Path, daemon: Daemon) -> None:
    """Blocks that the index has not counted would not be dealt."""
    url = write_token_shards(folder / "wrong", [[[1, 2, 3, 4, 5]]])
    path = folder / "wrong" / "index.json"
    path.write_text(path.read_text().replace('"ntokens": 5', '"ntokens": 6'))
    with pytest.raises(
        CountMismatchError,
        match="the shard holds 2 blocks of tokens, but the dataset's list says 3",
    ):
        list(ShardReader(url, tokens=TokenBlocks(2), socket=daemon.socket))
    with pytest.raises(TokensError, match=r"not a \.npy file"):
        list(ShardReader(url, tokens=TokenBlocks(2, member="txt"), socket=daemon.socket))


def test_the_writer_counts_tokens(folder: Path, daemon: Daemon) -> None:
    """So that what it has written can be read at once; a bad array is an error with its key."""
    shards = numbered(((9, 4, 30), (12, 1)))
    documents = list(chain(*shards))
    with ShardWriter(folder / "written", shard_size_bytes=5_000, tokens="tok:uint16") as writer:
        for number, tokens in enumerate(documents):
            writer.write({"__key__": f"{number:03d}", "tok": np.array(tokens, np.uint16).tobytes()})
        with pytest.raises(TokensError, match="'odd' has 3 bytes of tokens"):
            writer.write({"__key__": "odd", "tok": b"123"})
    rows = json.loads((folder / "written" / "index.json").read_text())["shardlist"]
    assert len(rows) > 1
    assert sum(row["ntokens"] for row in rows) == sum(map(len, documents))
    reader = ShardReader(
        folder / "written" / "index.json",
        tokens=TokenBlocks(1, member="tok", dtype="uint16"),
        socket=daemon.socket,
    )
    assert list(chain(*taken(reader))) == list(range(sum(map(len, documents))))


@pytest.mark.parametrize(
    ("option", "value"),
    [("zero_copy", True), ("members", ("npy",)), ("decode", {"npy": "numpy"}), ("missing", "skip")],
)
def test_token_blocks_refuse_options_for_members(
    index: str, daemon: Daemon, option: str, value: Any
) -> None:
    """Blocks have no members."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(ConfigError, match="blocks of tokens"):
        ShardReader(index, tokens=TokenBlocks(2), socket=daemon.socket, **options)


def test_blocks_are_split_exactly_and_not_selected_by_documents(index: str, daemon: Daemon) -> None:
    """Parts of a split have each block once. An index of documents cannot select blocks."""
    dataset = ShardDataset(index, tokens=TokenBlocks(LENGTH), socket=daemon.socket)
    parts = [taken(part) for part in dataset.split(0.7, 0.3, seed=1)]
    assert Counter(chain(*parts)) == Counter(expected(numbered(SIZES), LENGTH))
    assert [len(part) for part in parts] == [len(part) for part in dataset.split(0.7, 0.3, seed=1)]
    with pytest.raises(ConfigError, match="not blocks"):
        dataset.select(lambda entry: True)
