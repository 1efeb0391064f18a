"""Commands that start a daemon, stop it, and show its options: `serve`, `stop`, `config`."""
