"""S3 clients of other projects read a bucket through an endpoint, and get its bytes."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from ecosystem.endpoint.conftest import Endpoint
from ecosystem.endpoint.s3_readers import OF_OBJECTS, OF_TABLES, RANGE
from support.programs.guard import GUARD_S

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]

MIB = 1024**2
NUMBERS = numpy.arange(200_000)
OBJECTS = {
    "empty.bin": b"",
    "small.txt": b"small\n",
    "folder/with spaces/a+b=c&d é.bin": random.Random(1).randbytes(70_000),
    "folder/odd.tar": random.Random(2).randbytes(3 * MIB + 17),
    "large.bin": random.Random(3).randbytes(19 * MIB + 1),
}


@pytest.fixture(scope="module")
def bucket(endpoint: Endpoint) -> str:
    """A bucket of objects of any size, and with names that have to be quoted."""
    store = endpoint.store
    name = f"objects-{random.randrange(10**9)}"
    store.make_bucket(name)
    for key, body in OBJECTS.items():
        store.put(name, key, body)
    return name


@pytest.fixture(scope="module")
def tables(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket with the same numbers as parquet, and as lance's and zarr's own formats."""
    store = endpoint.store
    name = f"tables-{random.randrange(10**9)}"
    store.make_bucket(name)
    table = pyarrow.table({"n": NUMBERS, "x": NUMBERS / 2})
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file, row_group_size=20_000)
    store.put(name, "tables/t.parquet", file.getvalue())
    folder = tmp_path_factory.mktemp("tables")
    if find_spec("lance"):
        import lance

        lance.write_dataset(table, str(folder / "t.lance"))
    if find_spec("zarr"):
        import zarr

        array = zarr.create_array(
            str(folder / "a.zarr"), shape=NUMBERS.shape, chunks=(20_000,), dtype="f8"
        )
        array[:] = NUMBERS
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(name, path.relative_to(folder).as_posix(), path)
    return name


def read(endpoint: Endpoint, client: str, bucket: str, folder: Path) -> dict[str, str]:
    """Return what a client reads in its own process, as some keep their first environment."""
    if not find_spec(client):
        pytest.skip(f"{client} is not installed")
    folder.mkdir()
    program = Path(__file__).with_name("s3_readers.py")
    done = subprocess.run(
        [sys.executable, str(program), client, bucket, str(folder)],
        env={**os.environ, **endpoint.env},
        capture_output=True,
        text=True,
        timeout=10 * GUARD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("client", OF_OBJECTS)
def test_client_reads_every_object(
    endpoint: Endpoint, bucket: str, tmp_path: Path, client: str
) -> None:
    """Listed, whole, in parts, and by a range; the second time from wherever they are then."""
    wanted = {key: hashlib.sha256(body).hexdigest() for key, body in OBJECTS.items()}
    wanted[RANGE] = hashlib.sha256(OBJECTS["large.bin"][1000:2000]).hexdigest()
    for turn in ("first", "second"):
        found = read(endpoint, client, bucket, tmp_path / turn)
        assert found == {name: wanted[name] for name in wanted if name != RANGE or RANGE in found}
    assert endpoint.origin_bytes() <= sum(map(len, OBJECTS.values())), "once for all clients"


@pytest.mark.parametrize("client", OF_TABLES)
def test_client_queries_a_table(
    endpoint: Endpoint, tables: str, tmp_path: Path, client: str
) -> None:
    """In its own way of reading ranges."""
    found = read(endpoint, client, tables, tmp_path / "read")
    assert found == {"sum": str(sum(range(1000)))}
