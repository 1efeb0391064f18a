"""Worker processes that move the bodies of HTTP answers from sockets into files, and the daemon's side of them."""
