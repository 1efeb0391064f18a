"""Requirements of the inputs of `shardcache write`, and the errors where they are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("kind", "package", "arguments"),
    [
        ("parquet", "pyarrow", {"files": [], "columns": {}, "seed": None}),
        ("datasets", "datasets", {"name": "hf:name", "split": None, "columns": {}, "seed": None}),
    ],
)
def test_a_missing_package_is_named_with_its_extra(kind: str, package: str, arguments: dict[str, Any]) -> None:
    """The base installation has neither pyarrow nor datasets: the error says what to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from shardcache.errors import MissingPackageError\n"
        "from shardcache.writing.inputs import open_source\n"
        f"try: open_source({kind!r}, {arguments!r})\n"
        "except MissingPackageError as exn: print(exn.remedy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"pip install 'shardcache[{kind}]'\n"


def test_a_text_that_is_not_utf_8_is_an_error(tmp_path: Path) -> None:
    """Arrow does not check texts when it reads them."""
    import pyarrow as pa

    from shardcache.errors import InputError
    from shardcache.writing.tables import columns_of, samples

    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    table = pa.table({"text": text})
    with pytest.raises(InputError, match="not UTF-8"):
        list(samples(table, columns_of(table.schema, {}, "a.parquet"), range(1)))
