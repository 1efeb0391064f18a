"""Checks of the values in states. Pure.

States come from files that anyone may have written. The modules that read states check every value
by one of these functions, each of which returns the value or raises an error.
"""

import re
from collections.abc import Mapping

from shardcache.shared.exceptions import ConfigError

FORMAT_KEY = "shardcache"
"""Key in a state's JSON object whose value is the number of the state's format.

Among the objects that a user loads, states are recognized by this key.
"""

MAX_READERS = 1 << 20
"""Maximum number of ranks, and of the workers of all ranks together, that a state may name."""

_MAX_COUNT = 1 << 62  # far more than any number of samples, and within 64 bits
_BITS = re.compile(r"|(?:0x)?[0-9a-f]+")  # hexadecimal digits, or nothing


def invalid_state(cause: Exception) -> ConfigError:
    """Return the error for a state that `to_json` has not made.

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


def checked_integer(value: object, minimum: int, maximum: int) -> int:
    """Return an integer within limits, both included. Raises ValueError for anything else."""
    is_flag = isinstance(value, bool)  # an `int` as well
    if is_flag or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{value!r} is not an integer from {minimum} to {maximum}")
    return value


def checked_count(value: object, minimum: int = 0) -> int:
    """Return a number of samples, batches, epochs or the like. Raises ValueError for anything else.

    Args:
        value: the value in the state.
        minimum: the smallest valid number.
    """
    return checked_integer(value, minimum, _MAX_COUNT)


def checked_flag(value: object) -> bool:
    """Return a truth value of a state. Raises TypeError for anything else."""
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
    return value


def checked_text(value: object) -> str:
    """Return a string of a state. Raises TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def checked_hexadecimal(value: object) -> str:
    """Return a string of hexadecimal digits, with or without a prefix "0x"; "" stands for no bits.

    Raises ValueError for anything else.
    """
    # `int` would also accept a negative number, so a pattern checks the digits.
    if not isinstance(value, str) or not _BITS.fullmatch(value):
        raise ValueError("not hexadecimal digits")
    return value


def checked_numbers(value: Mapping[object, object]) -> dict[str, int]:
    """Return a mapping of names to numbers in a state.

    Raises TypeError or ValueError for anything else.
    """
    return {checked_text(name): checked_count(number) for name, number in value.items()}
