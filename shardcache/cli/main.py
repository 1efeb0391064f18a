"""The command group, where errors become messages and exit codes."""

from typing import Any

import click

from shardcache import __version__
from shardcache.cli import cluster, common, datasets, demo, serve, shards, simulate, status
from shardcache.cli.doctor.command import doctor
from shardcache.errors import ShardcacheError


class App(common.Family):
    """A group whose commands may raise any ShardcacheError: it is shown as a message, never as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn errors into exit codes."""
        try:
            return super().invoke(ctx)
        except ShardcacheError as exn:
            ctx.exit(common.report(exn, ctx))
        except KeyboardInterrupt:
            # click would print "Aborted!" and exit 1; shells and schedulers expect 128 + SIGINT.
            ctx.exit(common.INTERRUPTED)


@common.examples("write photos/ s3://bucket/train/ --classes --shuffle 7", "doctor s3://bucket/train/")
@click.group(
    cls=App,
    commands=[
        *(serve.serve, serve.stop, status.status, status.top, status.dashboard, datasets.write, shards.warm),
        *(shards.get, datasets.index, shards.ls, shards.pin, shards.unpin, shards.evict, shards.verify, doctor),
        *(status.probe, simulate.simulate, demo.demo, cluster.cluster, serve.config),
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 success; 1 failure; 2 usage error; 3 no daemon at the socket.",
)
@click.version_option(__version__, message="shardcache %(version)s")
def app() -> None:
    """Prefetch the tar shards that training reads next onto this node's disk, once for all jobs."""
