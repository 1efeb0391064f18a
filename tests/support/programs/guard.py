"""Guard of the tests' waits."""

GUARD_S = 300.0
"""A limit that keeps a test that waits in vain from hanging, and measures no speed."""
