"""Checks of the arguments that datasets, readers and mixtures have in common. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Sequence

from shardcache.errors import ConfigError


def check_least(least: int, **numbers: int | None) -> None:
    """Check that no number is below `least`; None is ignored."""
    for name, number in numbers.items():
        if number is not None and number < least:
            raise ConfigError(f"{name} is {number}", remedy=f"give {least} or more")


def check_choice(choices: Sequence[object], **values: object) -> None:
    """Check that each value is one of the choices."""
    for name, value in values.items():
        if value not in choices:
            *first, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
            raise ConfigError(f"{name} is {value!r}", remedy=f"choose {', '.join(first)} or {last}")


def check_global_batches(size: int, *, batch_size: int, even: str | None, canonical_nodes: int) -> None:
    """Check that an epoch can be cut into global batches of `size` samples."""
    check_least(1, global_batch_size=size)
    if batch_size != 1:
        raise ConfigError(
            f"batch_size is {batch_size} and global_batch_size is {size}",
            remedy="give global_batch_size alone: batch_size is then each rank's part of it",
        )
    if even is None:
        raise ConfigError("global_batch_size needs ranks that are even", remedy='choose even="pad" or even="drop"')
    if size % canonical_nodes:
        raise ConfigError(
            f"global_batch_size={size} cannot be divided among canonical_nodes={canonical_nodes}",
            remedy="make it a multiple of canonical_nodes",
        )
