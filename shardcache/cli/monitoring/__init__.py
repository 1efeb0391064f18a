"""Commands that show the state of a daemon: `status`, `top`, `dashboard`, `probe`."""
