"""Checks of the values in states. Pure.

States come from files that anyone may have written. The modules that read states pass every value
through one of these functions, and use it without further checks.
"""

import re
from collections.abc import Mapping

from shardcache.errors import ConfigError

MARK = "shardcache"
"""Name of a member of a state's JSON object, whose value is the number of the state's format.

A state is recognized by this member among the other objects that a user loads.
"""

MAX_READERS = 1 << 20
"""Maximum number of ranks, and of all workers of all ranks, that a state may name."""

_MAX_COUNT = 1 << 62  # far more than any number of samples, and within 64 bits
_BITS = re.compile(r"|(?:0x)?[0-9a-f]+")  # hexadecimal digits, or nothing


def invalid_state(cause: Exception) -> ConfigError:
    """Return the error for a state that does not have the form that `to_json` gives.

    Args:
        cause: the error that reading the state has raised; its text becomes part of the message.
    """
    return ConfigError(
        f"the state is invalid: {str(cause)[:200]}",
        remedy="load what state_dict() has returned",
    )


def not_of_one_moment() -> ConfigError:
    """Return the error for states that were not taken at the same moment of the same job."""
    return ConfigError(
        "the states are not from the same moment of the same job",
        remedy="load the states of a single checkpoint and dataset",
    )


def whole_number(value: object, least: int, most: int) -> int:
    """Return an integer of a state, from `least` to `most`. Raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r} is not an integer from {least} to {most}")
    return value


def count(value: object, least: int = 0) -> int:
    """Return a number of samples, batches, epochs or the like. Raises ValueError for anything else.

    Args:
        value: the value in the state.
        least: the least number that is valid.
    """
    return whole_number(value, least, _MAX_COUNT)


def flag(value: object) -> bool:
    """Return a truth value of a state. Raises TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def text(value: object) -> str:
    """Return a string of a state. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def hexadecimal(value: object) -> str:
    """Return a string of hexadecimal digits, perhaps with "0x" before them; "" stands for no bits.

    Raises ValueError for anything else.
    """
    # The digits are checked by a pattern, as `int` would also accept a negative number.
    if not isinstance(value, str) or not _BITS.fullmatch(value):
        raise ValueError("not hexadecimal digits")
    return value


def named_numbers(value: Mapping[object, object]) -> dict[str, int]:
    """Return a mapping of names to numbers in a state.

    Raises TypeError or ValueError for anything else.
    """
    return {text(name): count(number) for name, number in value.items()}
