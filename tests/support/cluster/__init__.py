"""A cluster on this machine: an object store, nodes on a network, and a shared cache."""
