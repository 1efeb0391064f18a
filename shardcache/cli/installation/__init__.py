"""Commands about the installation on a node: shell completion, man pages, config file, systemd service."""
