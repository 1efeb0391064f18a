"""Worker processes that move the bodies of HTTP answers into files, and the daemon's side."""
