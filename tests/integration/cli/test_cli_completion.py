"""Completion: the offers of the script that docs/commands.md has a shell ask for."""

import pytest

from support.programs.cli import shardcache


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sta", {"plain,status"}),
        ("serve --cap", {"plain,--capacity"}),
        ("serve --log-format ", {"plain,text", "plain,json"}),
        ("config ch", {"plain,check"}),
        ("warm sha", {"file,sha"}),
        ("serve --cache-dir sha", {"file,sha"}),
        ("config check sha", {"file,sha"}),
    ],
)
def test_commands_options_values_and_paths_are_completed(line: str, offered: set[str]) -> None:
    """Commands, options and their values are offered by their beginning; paths are left to the shell."""
    words = f"shardcache {line}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_SHARDCACHE_COMPLETE": "bash_complete"}
    assert set(shardcache(env=asked).out.splitlines()) == offered
