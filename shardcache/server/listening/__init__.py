"""The daemon's sockets, Unix and TCP, bound or activated; and limits on their connections."""
