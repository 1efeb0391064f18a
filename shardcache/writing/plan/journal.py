"""The record of a dataset that is being written, kept beside its shards until all of it is there. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardcache.errors import ConfigError

JOURNAL = ".shardcache-write.json"
"""Name of the journal in the destination."""

FORMAT = 1
"""Number of the layout of written shards: another release's may differ, and must not be mixed with this one's."""


class Stored(NamedTuple):
    """A complete shard in the destination: its size, its version there, and its numbers of samples and tokens."""

    size_bytes: int
    version: str
    samples: int
    tokens: int | None = None


@dataclass(slots=True)
class Journal:
    """The input and settings of a dataset, and its complete shards, by name."""

    settings: dict[str, Any]
    shards: dict[str, Stored] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """Return the journal's text; `resume` reads it."""
        text = {"format": FORMAT, "settings": self.settings, "shards": self.shards}
        return json.dumps(text, ensure_ascii=True, indent=1).encode()


def resume(text: bytes, settings: Mapping[str, Any], url: str) -> Journal:
    """Return the journal of an interrupted run with the same settings.

    Raises ConfigError, naming the settings, if they or the input have changed: the new shards must not mix with the
    old.
    """
    remedy = "empty the destination, or choose another"
    try:
        found = json.loads(text)
        then, shards = found["settings"], {name: Stored(*row) for name, row in found["shards"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as exn:
        raise ConfigError(f"{JOURNAL} is damaged ({exn})", url=url, remedy=remedy) from exn
    if found.get("format") != FORMAT:
        raise ConfigError("another release of shardcache began to write this dataset", url=url, remedy=remedy)
    now = dict(settings)
    changed = sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    if changed:
        what = "; ".join(f"{name}: {_shown(then.get(name))} then, {_shown(now.get(name))} now" for name in changed)
        raise ConfigError(
            f"the destination holds shards of other input or settings ({what})",
            url=url,
            remedy=f"to resume, restore these; otherwise {remedy}",
        )
    return Journal(now, shards)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
