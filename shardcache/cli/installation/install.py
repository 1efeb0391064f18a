"""`shardcache install`: the daemon, and a cluster's tier, as services of this node."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardcache.cli.common import Family, json_option, print_json
from shardcache.errors import ConfigError

if TYPE_CHECKING:
    from shardcache.cli.installation.target import Done

Command = TypeVar("Command", bound=Callable[..., Any])

_FOLDER = click.Path(path_type=Path, readable=False, file_okay=False)
_FILE = click.Path(path_type=Path, readable=False)
_PLANNED = {"created": "would create", "updated": "would update", "ran": "would run"}
# Files of a running service: what they say now takes effect at its next start.
_OF_THE_SERVICE = (".service", ".socket", ".conf")
_OF_THE_TIER = (*_OF_THE_SERVICE, "/environment")


def _target_options(command: Command) -> Command:
    """Add `--dry-run`, `--root` and `--program`."""
    dry_run = click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
    root = click.option(
        "--root",
        type=_FOLDER,
        default=Path("/"),
        help="Root folder of an image; the service is enabled there, not started.",
    )
    program = click.option(
        "--program",
        type=_FILE,
        help="The shardcache that the service starts.  [default: the one that runs this command]",
    )
    return dry_run(root(program(command)))


@click.group(cls=Family, short_help="Install the daemon, and a cluster's tier, as services of this node.")
def install() -> None:
    """Install the daemon, and a cluster's tier, as services of this node."""


@install.command(short_help="Install the daemon as a systemd service, and start it.")
@_target_options
@click.option("--cache-dir", type=_FOLDER, help="Folder for the cache.  [default: /var/cache/shardcache]")
@json_option
def systemd(dry_run: bool, root: Path, cache_dir: Path | None, program: Path | None, as_json: bool) -> None:
    """Install the daemon as a systemd service, and start it.

    Creates the daemon's user and the group of the users who train, /etc/shardcache/shardcache.toml, the units, and the
    link /usr/local/bin/shardcache; then enables and starts the service. Run it again after an upgrade: what has not
    changed is left alone, and an existing config is kept. Needs root.
    """
    from shardcache.cli.installation.systemd import DaemonService, this_program
    from shardcache.cli.installation.target import Target

    target = Target(root.absolute(), dry_run)
    _check_this_node(target.is_image or dry_run)
    service = DaemonService(target, (program or this_program()).absolute(), cache_dir and cache_dir.absolute())
    steps = _taken(service.install(), dry_run=dry_run, as_json=as_json)
    if as_json:
        print_json({"root": str(target.root), "dry_run": dry_run, "steps": steps})
    elif not dry_run:
        if _changed(steps, *_OF_THE_SERVICE):
            click.echo("Use what was updated: systemctl restart shardcache.socket shardcache.service")
        where = f"--root {shlex.quote(str(target.root))} " if target.is_image else ""
        click.echo(f"Let a user train: usermod {where}--append --groups training NAME")


@install.command(
    short_help="Install this node's part of a cluster's tier as a systemd service, and start it.",
    context_settings={"ignore_unknown_options": True},
)
@click.option(
    "--nodes",
    type=_FILE,
    help="List of all nodes, which is copied to /etc/shardcache/tier/nodes.  [default: that file, if it exists]",
)
@click.option(
    "--certificates",
    type=_FOLDER,
    help="This node's folder of those that `shardcache cluster certificates` wrote; it is copied to "
    "/etc/shardcache/tier.  [default: that folder, if it has them]",
)
@_target_options
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="--store URL [OPTIONS OF CLUSTER RUN]...")
@json_option
def tier(
    nodes: Path | None,
    certificates: Path | None,
    dry_run: bool,
    root: Path,
    program: Path | None,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Install this node's part of a cluster's tier as a systemd service, and start it.

    Takes the options of `shardcache cluster run` and writes them to /etc/shardcache/tier/environment. Installs the list
    of nodes, the certificates and the unit; adds the tier to the daemon's config, or prints what to add if you have
    edited that. Run it again after an upgrade, or with another list or options: what has not changed is left alone.
    Needs root, and nginx.

    \b
    shardcache install tier --nodes nodes --certificates authority/node1 \\
        --store https://s3.eu-central-1.amazonaws.com --max-size 2TiB
    """
    from shardcache.cli.installation.systemd import this_program
    from shardcache.cli.installation.target import Target
    from shardcache.cli.installation.tier_service import SERVICE, service_of

    target = Target(root.absolute(), dry_run)
    _check_this_node(target.is_image or dry_run)
    service = service_of(target, (program or this_program()).absolute(), nodes, certificates, options)
    steps = _taken(service.install(), dry_run=dry_run, as_json=as_json)
    missing = service.missing_from_config()
    if as_json:
        print_json({"root": str(target.root), "dry_run": dry_run, "steps": steps, "add_to_config": missing})
        return
    if _changed(steps, *_OF_THE_TIER) and not dry_run:
        click.echo(f"Use what was updated: systemctl restart {SERVICE}")
    if missing is not None:
        click.echo(f"Add to the daemon's config, and restart the daemon:\n\n{missing}")
    elif not dry_run:
        click.echo("Have a running daemon use the tier: systemctl restart shardcache.service")


def _check_this_node(is_harmless: bool) -> None:
    """Raise ConfigError unless this process can install a service here."""
    if is_harmless:
        return
    if os.geteuid() != 0:
        command = shlex.join(["sudo", str(Path(sys.executable).parent / "shardcache"), *sys.argv[1:]])
        raise ConfigError("only root can install a service", remedy=f"{command}; see what it would do with --dry-run")
    if not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run this machine",
            remedy="for an image, use --root DIR; under another service manager, start `shardcache serve`, or "
            "`shardcache cluster run`",
        )


def _taken(steps: Iterator[Done], *, dry_run: bool, as_json: bool) -> list[dict[str, str]]:
    """Take the steps of an installation, print each unless as JSON, and return what became of them."""
    taken = []
    for step in steps:
        taken.append({"what": step.what, "state": step.state})
        if not as_json:
            click.echo(f"{_PLANNED.get(step.state, step.state) if dry_run else step.state:12}  {step.what}")
    return taken


def _changed(steps: list[dict[str, str]], *ends: str) -> bool:
    return any(step["state"] == "updated" and step["what"].endswith(ends) for step in steps)
