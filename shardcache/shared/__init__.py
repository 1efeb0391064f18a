"""Code that the daemon and its clients share; it uses the standard library alone."""
