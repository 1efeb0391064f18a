"""`shardcache completion`: completion of commands, options and values in a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")
# Set by the script when it asks the command for completions.
_VARIABLE = "_SHARDCACHE_COMPLETE"


@click.command(short_help="Print a completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and values in a shell.

    Put it where the shell looks for it, and open a new shell:

    \b
    shardcache completion bash > ~/.local/share/bash-completion/completions/shardcache
    shardcache completion zsh  > "${fpath[1]}/_shardcache"
    shardcache completion fish > ~/.config/fish/completions/shardcache.fish
    """
    made = get_completion_class(shell)
    assert made is not None  # click has all of these
    root = ctx.find_root()
    click.echo(made(root.command, {}, str(root.info_name), _VARIABLE).source())
