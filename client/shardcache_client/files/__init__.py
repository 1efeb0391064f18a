"""Files of cached shards: mapped into memory and sliced into samples."""
