"""Errors of DataLoader workers, which torch sends to the trainer as text.

torch sends an exception as its class and formatted traceback, and calls the class with that text in
the trainer. So an error's text has its JSON at the end whenever torch formats it, and the
constructor parses that.
"""

import json
import sys
from typing import Any

_FORMATS_FOR_THE_TRAINER = "torch._utils"  # the module of ExceptionWrapper
TRAILER = "\n  shardcache error as JSON: "  # no JSON contains a line break


def is_formatted_for_trainer() -> bool:
    """Return True if `__str__` was called in a DataLoader worker, for its trainer."""
    # None if the interpreter itself prints the error that ended the program.
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__") == "traceback":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == _FORMATS_FOR_THE_TRAINER


def sent_by_worker(text: str) -> dict[str, Any] | None:
    """Return the JSON in a message that torch built from a worker's error.

    None for any other message.
    """
    if not (text.startswith("Caught ") and TRAILER in text):
        return None
    _, _, trailer = text.rpartition(TRAILER)
    line, _, _ = trailer.partition("\n")
    try:
        sent = json.loads(line)
    except ValueError:
        return None
    if not isinstance(sent, dict) or "code" not in sent:
        return None
    return sent
