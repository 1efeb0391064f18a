"""Delayed start of a node's tier, for `shardcache cluster run --wait`.

With --wait, the command waits until its configuration is usable: for instance, until the list of
nodes has this node. The note is a file with the reason for the wait, which the health probe reads.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Event

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.front import WAITING_NOTE

_RETRY_S = 5.0


def run_when_usable(
    run: Callable[[], int],
    run_dir: Path,
    report: Callable[[str], object],
    stopping: Event,
) -> int:
    """Call `run` until it raises no ConfigError; return its result, or 0 if `stopping` is set.

    Between the calls, the note in `run_dir` has the reason, so that the health probe does not
    report a failure. Raises ConfigError if the note cannot be written.

    Args:
        run: starts the tier, returns its exit status when it has ended, or raises ConfigError.
        run_dir: folder for the note.
        report: called with each new reason, for the operator.
        stopping: ends the wait when it is set.
    """
    note = run_dir / WAITING_NOTE
    reason = ""
    while not stopping.is_set():
        try:
            return run()
        except ConfigError as exn:
            if str(exn) != reason:
                reason = str(exn)
                report(f"waiting: {reason}")
            _write_note(note, exn.message)
        stopping.wait(_RETRY_S)
    return 0


def end_waiting(run_dir: Path) -> None:
    """Remove the note, if there is one, as nginx has been started."""
    (run_dir / WAITING_NOTE).unlink(missing_ok=True)


def _write_note(path: Path, text: str) -> None:
    """Write the note, whose folder may be missing. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exn:
        raise ConfigError(
            f"cannot write {exn.filename}: {exn.strerror}",
            remedy="choose another --run-dir",
        ) from None
