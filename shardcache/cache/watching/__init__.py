"""What pages that stay open are shown: who waits, what the next minutes need, and a map of what is here."""
