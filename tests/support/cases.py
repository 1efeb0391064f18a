"""Cases of which `make test` runs few and `make test-slow` all: parameters and examples."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def first_quick(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return values as parameters, all but the first `count` of them marked `slow`.

    For cases that differ in little from each other, and each of which starts a daemon or processes.
    """
    return [
        pytest.param(value, marks=[] if number < count else pytest.mark.slow)
        for number, value in enumerate(values)
    ]


def examples(count: int, **others: Any) -> settings:
    """Return settings of a property that needs another number of examples than usual.

    `count` is that of the full profile; the quick one takes its own share of it.
    """
    share = settings().max_examples / settings.get_profile("full").max_examples
    return settings(max_examples=math.ceil(count * share), **others)
