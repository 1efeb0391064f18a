"""Parameters of tests, of which a few are quick."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return values as parameters, all but the first `count` of them marked `slow`.

    For cases that differ in little from each other, and each of which starts a daemon or processes.
    """
    return [
        pytest.param(value, marks=[] if number < count else pytest.mark.slow) for number, value in enumerate(values)
    ]
