"""The program `shardcache`: the group of all commands, which turns their errors into exit codes.

`app` is the program's entry point. A command may raise any ShardcacheError: `App` prints the error
with its remedy, and exits with the code for it.
"""

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any

import click

from shardcache import __version__
from shardcache.cli import common
from shardcache.shared.exceptions import ShardcacheError

# The module of each command below shardcache.cli, in the order of the help. The command is the
# module's attribute of the same name.
_MODULES = {
    "serve": "starting.serve",
    "stop": "starting.serve",
    "status": "monitoring.status",
    "top": "monitoring.status",
    "dashboard": "monitoring.dashboard_command",
    "write": "making.write_command",
    "warm": "cached_shards",
    "get": "cached_shards",
    "index": "making.index_command",
    "ls": "cached_shards",
    "pin": "cached_shards",
    "unpin": "cached_shards",
    "evict": "cached_shards",
    "verify": "cached_shards",
    "credentials": "credentials",
    "doctor": "doctor.command",
    "probe": "monitoring.probe",
    "simulate": "simulating.simulate",
    "demo": "demo.demo_command",
    "cluster": "cluster",
    "config": "starting.config_command",
}


class LazyCommands(MutableMapping[str, click.Command]):
    """The commands by name, each imported when it is looked up.

    A daemon would take half as long again to start if all commands were imported, and a training
    job that starts its own daemon waits for it. The mapping is mutable because `click.Group`
    requires it.

    Args:
        modules: the module of each command, as in `_MODULES`.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._imported: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._imported:
            module = import_module(f"shardcache.cli.{self._modules[name]}")
            self._imported[name] = getattr(module, name)
        return self._imported[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._imported[name] = command

    def __delitem__(self, name: str) -> None:
        del self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules | self._imported)

    def __len__(self) -> int:
        return len(self._modules | self._imported)


class App(common.OrderedGroup):
    """A group whose commands may raise any ShardcacheError.

    The error is shown as a message, never as a traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn errors into exit codes."""
        try:
            return super().invoke(ctx)
        except ShardcacheError as exn:
            exit_code = common.report_error(exn, ctx)
            ctx.exit(exit_code)
        except KeyboardInterrupt:
            # click itself would print "Aborted!" and exit with 1, but shells and schedulers expect
            # 128 plus the number of SIGINT.
            ctx.exit(common.INTERRUPTED)


@common.examples(
    "write photos/ s3://bucket/train/ --classes --shuffle 7",
    "doctor s3://bucket/train/",
)
@click.group(
    cls=App,
    commands=LazyCommands(_MODULES),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success; 1 failure; 2 usage error; 3 no daemon at the socket.",
)
@click.version_option(__version__, message="shardcache %(version)s")
def app() -> None:
    """Prefetch the shards that training reads next onto this node's disk, once for all jobs."""
