"""Commands that show how a daemon is doing: `status`, `top`, `dashboard`, `probe`."""
