"""Commands that start a daemon, stop it, or show its options: `serve`, `stop`, `config`."""
