"""Incremental parser of a large JSON object, with a part of the text in memory at a time.

`shardlist` reads index files with it. The window is the part of the text that is in memory; it
slides over the text. A member is a name and its value in the object.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TextIO

_WINDOW_CHARS = 256 * 1024
# Values of a list are collected until there are this many, and then yielded together.
_MIN_YIELDED = 1_000
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class JsonText:
    """Incremental parser of a JSON object, with a sliding window over its text.

    A value must not be longer than the window. Every method raises ValueError for invalid JSON.
    """

    def __init__(self, source: TextIO) -> None:
        self._source = source
        self._start = 0  # offset of the window in the text, in characters
        self._at = 0  # offset in the window of the next character to read
        self._window = ""
        self._is_last = False  # True if the text ends with the window
        # True once `_read_objects` was called for this window: another call would read nothing, or
        # fail as the first one did.
        self._has_tried_objects = False
        self._slide()

    def comes_next(self, mark: str) -> bool:
        """Skip whitespace; return whether `mark` follows."""
        self._skip_space()
        return self._window.startswith(mark, self._at)

    def members(self) -> Iterator[str]:
        """Yield the name of each member of the top-level object.

        The caller has to read the member's value before it takes the next name.
        """
        for _ in self._elements("{", "}"):
            name = self.read_value()
            self._read_mark(":")
            yield str(name)
        self._skip_space()
        if self._at < len(self._window):
            raise self._error("unexpected text after the end")

    def items(self) -> Iterator[list[Any]]:
        """Yield the values of a list, a thousand or more at a time."""
        values: list[Any] = []
        for _ in self._elements("[", "]"):
            # Read many values if possible, otherwise one.
            values += self._read_objects() or [self.read_value()]
            if len(values) >= _MIN_YIELDED:
                yield values
                values = []
        if values:
            yield values

    def read_value(self) -> Any:
        """Read one value."""
        self._skip_space()
        try:
            value, end = _DECODER.raw_decode(self._window, self._at)
        except json.JSONDecodeError as exn:
            if self._is_last:
                raise self._error(exn.msg, exn.pos) from None
        except RecursionError as exn:
            raise ValueError("it is nested too deeply") from exn
        else:
            # A number at the end of the window may continue after the window.
            if end < len(self._window) or self._is_last:
                self._at = end
                return value

        # The value continues after the window, so the window is moved to the value's beginning. If
        # the window begins there already, the value is too long.
        if self._at == 0:
            reason = f"invalid JSON, or a value longer than {_WINDOW_CHARS:,} characters"
            raise self._error(reason, 0)
        self._slide()
        return self.read_value()

    def _read_objects(self) -> list[Any]:
        """Read all complete objects of the window together, up to its last brace.

        This is much faster than reading them one by one. If the text up to the last brace is not a
        list of values, nothing is read, and the result is empty: the caller then reads one value.
        """
        if self._has_tried_objects:
            return []
        self._has_tried_objects = True
        list_end = None
        if self._is_last and "]" in self._window:
            list_end = self._window.rfind("]")  # most likely, the list of objects ends here
        end = self._window.rfind("}", self._at, list_end) + 1
        if end <= self._at:
            return []
        with suppress(ValueError, RecursionError):
            values: list[Any] = json.loads(f"[{self._window[self._at : end]}]")
            self._at = end
            return values
        return []

    def _slide(self) -> None:
        """Move the window so that it begins with the next character to read."""
        unread = self._window[self._at :]
        more = self._source.read(_WINDOW_CHARS - len(unread))
        self._start += self._at
        self._at = 0
        self._window = unread + more
        self._has_tried_objects = False
        self._is_last = len(self._window) < _WINDOW_CHARS

    def _elements(self, opening: str, closing: str) -> Iterator[None]:
        """Read a list or object, whose elements the caller reads: yield before each of them."""
        self._read_mark(opening)
        if self.comes_next(closing):
            self._at += 1
            return
        while True:
            yield
            is_over = self.comes_next(closing)
            self._read_mark(closing if is_over else ",")
            if is_over:
                return

    def _read_mark(self, mark: str) -> None:
        """Read a mark of one character, which must come next."""
        if not self.comes_next(mark):
            raise self._error(f"{mark!r} is missing")
        self._at += 1

    def _skip_space(self) -> None:
        """Skip whitespace, sliding the window over it."""
        self._at = self._after_space()
        while self._at == len(self._window) and not self._is_last:
            self._slide()
            self._at = self._after_space()

    def _after_space(self) -> int:
        """Return the offset in the window after whitespace."""
        space = _SPACE.match(self._window, self._at)
        assert space is not None  # it also matches ""
        return space.end()

    def _error(self, reason: str, at: int | None = None) -> ValueError:
        """Return the error for the text at an offset in the window; None for the next character."""
        if at is None:
            at = self._at
        return ValueError(f"{reason}, at character {self._start + at:,}")
