"""The Hugging Face Hub's token in the environment, which sessions hand over to private daemons.

The client imports this module, so it uses the standard library alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from shardcache.shared.credentials.sendable import is_sendable

_TOKEN = "HF_TOKEN"
_OLDER_NAME = "HUGGING_FACE_HUB_TOKEN"
_DISABLES_SENDING = "HF_HUB_DISABLE_IMPLICIT_TOKEN"
_TRUE = ("1", "ON", "YES", "TRUE")  # values that huggingface_hub reads as true


@dataclass(frozen=True, slots=True, repr=False)
class HubToken:
    """A token of the Hub. The `repr` does not show the token.

    Attributes:
        names: environment variables whose values depend on the token.
        label: text that stands for these values when a daemon's name is hashed.
        value: the token, as requests send it.
    """

    names: ClassVar[tuple[str, ...]] = (_TOKEN, _OLDER_NAME)
    label: ClassVar[str] = "token of the Hub"

    value: str

    def __repr__(self) -> str:
        return "<token of the Hub>"

    @classmethod
    def of(cls, variables: Mapping[str, Any]) -> Self | None:
        """Return the token in an environment, or in a message with the same names.

        Return None if there is no token, if no request can carry it, or if the user has disabled
        the sending of tokens.
        """
        if str(variables.get(_DISABLES_SENDING, "")).upper() in _TRUE:
            return None
        value = variables.get(_TOKEN) or variables.get(_OLDER_NAME)
        if not isinstance(value, str):
            return None
        cleaned = value.replace("\r", "").replace("\n", "").strip()  # as huggingface_hub does
        if not cleaned or not is_sendable(cleaned):
            return None
        return cls(cleaned)

    @property
    def variables(self) -> dict[str, str]:
        """The token, by environment variable."""
        return {_TOKEN: self.value}
