"""Delayed start of a node's tier: until, for instance, the list of nodes has this node."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

from shardcache.errors import ConfigError
from shardcache.shared.front import WAITING

_RETRY_S = 5.0


def run_when_usable(
    run: Callable[[], int],
    run_dir: Path,
    say: Callable[[str], object],
    stopping: Event,
) -> int:
    """Call `run` until it raises no ConfigError; return its result, or 0 if `stopping` is set.

    While it waits, a file in `run_dir` has the reason: the health probe then reports no failure.
    """
    note = run_dir / WAITING
    reason = ""
    while not stopping.is_set():
        try:
            return run()
        except ConfigError as exn:
            if str(exn) != reason:
                reason = str(exn)
                say(f"waiting: {reason}")
            _write(note, exn.message)
        stopping.wait(_RETRY_S)
    return 0


def end_waiting(run_dir: Path) -> None:
    """Remove the note, if there is one: nginx has been started."""
    (run_dir / WAITING).unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as exn:
        raise ConfigError(
            f"cannot write {exn.filename}: {exn.strerror}",
            remedy="choose another --run-dir",
        ) from None
