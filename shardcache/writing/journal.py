"""The journal of a run: the settings of a dataset, and its complete shards.

`shardcache write` keeps the journal as an object in the destination. If a run is interrupted, the
next run of the command reads the journal with `resume`. It keeps the complete shards if input and
settings are still the same. Nothing in this module reads or writes files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardcache.shared.exceptions import ConfigError

JOURNAL = ".shardcache-write.json"
"""Name of the journal in the destination."""

FORMAT = 1
"""Version of the bytes that this release writes for the same input and settings.

The bytes of another release may differ, and shards of two versions must not be mixed.
"""

_SHOWN_CHARS = 60  # messages show at most this much of the value of a setting


class ShardRecord(NamedTuple):
    """Record of an object in the destination: a complete shard, or the table of samples.

    Attributes:
        size_bytes: size of the object.
        version: version of the object.
        samples: number of samples in the shard, or in all shards for the table.
        tokens: number of the shard's tokens; None if they are not counted, and for the table.
        members: for each extension, the number of the shard's samples that have it; None for the
            table.
    """

    size_bytes: int
    version: str
    samples: int
    tokens: int | None = None
    members: Mapping[str, int] | None = None


@dataclass(slots=True)
class Journal:
    """The input and settings of a dataset, and its complete shards by name.

    Attributes:
        settings: the settings and the identity of the input, as from `WriteOptions.for_journal`.
        shards: by name, the record of each complete shard, and of the table if it is stored.
    """

    settings: dict[str, Any]
    shards: dict[str, ShardRecord] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the journal as JSON, which `resume` reads."""
        content = {"format": FORMAT, "settings": self.settings, "shards": self.shards}
        return json.dumps(content, ensure_ascii=True, indent=1).encode()


def resume(journal_text: bytes, settings: Mapping[str, Any], url: str) -> Journal:
    """Return the journal of an interrupted run.

    Args:
        journal_text: the journal in the destination, as from `Journal.to_json`.
        settings: settings of this run, as from `WriteOptions.for_journal`.
        url: url of the destination, for errors.

    Raises ConfigError if the settings or the input have changed, since new shards must not be mixed
    with old ones; the message names the changes.
    """
    remedy = "empty the destination, or choose another"
    try:
        content = json.loads(journal_text)
        old_settings = dict(content["settings"])
        shards = {name: ShardRecord(*values) for name, values in content["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exn:
        raise ConfigError(f"{JOURNAL} is damaged ({exn})", url=url, remedy=remedy) from exn
    if content.get("format") != FORMAT:
        raise ConfigError(
            "another release of shardcache began to write this dataset", url=url, remedy=remedy
        )
    new_settings = dict(settings)
    changes = []
    for name in sorted(new_settings.keys() | old_settings.keys()):
        old = old_settings.get(name)
        new = new_settings.get(name)
        if new != old:
            changes.append(f"{name}: {_shown(old)} then, {_shown(new)} now")
    if changes:
        raise ConfigError(
            f"the destination holds shards of other input or settings ({'; '.join(changes)})",
            url=url,
            remedy=f"to resume, restore these; otherwise {remedy}",
        )
    return Journal(new_settings, shards)


def _shown(value: object) -> str:
    """Return a setting's value as JSON for an error, cut to a maximum length."""
    text = json.dumps(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"
