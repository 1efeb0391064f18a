"""The remote side: any store that holds shards, behind one small Protocol."""
