"""Commands on a terminal, as a person sees and types."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Sequence

from support.programs.cli import clean_environment

LEAVE_ALTERNATE_SCREEN = "\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: Sequence[str], *, columns: int = 120) -> None:
        self._near, far = pty.openpty()
        env = clean_environment({"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"})
        self._process = subprocess.Popen(command, env=env, stdin=far, stdout=far, stderr=far)
        os.close(far)
        self.seen = ""

    def read_until(self, text: str) -> None:
        """Take what is shown until `text` has been."""
        while text not in self.seen:
            self.seen += os.read(self._near, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        """Type a key."""
        os.write(self._near, key.encode())

    def interrupt(self) -> None:
        """Send what Ctrl-C sends."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        """Return the exit code once all that was shown is read."""
        try:
            self.read_until("never shown")
        except OSError:  # nobody has the other end open any more
            return self._process.wait()
        raise AssertionError("a terminal has no other end")

    def close(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._near)
