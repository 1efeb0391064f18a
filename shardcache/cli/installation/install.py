"""`shardcache install`: the daemon as a service of this node."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import click

from shardcache.cli.common import Family, json_option, print_json
from shardcache.errors import ConfigError

_FOLDER = click.Path(path_type=Path, readable=False, file_okay=False)
_PLANNED = {"created": "would create", "updated": "would update", "ran": "would run"}
# Files of a running service: what they say now takes effect at its next start.
_OF_THE_SERVICE = (".service", ".socket", ".conf")


@click.group(cls=Family, short_help="Install the daemon as a service of this node.")
def install() -> None:
    """Install the daemon as a service of this node."""


@install.command(short_help="Install the daemon as a systemd service, and start it.")
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
@click.option(
    "--root",
    type=_FOLDER,
    default=Path("/"),
    help="Root folder of an image; the service is enabled there, not started.",
)
@click.option("--cache-dir", type=_FOLDER, help="Folder for the cache.  [default: /var/cache/shardcache]")
@click.option(
    "--program",
    type=click.Path(path_type=Path, readable=False),
    help="The shardcache that the service starts.  [default: the one that runs this command]",
)
@json_option
def systemd(dry_run: bool, root: Path, cache_dir: Path | None, program: Path | None, as_json: bool) -> None:
    """Install the daemon as a systemd service, and start it.

    Creates the daemon's user and the group of the users who train, /etc/shardcache/shardcache.toml, the units, and the
    link /usr/local/bin/shardcache; then enables and starts the service. Run it again after an upgrade: what has not
    changed is left alone, and an existing config is kept. Needs root.
    """
    from shardcache.cli.installation.systemd import Installation, this_program

    root = root.absolute()
    if root == Path("/") and not dry_run:
        _check_this_node()
    started = program or this_program()
    installation = Installation(root, started.absolute(), cache_dir and cache_dir.absolute(), dry_run=dry_run)
    steps = []
    for step in installation.run():
        steps.append({"what": step.what, "state": step.state})
        if not as_json:
            click.echo(f"{_PLANNED.get(step.state, step.state) if dry_run else step.state:12}  {step.what}")
    if as_json:
        print_json({"root": str(root), "dry_run": dry_run, "steps": steps})
    elif not dry_run:
        _print_next(steps, root)


def _check_this_node() -> None:
    """Raise ConfigError unless this process can install a service here."""
    if os.geteuid() != 0:
        command = shlex.join(["sudo", str(Path(sys.executable).parent / "shardcache"), *sys.argv[1:]])
        raise ConfigError("only root can install a service", remedy=f"{command}; see what it would do with --dry-run")
    if not Path("/run/systemd/system").is_dir():
        raise ConfigError(
            "systemd does not run this machine",
            remedy="for an image, use --root DIR; under another service manager, start `shardcache serve`",
        )


def _print_next(steps: list[dict[str, str]], root: Path) -> None:
    if any(step["state"] == "updated" and step["what"].endswith(_OF_THE_SERVICE) for step in steps):
        click.echo("Use what was updated: systemctl restart shardcache.socket shardcache.service")
    where = "" if root == Path("/") else f"--root {shlex.quote(str(root))} "
    click.echo(f"Let a user train: usermod {where}--append --groups training NAME")
