"""Access rules: urls that users may have fetched, addresses that only the node reaches, users at a socket."""
