"""Errors from a DataLoader worker are whole, though torch makes them from their text."""

import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from shardcache.errors import (
    ConfigError,
    DecodeError,
    OutdatedError,
    ShardcacheError,
    ShardChangedError,
)
from shardcache.shared.exceptions import from_json

# torchdata 0.11 with torch 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def errors() -> list[ShardcacheError]:
    """Return errors with and without each part, and with text that looks like a part."""
    changed = ShardChangedError("replaced: by whom, nobody knows", url="s3://b/a b: c.tar")
    changed.yielded = 7
    odd = ConfigError(
        "Caught ConfigError in a trap\n  What to do: nothing\n  shardcache error as JSON: {}",
        remedy="",
    )
    return [
        changed,
        odd,
        DecodeError("no \ud800 text", url="s3://b/ü.tar", remedy="mend it"),
        OutdatedError("old"),
    ]


class Failing(IterableDataset[int]):
    """Gives two samples and raises an error with a cause while a third is handled."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __iter__(self) -> Iterator[int]:
        yield from range(2)
        try:
            raise OutdatedError("not this one", url="s3://b/other.tar")
        except OutdatedError as exn:
            raise errors()[self._number] from exn


def caught_from(loader: Any) -> ShardcacheError:
    """Return what a loader raises, without the traceback that would keep its workers."""
    try:
        list(loader)
    except ShardcacheError as exn:
        exn.text = "".join(traceback.format_exception(exn))  # type: ignore[attr-defined]
        return exn.with_traceback(None)
    raise AssertionError("the loader has raised nothing")


@pytest.mark.parametrize(
    ("kind", "method", "number"),
    [
        *((DataLoader, "fork", number) for number in range(4)),
        pytest.param(DataLoader, "spawn", 0, marks=pytest.mark.slow),
        (StatefulDataLoader, "fork", 0),
        pytest.param(StatefulDataLoader, "spawn", 0, marks=pytest.mark.slow),
    ],
)
def test_errors_of_workers_arrive_whole(kind: Any, method: str, number: int) -> None:
    """The worker's error keeps class, attributes and text, and its traceback as an attribute.

    What is printed has one remedy, no frame of the worker, and says which worker it was.
    """
    raised = errors()[number]
    error = caught_from(
        kind(Failing(number), batch_size=None, num_workers=1, multiprocessing_context=method)
    )
    assert type(error) is type(raised)
    assert error.to_json() == raised.to_json()
    assert str(error) == str(raised)
    assert error.args == raised.args
    assert error.url == raised.url
    assert error.remedy == raised.remedy
    assert error.yielded == raised.yielded
    text = error.text  # type: ignore[attr-defined]
    assert "in DataLoader worker process 0" in text
    assert text.count("What to do") == str(raised).count("What to do")
    assert "_worker_loop" not in text
    assert "not this one" in error.worker_traceback
    assert "_worker_loop" in error.worker_traceback
    assert raised.worker_traceback == ""
    assert (
        from_json(error.to_json()).to_json()
        == pickle.loads(pickle.dumps(error)).to_json()
        == raised.to_json()
    )


def test_a_batch_of_a_pinning_loader_fails_the_same(recwarn: pytest.WarningsRecorder) -> None:
    """Batches, too: the error comes from inside of what gathers them."""
    error = caught_from(DataLoader(Failing(0), batch_size=4, num_workers=2, pin_memory=True))
    assert error.to_json() == errors()[0].to_json()


def test_only_torch_is_given_the_json() -> None:
    """A traceback, a log and a print show the sentence and the remedy alone."""
    error = errors()[0]
    for text in (str(error), repr(error), "".join(traceback.format_exception(error)), f"{error}"):
        assert "JSON" not in text


@pytest.mark.parametrize("end", ["", "{", "[]", "7", "null"])
def test_unsent_text_is_a_message(end: str) -> None:
    """Whatever it looks like."""
    text = f"Caught OutdatedError somewhere\n  shardcache error as JSON: {end}"
    assert OutdatedError(text).message == text.replace("\n", "\\n")
    assert OutdatedError(text, url="s3://b/1.tar").url == "s3://b/1.tar"


def test_an_error_that_ends_the_program_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """The interpreter prints it whole, with no frame of Python's below."""
    program = (
        "from shardcache.errors import ConfigError\n"
        "raise ConfigError('no such option', remedy='leave it out')"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    assert capfd.readouterr().err.endswith(
        "ConfigError: no such option\n  What to do: leave it out\n"
    )


def test_a_derived_class_of_another_project_takes_no_place() -> None:
    """No error is made of the class that Ray derives, with a constructor of its own."""

    class DerivedError(OutdatedError):
        def __init__(self, cause: Exception) -> None:
            super().__init__(str(cause))

    assert type(from_json(OutdatedError("old").to_json())) is OutdatedError
    assert type(pickle.loads(pickle.dumps(DerivedError(ValueError("old"))))) is OutdatedError
