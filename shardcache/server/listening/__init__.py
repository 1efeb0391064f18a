"""The daemon's sockets: bound or activated, on the Unix socket and TCP; and who may connect."""
