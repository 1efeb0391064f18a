"""Helper processes of a daemon, forked from it instead of started as new interpreters.

A daemon starts a transport worker and an indexer at once. As new interpreters, these take four times as much CPU time
for their imports as the daemon, which is a fork itself, takes for its whole start. Their programs run as `python -m`
would run them. The modules of other packages are those of the daemon; ours are a second set, which `set_aside` has
imported and the daemon never sees.
"""

import ctypes
import os
import runpy
import signal
import sys
import traceback
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import uvloop

from support.programs.processes import comm_of

FORKED = ("shardcache.transport.worker", "shardcache.store.indexing.indexer")

_PR_SET_NAME = 15

_modules_of_helpers: dict[str, ModuleType] = {}


def set_aside() -> None:
    """Import what the helpers import, for them alone: the next import of such a module makes another.

    To import our modules takes most of a helper's CPU time, and those of the daemon hold its threads, caches and
    connections.
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

    async def subprocess_exec(self, protocol_factory: Callable[[], Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        if args[:3] != (sys.executable, "-P", "-m") or args[3] not in FORKED:
            return await super().subprocess_exec(protocol_factory, *args, **options)
        protocol = protocol_factory()
        waiter = self.create_future()
        transport = _ForkedTransport(
            self,
            protocol,
            args[3:],
            shell=False,
            stdin=options["stdin"],
            stdout=options["stdout"],
            stderr=None,
            bufsize=0,
            waiter=waiter,
            kept_fds=tuple(options.get("pass_fds", ())),
        )
        await waiter
        return transport, protocol


class _ForkedTransport(BaseSubprocessTransport):
    """asyncio's transport of a process, with a fork as its process."""

    _proc: Any

    def _start(self, args: Any, kept_fds: Sequence[int], **_: Any) -> None:  # type: ignore[override]
        module, *arguments = args
        self._proc = _ForkedHelper(module, arguments, kept_fds)
        self._loop.add_reader(self._proc.pidfd, self._reap)

    def _reap(self) -> None:
        helper = self._proc
        self._loop.remove_reader(helper.pidfd)
        self._process_exited(helper.reap())


class _ForkedHelper:
    """A fork of this process that runs a module, with as much of Popen's interface as asyncio's transport needs."""

    stderr = None

    def __init__(self, module: str, arguments: Sequence[str], kept_fds: Sequence[int]) -> None:
        self.returncode: int | None = None
        child_in, own_in = os.pipe()
        own_out, child_out = os.pipe()
        # Closed once the fork has its name and none of the daemon's files, as after `exec`: a shard that it still had
        # open could not be evicted.
        named, naming = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _become_helper(module, arguments, child_in, child_out, naming, kept_fds)
        self.pidfd = os.pidfd_open(self.pid)
        for fd in (child_in, child_out, naming):
            os.close(fd)
        os.read(named, 1)
        os.close(named)
        self.stdin = os.fdopen(own_in, "wb", 0)
        self.stdout = os.fdopen(own_out, "rb", 0)

    def poll(self) -> int | None:
        return self.returncode

    def reap(self) -> int:
        """Return the exit status of the process, which has ended."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)


def _become_helper(
    module: str, arguments: Sequence[str], stdin: int, stdout: int, naming: int, kept_fds: Sequence[int]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        _forget_signal_handlers()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        ctypes.CDLL(None).prctl(_PR_SET_NAME, comm_of(module).encode())
        _close_all_but((*kept_fds, naming))
        os.close(naming)
        _take_out()
        sys.modules.update(_modules_of_helpers)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exn:
        code = exn.code if isinstance(exn.code, int) else int(exn.code is not None)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(code)  # without what the daemon does at its end


def _forget_signal_handlers() -> None:
    """Handle signals as a new interpreter does: by their defaults, but for those that are ignored."""
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
