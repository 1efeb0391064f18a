"""Lists of shards that a user asks for at once: warmed or counted."""
