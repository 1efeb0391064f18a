"""Google's key file in the environment, which each session hands over to its user's private daemon.

The client imports this module, so it uses the standard library alone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

_FILE = "GOOGLE_APPLICATION_CREDENTIALS"
_MAX_CHARS = 64 * 1024  # a longer file is not a key file
# Key files of these types contain a secret. Files of other types only say where to get a secret, so
# their paths are hashed into a daemon's name, as endpoints are.
_TYPES_WITH_SECRET = ("service_account", "authorized_user")


@dataclass(frozen=True, slots=True, repr=False)
class GoogleKey:
    """The key of a service account, or of a user who has logged in. The `repr` shows no secret.

    Attributes:
        names: environment variables whose values depend on the key.
        label: text that stands for these values when a daemon's name is hashed.
        text: the key file's JSON.
    """

    names: ClassVar[tuple[str, ...]] = (_FILE,)
    label: ClassVar[str] = "key file of Google"

    text: str

    def __repr__(self) -> str:
        return "<key of Google>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the key in an environment, or in a message with the same name.

        In an environment, the value of the variable is the path of a file. In a message, it is the
        file's content, as the daemon may not see the file. Return None if there is no key, or the
        file cannot be read. Blocks.
        """
        value = variables.get(_FILE)
        if not isinstance(value, str):
            return None
        text = value
        if not value.startswith("{"):
            text = _content(value)
        with suppress(ValueError):
            fields = json.loads(text)
            if isinstance(fields, dict) and fields.get("type") in _TYPES_WITH_SECRET:
                return cls(json.dumps(fields, sort_keys=True))
        return None

    @property
    def variables(self) -> dict[str, str]:
        """The content of the key file, by environment variable."""
        return {_FILE: self.text}

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the key file."""
        fields: dict[str, Any] = json.loads(self.text)
        return fields


def _content(path: str) -> str:
    """Return the text of a file, up to `_MAX_CHARS`; empty if it cannot be read."""
    with suppress(OSError, ValueError), Path(path).open(encoding="utf-8") as file:
        return file.read(_MAX_CHARS)
    return ""
