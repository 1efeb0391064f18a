"""The journal of a run: the settings of a dataset, and its complete shards. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardcache.errors import ConfigError

JOURNAL = ".shardcache-write.json"
"""Name of the journal in the destination."""

FORMAT = 1
"""Number of the layout of written shards.

Another release's may differ, and must not be mixed with this one's.
"""

_SHOWN_CHARS = 60  # of the value of a setting, in messages


class Stored(NamedTuple):
    """A complete shard in the destination.

    Attributes:
        size_bytes: its size.
        version: its version there.
        samples: number of its samples.
        tokens: number of its tokens, if they are counted.
        members: number of samples with each extension.
    """

    size_bytes: int
    version: str
    samples: int
    tokens: int | None = None
    members: Mapping[str, int] | None = None


@dataclass(slots=True)
class Journal:
    """The input and settings of a dataset, and its complete shards by name.

    It lies in the destination with the shards.
    """

    settings: dict[str, Any]
    shards: dict[str, Stored] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the journal's text; `resume` reads it."""
        content = {"format": FORMAT, "settings": self.settings, "shards": self.shards}
        return json.dumps(content, ensure_ascii=True, indent=1).encode()


def resume(text: bytes, settings: Mapping[str, Any], url: str) -> Journal:
    """Return the journal of an interrupted run.

    Args:
        text: the journal in the destination.
        settings: this run's.
        url: the destination's, for errors.

    Raises ConfigError for settings or an input that have changed, and names the changes: new shards
    must not be mixed with old ones.
    """
    remedy = "empty the destination, or choose another"
    try:
        content = json.loads(text)
        old_settings = content["settings"]
        shards = {name: Stored(*row) for name, row in content["shards"].items()}
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
            changes.append(f"{name}: {_brief(old)} then, {_brief(new)} now")
    if changes:
        raise ConfigError(
            f"the destination holds shards of other input or settings ({'; '.join(changes)})",
            url=url,
            remedy=f"to resume, restore these; otherwise {remedy}",
        )
    return Journal(new_settings, shards)


def _brief(value: object) -> str:
    text = json.dumps(value)
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}…"
