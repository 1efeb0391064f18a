"""The arguments of datasets: the values that each accepts, and combinations that are errors.

`ARGUMENTS` has a rule for each argument, by which `reader`, `dataset` and other modules check and
convert the values that the user gives.
"""

from collections.abc import Collection, Mapping
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache_client.arguments import values as arguments
from shardcache_client.handlers import ANY_HANDLER, handler_of
from shardcache_client.ranks.mesh import MeshRanks
from shardcache_client.samples.token_blocks import TokenBlocks
from shardcache_client.stages.pipeline import Pipeline

# Conversions of arguments for `arguments.Accepts`. Each returns the value to use, and raises
# TypeError or ValueError for a value that the argument does not accept.


def _zero_copy(value: Any) -> Any:
    """Return True for all members, False for none, or the extensions of members."""
    if isinstance(value, bool):
        return value
    names = arguments.NAMES.converted(value)
    if "" in names:
        raise ValueError  # "" is no extension
    # A single extension stays a string, so that messages have it as the user gave it.
    if isinstance(value, str):
        return value
    return names


def _shuffle(value: Any) -> Any:
    """Return a truth value or "global"."""
    if isinstance(value, str) and value == "global":
        return value
    return arguments.flag().converted(value)


def _decode(value: Any) -> Any:
    """Return the name of a decoder, a table of decoders or a function."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        names = arguments.NAMES.converted(value)  # raises unless all keys are names of members
        if names:
            return value
    return arguments.FUNCTION.converted(value)


def _missing(value: Any) -> Any:
    """Return "error", "skip" or a mapping of default values."""
    if isinstance(value, Mapping):
        return value
    return arguments.one_of("error", "skip").converted(value)


ARGUMENTS = {
    "urls": arguments.URLS,
    "shuffle": arguments.Accepts(
        'True, False or "global"; shuffle_window is the number of shards whose samples are mixed',
        _shuffle,
    ),
    "shuffle_window": arguments.whole(0, arguments.MAX_BATCH).or_none("None for 8"),
    "seed": arguments.SEED.or_none("None, for a random one"),
    "canonical_nodes": arguments.whole(1, arguments.MAX_PROCESSES),
    "even": arguments.one_of("pad", "drop", None),
    "samples_per_epoch": arguments.whole(1).or_none(),
    "epochs": arguments.whole(1).or_none(),
    "batch_size": arguments.whole(1, arguments.MAX_BATCH),
    "global_batch_size": arguments.whole(1, arguments.MAX_BATCH).or_none(),
    "tokens": arguments.instance("TokenBlocks(length)", TokenBlocks).or_none(),
    "decode": arguments.Accepts(
        'the name of an image decoder, a table such as {"jpg": "rgb8"}, or a function', _decode
    ).or_none(),
    "members": arguments.NAMES.or_none("None for all"),
    "missing": arguments.Accepts('"error", "skip", or a dict of default values', _missing),
    "key_split": arguments.one_of("first-dot", "last-dot"),
    "on_error": arguments.Accepts(ANY_HANDLER, handler_of),
    "job": arguments.JOB.or_none(),
    "socket": arguments.PATH.or_none(),
    "rank": arguments.whole(0, arguments.MAX_PROCESSES).or_none(),
    "world_size": arguments.whole(1, arguments.MAX_PROCESSES).or_none(),
    "mesh": arguments.Accepts(
        'the DeviceMesh itself, such as mesh["dp"], or a ProcessGroup that this process belongs to',
        MeshRanks.of,
    ).or_none(),
    "timeout_s": arguments.SECONDS,
    "partial_reads": arguments.flag(),
    "daemon": arguments.DAEMONS,
    "fallback": arguments.one_of("error", "private"),
    "zero_copy": arguments.Accepts("True, False, or extensions of members", _zero_copy),
}


def check_zero_copy(
    zero_copy: bool | str | Collection[str],
    pipeline: Pipeline,
    tokens: TokenBlocks | None,
) -> None:
    """Raise ConfigError if no sample can have an extension that `zero_copy` names."""
    if tokens is not None and zero_copy:
        raise ConfigError(
            "zero_copy has no meaning for blocks of tokens, which are arrays", remedy="omit it"
        )
    members = pipeline.decode.members
    if isinstance(zero_copy, bool) or members is None:
        return
    named = [zero_copy] if isinstance(zero_copy, str) else zero_copy
    unread = [extension for extension in named if not members.reads(extension.lower())]
    if unread:
        raise ConfigError(
            f"zero_copy names the member {unread[0]!r}, which members leaves out",
            remedy="name it in members, too; or omit it from zero_copy",
        )
