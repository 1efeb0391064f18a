"""Environment of the tests: no options, stores and credentials of the user or the machine, and Ctrl-C as usual."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import MutableMapping
from pathlib import Path

# Options of the daemon, credentials and places of stores, proxies, ranks set by a launcher, a service
# manager's sockets, and what changes the look of terminals.
_OTHERS = re.compile(
    r"(?:SHARDCACHE|AWS|GOOGLE|GCS|AZURE|HF|FSSPEC|XDG|SLURM|PMI|OMPI|TORCHELASTIC|LISTEN|WATCHDOG)_"
    r"|(?:https?|ftp|all|no)_proxy$|(?:REQUESTS|CURL)_CA_BUNDLE$"
    r"|(?:(?:LOCAL|GROUP|NODE|ROLE)_)?RANK$|(?:(?:LOCAL|GROUP|ROLE)_)?WORLD_SIZE$|MASTER_(?:ADDR|PORT)$"
    r"|NOTIFY_SOCKET$|(?:NO|FORCE|CLI)COLOR|(?:NO|FORCE)_COLOR$|COLUMNS$|LINES$",
    re.IGNORECASE,
)


def isolate(folder: Path, env: MutableMapping[str, str] = os.environ) -> None:
    """Take what belongs to the machine out of an environment; in `folder` lie an empty home and an empty config file.

    The daemon at the default socket and the config file in /etc are hidden by the variables that come before them.
    Other users may enter the folder, for some tests change to one.
    """
    for name in [name for name in env if _OTHERS.match(name)]:
        del env[name]
    home, config = folder / "home", folder / "shardcache.toml"
    home.mkdir()
    config.touch()
    folder.chmod(0o755)
    env["HOME"], env["SHARDCACHE_CONFIG"] = str(home), str(config)
    env["SHARDCACHE_SOCKET"] = str(folder / "none.sock")
    env["AWS_EC2_METADATA_DISABLED"] = "true"


def heed_interrupts() -> None:
    """Let SIGINT end this process and those that it starts: a shell has what it runs in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
