"""A cluster on this machine: an object store and nodes on a network of their own, and the nodes' shared cache."""
