"""A format in the benchmarks: how it is written, and what reads it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contest:
    """One format, read by both.

    Attributes:
        library: its own loader.
        write: writes samples into a folder with that library.
        url: what of the folder is read, behind a "/".
        read: returns that loader's samples, given the folder.
    """

    library: str
    write: Callable[[Path, Iterable[Item]], None]
    url: str
    read: Callable[[str], Iterable[Any]]
