"""Errors of DataLoader workers, which torch sends to the trainer as text.

torch sends an exception as its class and formatted traceback, and calls the class with that text in
the trainer. So an error's text has its JSON at the end whenever torch formats it, and the
constructor parses that.
"""

import json
import sys
from typing import Any, NamedTuple

_FORMATS_FOR_THE_TRAINER = "torch._utils"  # the module of ExceptionWrapper
TRAILER = "\n  shardcache error as JSON: "  # no JSON contains a line break


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
    """Return True if `__str__`, which calls this, was called in a DataLoader worker by torch."""
    # The caller of `__str__`; None if the interpreter prints the error that ended the program.
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__") == "traceback":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _FORMATS_FOR_THE_TRAINER


def sent_by_worker(text: str) -> SentError | None:
    """Return the error in a message that torch built from a worker's error.

    None for any other message.
    """
    if not (text.startswith("Caught ") and TRAILER in text):
        return None
    traceback, _, trailer = text.rpartition(TRAILER)
    error_json, _, _ = trailer.partition("\n")
    try:
        fields = json.loads(error_json)
    except ValueError:
        return None
    if not isinstance(fields, dict) or "code" not in fields:
        return None
    return SentError(traceback, fields)
