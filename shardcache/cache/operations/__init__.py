"""Operations that users ask for: warm, index, pin, list, evict, verify."""
