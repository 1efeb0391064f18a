"""Messages, parts and descriptors that pass between the daemon and its workers."""
