"""Code that the daemon and its clients share: standard library only, for both import it."""
