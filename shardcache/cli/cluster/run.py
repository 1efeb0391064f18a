"""`shardcache cluster run`: this node's part of the tier, as a service manager or a scheduler starts it."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardcache.cli.cluster.options import nodes_option, tier_of, tier_options
from shardcache.cli.common import json_option, print_json
from shardcache.errors import ConfigError, DaemonError

if TYPE_CHECKING:
    from shardcache.cluster.tier import Tier


@click.command(short_help="Run this node's nginx, and follow changes of the list of nodes.")
@nodes_option
@click.option("--node", metavar="NAME", help="This node's name or address in the list.  [default: its host name]")
@tier_options
@json_option
def run(nodes: str, stores: tuple[str, ...], node: str | None, as_json: bool, **options: Any) -> None:
    """Run this node's nginx until SIGTERM, with the configuration that `shardcache cluster render` would write.

    While it runs, changes of the file with the list of nodes, and of the certificates, are put to use within seconds.
    It clears the cache if this machine went down before the tier was stopped, and publishes the figures that
    `shardcache cluster status` shows.
    """
    import asyncio
    from threading import Event

    from shardcache.cluster.running import NodeTier
    from shardcache.server.service_manager import ServiceNotifier

    if nodes == "-":
        raise ConfigError("the list of nodes is read again when it changes", remedy="put it into a file: --nodes FILE")

    def read() -> Tier:
        return tier_of(nodes, stores, **options)

    def say(message: str) -> None:
        if as_json:
            print_json({"event": "message", "message": message})
        else:
            click.echo(message, err=True)

    notifier = ServiceNotifier.take(os.environ, os.getpid())

    def ready(line: str) -> None:
        if as_json:
            print_json({"event": "ready", "message": line})
        else:
            click.echo(f"ready: {line}")
        asyncio.run(notifier.tell(READY=1, STATUS=line))

    files = (options["ca"], options["certificate"], options["key"], nodes)
    watched = tuple(Path(file) for file in files if Path(file).is_file())
    stopping = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    status = NodeTier(read, node or host_name(), watched, say=say, ready=ready).run(stopping)
    if status:
        raise DaemonError(f"nginx ended with status {status}", remedy="see its message above, or the kernel's in dmesg")


def host_name() -> str:
    """Return the name under which a list has this node by default."""
    return socket.gethostname().partition(".")[0]
