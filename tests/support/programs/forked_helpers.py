"""Helper processes of a daemon, forked from it instead of started as new interpreters.

A daemon starts a transport worker and an indexer at once. As new interpreters, these take four
times as much CPU time for their imports as the daemon, which is a fork itself, takes for its whole
start. Their programs run as `python -m` would run them. The modules of other packages are those of
the daemon; ours are a second set, which `set_aside` has imported and the daemon never sees.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from asyncio import unix_events
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import uvloop

from support.programs.processes import comm_of

FORKED = ("shardcache.transport.worker", "shardcache.store.indexing.indexer")

_PR_SET_NAME = 15

_modules_of_daemon: dict[str, ModuleType] = {}
_modules_of_helpers: dict[str, ModuleType] = {}


def set_aside() -> None:
    """Import the helpers' modules for them alone; the next import makes other modules.

    To import our modules takes most of a helper's CPU time, and those of the daemon hold its
    threads, caches and connections.
    """
    for name in FORKED:
        import_module(name)
    _modules_of_helpers.update(_take_out())
    for name in FORKED:
        del _modules_of_helpers[name]  # runs as the main module


def _take_out() -> dict[str, ModuleType]:
    """Return our modules, which are imported no more."""
    names = [name for name in sys.modules if name.split(".")[0] == "shardcache"]
    return {name: sys.modules.pop(name) for name in names}


class ForkingLoop(uvloop.Loop):
    """An event loop that forks the programs in `FORKED`, and executes any other."""

    async def subprocess_exec(
        self, protocol_factory: Callable[[], Any], *args: Any, **options: Any
    ) -> tuple[Any, Any]:
        if args[:3] != (sys.executable, "-P", "-m") or args[3] not in FORKED:
            return await super().subprocess_exec(protocol_factory, *args, **options)
        protocol = protocol_factory()
        waiter = self.create_future()
        become = partial(_become_helper, args[3:], options.get("pass_fds", ()))
        transport = _ForkedTransport(
            self,
            protocol,
            args,
            shell=False,
            bufsize=0,
            waiter=waiter,
            preexec_fn=become,
            **options,
        )
        await waiter
        return transport, protocol


class _ForkedTransport(unix_events._UnixSubprocessTransport):  # type: ignore[name-defined, misc]
    """asyncio's transport of a process that `subprocess` forks without any command."""

    _proc: subprocess.Popen[bytes]

    def _start(self, *args: Any, **options: Any) -> None:
        super()._start(*args, **options)
        pidfd = os.pidfd_open(self._proc.pid)
        self._loop.add_reader(pidfd, self._reap, pidfd)

    def _reap(self, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._process_exited(self._proc.wait())


def _become_helper(command: Sequence[str], kept_fds: Sequence[int]) -> NoReturn:
    """Run a module in place of a program of `subprocess`, with its pipes already there."""
    code = 1
    try:
        _forget_signal_handlers()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, comm_of(command[0]).encode())
        # As after `exec`, and `subprocess` waits for it: a shard that the fork still had open could
        # not be evicted.
        _close_all_but(kept_fds)
        # Kept, not freed: the fork would get a copy of each page that they lie in.
        _modules_of_daemon.update(_take_out())
        sys.modules.update(_modules_of_helpers)
        sys.argv = list(command)
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exn:
        code = exn.code if isinstance(exn.code, int) else int(exn.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(code)  # without what the daemon does at its end


def _forget_signal_handlers() -> None:
    """Handle signals as a new interpreter does: by their defaults, unless ignored."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _close_all_but(kept_fds: Sequence[int]) -> None:
    first = 3
    for fd in sorted(kept_fds):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
