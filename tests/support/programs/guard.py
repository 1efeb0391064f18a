"""Guard of the tests' waits."""

GUARD_S = 300.0
"""For what must happen: it keeps a test that waits in vain from hanging, and says nothing of how fast anything is."""
