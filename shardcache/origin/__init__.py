"""Origins: the remote places that shards come from, behind one small Protocol."""
