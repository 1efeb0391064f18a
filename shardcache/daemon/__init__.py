"""One daemon's run: its parts are built, prepared and served until it is to stop."""
