"""Entry point of the `shardcache` command and of `python -m shardcache`."""

import sys


def main() -> None:
    """Run the command line. If its packages are missing, print a remedy and exit with status 2."""
    try:
        from shardcache.cli.main import app

        app(prog_name="shardcache")
    except ModuleNotFoundError as exn:
        package, _, _ = (exn.name or "").partition(".")
        if package == "shardcache":
            raise  # a fault of shardcache, not of its installation
        # A training image may have only the client installed, which has no command line.
        print(
            f"shardcache: the command line needs the package {package!r}, which is not installed\n"
            "  What to do: pip install 'shardcache[daemon]'",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
