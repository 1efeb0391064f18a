"""The command group, where errors become messages and exit codes."""

from typing import Any

import click

from shardcache import __version__
from shardcache.cli.cluster import cluster
from shardcache.cli.common import INTERRUPTED, Family, report
from shardcache.cli.datasets import index, write
from shardcache.cli.demo import demo
from shardcache.cli.doctor.command import doctor
from shardcache.cli.serve import config, serve, stop
from shardcache.cli.shards import evict, ls, pin, unpin, verify, warm
from shardcache.cli.status import dashboard, probe, status, top
from shardcache.errors import ShardcacheError


class App(Family):
    """A group whose commands may raise any ShardcacheError: it is shown as a message, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn errors into exit codes."""
        try:
            return super().invoke(ctx)
        except ShardcacheError as exn:
            ctx.exit(report(exn, ctx))
        except KeyboardInterrupt:
            # click would print "Aborted!" and exit 1; shells and schedulers expect 128 + SIGINT.
            ctx.exit(INTERRUPTED)


@click.group(
    cls=App,
    commands=[
        *(serve, stop, status, top, dashboard, write, warm, index, ls, pin, unpin, evict, verify, doctor, probe, demo),
        *(cluster, config),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success; 1 failure; 2 usage error; 3 no daemon at the socket.",
)
@click.version_option(__version__, message="shardcache %(version)s")
def app() -> None:
    """Prefetch the tar shards that training reads next onto this node's disk, once for all jobs."""
