"""Errors of DataLoader workers, which torch sends to the trainer as text.

torch sends an exception as its class and its formatted traceback. In the trainer, torch calls the
class with that text. So whenever torch formats an error in a worker, `ShardcacheError.__str__`
appends a trailer with the error's JSON, and the constructor in the trainer parses the trailer.
"""

import json
import sys
from typing import Any, NamedTuple

# The module of torch's ExceptionWrapper, which formats a worker's error for the trainer.
_FORMATTING_MODULE = "torch._utils"
# Beginning of the trailer. The JSON after it contains no line break, so it ends with its line.
TRAILER = "\n  shardcache error as JSON: "


class SentError(NamedTuple):
    """An error that torch has sent.

    Attributes:
        traceback: the formatted traceback, after a line that says which worker raised the error.
        fields: the fields of the error's JSON.
    """

    traceback: str
    fields: dict[str, Any]

    @property
    def first_line(self) -> str:
        """The line that says which worker raised the error."""
        return self.traceback.partition("\n")[0]


def is_formatted_for_trainer() -> bool:
    """Return whether torch is formatting an error in a DataLoader worker.

    Only an error's `__str__` may call this, whose caller it looks at. Frames of the module
    `traceback`, with which torch formats an error, are skipped.
    """
    str_frame = sys._getframe(1)
    frame = str_frame.f_back  # None if the interpreter prints the error that ended the program
    while frame is not None and frame.f_globals.get("__name__") == "traceback":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _FORMATTING_MODULE


def parse_worker_error(message: str) -> SentError | None:
    """Return the error in a message that torch built from a worker's error.

    Returns None for any other message.
    """
    is_from_torch = message.startswith("Caught ") and TRAILER in message
    if not is_from_torch:
        return None
    traceback, _, trailer = message.rpartition(TRAILER)
    error_json, _, _ = trailer.partition("\n")
    try:
        fields = json.loads(error_json)
    except ValueError:
        return None
    if not isinstance(fields, dict) or "code" not in fields:
        return None
    return SentError(traceback, fields)
