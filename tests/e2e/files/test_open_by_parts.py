"""`open_cached` fetches what is read of an object, and all of it once a local file is needed.

Bytes are counted by the object stores themselves.
"""

import io
import json
import mmap
import os
import random
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import safetensors.torch
import torch

from shardcache.errors import NotFoundError, OutdatedError, ShardChangedError
from shardcache_client.files.paths import open_cached
from support.cases import first_quick
from support.programs.daemon import Daemon, eventually
from support.programs.guard import GUARD_S
from support.stores.buckets import Bucket
from support.stores.canary import Canary, GatedStore

KIB = 1024
PART_BYTES = 64 * KIB
PARTS = 40
BODY = random.Random(3).randbytes(PARTS * PART_BYTES - 100)
END = len(BODY)


@pytest.fixture
def store() -> Iterator[Canary]:
    with Canary() as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with a cache of its own."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000", "--scrub-rate", "0")
    with Daemon(tmp_path, *flags) as running:
        yield running


def opened(node: Daemon, url: str) -> io.BufferedReader:
    """Open an object through a daemon."""
    return open_cached(url, socket=node.socket, timeout_s=GUARD_S)


def test_opening_fetches_nothing(store: Canary, node: Daemon) -> None:
    """Its size is known, and its `repr` asks for no more."""
    url = store.put("weights", BODY)

    with opened(node, url) as file:
        assert file.seek(0, os.SEEK_END) == END
        assert "weights" in repr(file)

    assert store.ranges() == []


def test_missing_object_is_an_error_when_it_is_opened(store: Canary, node: Daemon) -> None:
    """Nobody gets a file that fails at its first read."""
    with pytest.raises(NotFoundError):
        opened(node, store.url("/missing"))


def test_end_of_an_open_file_is_fetched_alone(store: Canary, node: Daemon) -> None:
    """Also by `read()`, which goes on to the end from wherever the file is."""
    url = store.put("table", BODY)

    with opened(node, url) as file:
        file.seek(-8, os.SEEK_END)
        assert file.read() == BODY[-8:]

    assert store.ranges() == [((PARTS - 1) * PART_BYTES, END)]


def test_jumps_fetch_what_they_read(store: Canary, node: Daemon) -> None:
    """A read of any length is one range, after which nothing is read ahead."""
    url = store.put("weights", BODY)
    start = 3 * PART_BYTES + 10
    stop = 7 * PART_BYTES - 3 * 8 * KIB

    with opened(node, url) as file:
        file.seek(start)
        assert file.read(stop - start) == BODY[start:stop]
        file.seek(20 * PART_BYTES)
        assert file.read(5) == BODY[20 * PART_BYTES : 20 * PART_BYTES + 5]

    fetched_parts = {part for span in store.ranges() for part in parts_of(span)}
    assert fetched_parts == {3, 4, 5, 6, 20}


def parts_of(span: tuple[int, int]) -> range:
    """Return the numbers of the parts in a range."""
    start, stop = span
    return range(start // PART_BYTES, -(-stop // PART_BYTES))


def test_tensor_of_an_open_file_is_read_alone(seaweedfs: Bucket, tmp_path: Path) -> None:
    """Of a file of safetensors in S3: its header, and the tensor that is asked for."""
    tensors = {f"layer.{number}": torch.full((512, 512), float(number)) for number in range(12)}
    body = safetensors.torch.save(tensors)
    seaweedfs.put("model.safetensors", body)
    flags = ("--range-part-size", str(PART_BYTES), "--scrub-rate", "0")

    with Daemon(tmp_path, *flags, env=seaweedfs.server.env()) as node:
        with opened(node, f"s3://{seaweedfs.name}/model.safetensors") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            facts = json.loads(file.read(header_bytes))["layer.7"]
            start, stop = (8 + header_bytes + offset for offset in facts["data_offsets"])
            file.seek(start)
            data = bytearray(file.read(stop - start))
        fetched_bytes = node.status()["counters"]["origin_bytes"]

    found = torch.frombuffer(data, dtype=torch.float32).reshape(facts["shape"])
    assert torch.equal(found, tensors["layer.7"])
    assert fetched_bytes <= stop - start + 4 * PART_BYTES
    assert fetched_bytes < len(body) / 5


def test_table_is_read_by_its_footer_and_columns(store: Canary, node: Daemon) -> None:
    """pyarrow gets the open file, and asks neither for its path nor for its descriptor."""
    numbers = random.Random(7)
    columns = {name: [numbers.random() for _ in range(40_000)] for name in "abcdef"}
    sink = pyarrow.BufferOutputStream()
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, sink, compression="none", use_dictionary=False)
    body = sink.getvalue().to_pybytes()
    url = store.put("table.parquet", body)

    with opened(node, url) as file:
        parquet = pyarrow.parquet.ParquetFile(file)
        assert parquet.metadata.num_rows == 40_000
        assert store.asked_bytes() <= 2 * PART_BYTES
        found = parquet.read(columns=["c"])

    assert found.column("c").to_pylist() == columns["c"]
    assert store.asked_bytes() < len(body) / 3


def test_checkpoint_is_loaded_from_an_open_file(store: Canary, node: Daemon) -> None:
    """torch reads it by the file's methods; each byte crosses the network once."""
    weights = {f"layer.{number}": torch.full((64, 512), float(number)) for number in range(4)}
    saved = io.BytesIO()
    torch.save(weights, saved)
    url = store.put("model.pt", saved.getvalue())

    with opened(node, url) as file:
        found = torch.load(file, weights_only=True)

    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert store.asked_bytes() <= len(saved.getvalue())


def test_path_is_that_of_the_whole_object(store: Canary, node: Daemon) -> None:
    """It is asked for in the middle of reading, which then goes on at the same place."""
    url = store.put("weights.bin", BODY)

    with opened(node, url) as file:
        file.seek(7 * PART_BYTES + 3)
        assert file.read(10) == BODY[7 * PART_BYTES + 3 : 7 * PART_BYTES + 13]
        assert Path(file.name).name == "weights.bin"
        assert Path(file.name).read_bytes() == BODY
        assert file.tell() == 7 * PART_BYTES + 13
        assert file.read(10) == BODY[7 * PART_BYTES + 13 : 7 * PART_BYTES + 23]

    assert store.asked_bytes() == END


def test_descriptor_is_that_of_the_whole_object(store: Canary, node: Daemon) -> None:
    """It can be mapped, and its offset is the file's own."""
    url = store.put("weights", BODY)

    with opened(node, url) as file:
        file.seek(PART_BYTES)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == BODY
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == PART_BYTES
        assert file.read(9) == BODY[PART_BYTES : PART_BYTES + 9]


@pytest.mark.parametrize("is_cached", [False, True])
def test_whole_content_is_fetched_once_as_a_whole(
    store: Canary, node: Daemon, is_cached: bool
) -> None:
    """By `read()`; if all of it is cached, the open file is the cached one from the beginning."""
    url = store.put("weights", BODY)
    if is_cached:
        with opened(node, url) as file:
            assert file.read() == BODY

    with opened(node, url) as file:
        assert file.read() == BODY
        assert file.read() == b""
        assert node.whole() == [url]

    assert store.asked_bytes() == END


def test_cached_file_stays_cached_while_it_is_open(store: Canary, node: Daemon) -> None:
    """Nothing has been read of it when others want its space."""
    url = store.put("weights", BODY)
    with opened(node, url) as file:
        file.read()

    with opened(node, url) as file:
        assert node.leases() == 1
        node.request("POST", "/v1/evict", {"urls": [url]})
        assert file.read(10) == BODY[:10]
    assert store.asked_bytes() == END
    eventually(lambda: node.leases() == 0)


@pytest.mark.parametrize("step", first_quick([KIB, 8 * KIB, PART_BYTES + 11, END + 1]))
def test_reading_through_gives_every_byte_once(store: Canary, node: Daemon, step: int) -> None:
    """In steps of any size; the object has become a whole file then."""
    url = store.put("weights", BODY)

    with opened(node, url) as file:
        found = b"".join(iter(lambda: file.read(step), b""))

    assert found == BODY
    eventually(lambda: node.whole() == [url])
    assert store.asked_bytes() == END


def test_lines_of_an_open_file_are_iterated(store: Canary, node: Daemon) -> None:
    """As of any file, also as text."""
    lines = [b"%d\n" % number for number in range(30_000)]
    url = store.put("lines", b"".join(lines))

    with opened(node, url) as file:
        assert list(file) == lines
    with io.TextIOWrapper(opened(node, url), encoding="ascii") as text:
        assert text.readline() == "0\n"
        assert sum(1 for _ in text) == len(lines) - 1


def test_methods_of_a_file_do_what_they_do_on_a_local_one(
    store: Canary, node: Daemon, tmp_path: Path
) -> None:
    """Seeks, peeks and reads of every kind, in a random order, around the end as well."""
    url = store.put("weights", BODY)
    (tmp_path / "same").write_bytes(BODY)
    chance = random.Random(9)

    with opened(node, url) as file, (tmp_path / "same").open("rb") as local:
        assert isinstance(file, io.BufferedReader)
        assert file.mode == local.mode
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        for _ in range(400):
            size = chance.choice([0, 1, 100, 5_000, 9_000, 100_000])
            offset = chance.choice([0, chance.randrange(END + 1_000), END])
            assert file.seek(offset) == local.seek(offset)
            assert file.peek(1)[:1] == local.peek(1)[:1]
            assert file.read(size) == local.read(size)
            assert len(file.read1(size)) <= size
            relative = chance.randrange(-size - 1, size + 1)
            local.seek(max(0, file.tell() + relative))
            assert file.seek(max(0, file.tell() + relative)) == local.tell()
            target = bytearray(size)
            same_target = bytearray(size)
            assert file.readinto(target) == local.readinto(same_target)
            assert target == same_target
            assert file.tell() == local.tell()
        with pytest.raises(OSError, match="Invalid argument"):
            file.seek(-1)


def test_closed_file_refuses_every_use(store: Canary, node: Daemon) -> None:
    """With the error of any file; its session has ended."""
    file = opened(node, store.put("weights", BODY))
    file.read(10)
    file.close()
    file.close()

    assert file.closed
    for use in (file.read, file.fileno, file.readable, file.tell, lambda: file.name):
        with pytest.raises(ValueError, match="closed"):
            use()
    eventually(lambda: node.sessions() == 0)


def test_dropped_file_ends_its_session(store: Canary, node: Daemon) -> None:
    """Without `close`, and without a run of the garbage collector."""
    file = opened(node, store.put("weights", BODY))
    file.read(10)
    del file
    eventually(lambda: node.sessions() == 0)


def test_empty_object_is_opened_as_an_empty_file(store: Canary, node: Daemon) -> None:
    """To be read, and by its path."""
    url = store.put("empty", b"")
    with opened(node, url) as file:
        assert file.read(1) == b""
        assert file.read() == b""
        assert Path(file.name).stat().st_size == 0


def test_forked_child_reads_by_a_session_of_its_own(store: Canary, node: Daemon) -> None:
    """Parent and child both go on, each from where the file was."""
    with opened(node, store.put("weights", BODY)) as file:
        assert file.read(10) == BODY[:10]
        child = os.fork()
        if child == 0:
            is_right = file.read(10) == BODY[10:20]
            file.seek(20 * PART_BYTES)
            is_right = is_right and file.read(10) == BODY[20 * PART_BYTES : 20 * PART_BYTES + 10]
            os._exit(0 if is_right else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert file.read(10) == BODY[10:20]
        file.seek(30 * PART_BYTES)
        assert file.read(10) == BODY[30 * PART_BYTES : 30 * PART_BYTES + 10]


def test_reading_goes_on_after_a_restart(store: Canary, node: Daemon) -> None:
    """By ranges at the next daemon, however the last one ended."""
    with opened(node, store.put("weights", BODY)) as file:
        assert file.read(10) == BODY[:10]
        node.restart()
        file.seek(20 * PART_BYTES)
        assert file.read(10) == BODY[20 * PART_BYTES : 20 * PART_BYTES + 10]


def test_open_file_is_of_one_version(store: Canary, node: Daemon) -> None:
    """The open file is of one version, by whatever it is read; opened again, it is the new one."""
    url = store.put("weights", BODY)
    with opened(node, url) as file:
        assert file.read(10) == BODY[:10]
        store.put("weights", BODY[::-1])
        with pytest.raises((OutdatedError, ShardChangedError)):
            assert file.name
        file.seek(20 * PART_BYTES)
        with pytest.raises((OutdatedError, ShardChangedError)):
            file.read(10)

    with opened(node, url) as file:
        assert file.read() == BODY[::-1]


def test_failed_whole_leaves_the_file_readable(store: Canary, tmp_path: Path) -> None:
    """An object larger than the cache has no local file, but any of its ranges can be read."""
    flags = ("--range-part-size", str(PART_BYTES), "--listing-ttl-s", "1000")
    with (
        Daemon(tmp_path, *flags, capacity=str(12 * PART_BYTES)) as node,
        opened(node, store.put("weights", BODY)) as file,
    ):
        with pytest.raises(Exception, match="capacity"):
            file.fileno()
        assert b"".join(iter(lambda: file.read(PART_BYTES), b"")) == BODY


def test_file_is_opened_and_read_while_it_arrives(node: Daemon) -> None:
    """As far as it has arrived for others."""
    with GatedStore() as store, ThreadPoolExecutor(1) as pool:
        url = store.put("weights", BODY)
        store.let("weights", 1)
        with opened(node, url) as file:
            reading = pool.submit(file.read, 100)
            eventually(lambda: bool(node.status()["transfers"]))
            store.let("weights", PART_BYTES)
            assert reading.result(GUARD_S) == BODY[:100]
            store.let("weights")
            assert file.read() == BODY[100:]


def test_library_that_asks_for_the_path_gets_the_whole(store: Canary, node: Daemon) -> None:
    """zipfile does."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writing:
        writing.writestr("one", BODY)
        writing.writestr("two", b"text")
    url = store.put("archive.zip", archive.getvalue())

    with opened(node, url) as file, zipfile.ZipFile(file) as reading:
        assert reading.read("two") == b"text"

    assert store.asked_bytes() == len(archive.getvalue())
