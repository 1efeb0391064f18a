"""Guard that keeps redirects and symbolic links within the places that a user may fetch from."""

from __future__ import annotations

from typing import Protocol


class RedirectGuard(Protocol):
    """Policy for redirects and links.

    Attributes:
        far_only: True if names that resolve to near addresses (`is_near`) are refused.
    """

    @property
    def far_only(self) -> bool: ...  # noqa: D102

    def check_hop(self, source: str, target: str) -> None:
        """Raise NotAllowedError or ConfigError unless users who may fetch `source` may also fetch its `target`."""


class Unrestricted:
    """Policy without restrictions, for a process that reads with its own user's rights."""

    far_only = False

    def check_hop(self, source: str, target: str) -> None:
        """Allow every hop."""
