"""Operations that users ask for: warm, pin, list, evict, verify, probe."""
