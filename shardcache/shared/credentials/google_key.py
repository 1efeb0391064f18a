"""The key file of Google in the environment, which a private daemon gets from each session.

Uses the standard library alone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_MAX_BYTES = 64 * 1024
# Key files of these types contain a secret. Those of others only say where to get one, so their
# path is part of a daemon's identity, like an endpoint.
_TYPES = ("service_account", "authorized_user")


@dataclass(frozen=True, slots=True, repr=False)
class GoogleKey:
    """The key of a service account, or of a user who has logged in; its `repr` does not show it.

    Attributes:
        names: variables that have other values for another key.
        kind: stands for these values when a daemon's name is hashed.
        text: the file's JSON.
    """

    names: ClassVar[tuple[str, ...]] = (_FILE,)
    kind: ClassVar[str] = "key file of Google"

    text: str

    def __repr__(self) -> str:
        return "<key of Google>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the key in an environment, or in a message with the same name.

        The variable of an environment names a file. Other processes may not see the file, so the
        field of a message is its content. None without a key, and for a file that cannot be read.
        Blocks.
        """
        value = variables.get(_FILE)
        if not isinstance(value, str):
            return None
        text = value
        if not value.startswith("{"):
            text = _content(value)
        with suppress(ValueError):
            fields = json.loads(text)
            if isinstance(fields, dict) and fields.get("type") in _TYPES:
                return cls(json.dumps(fields, sort_keys=True))
        return None

    @property
    def variables(self) -> dict[str, str]:
        """The key by variable."""
        return {_FILE: self.text}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the file."""
        fields: dict[str, Any] = json.loads(self.text)
        return fields


def _content(path: str) -> str:
    """Return the text of a file; empty if it cannot be read."""
    with suppress(OSError, ValueError), Path(path).open(encoding="utf-8") as file:
        return file.read(_MAX_BYTES)
    return ""
