"""Type variables of datasets and loaders, for editors and type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # defaults of type variables: PEP 696, in the standard library from 3.13 on

    T_co = TypeVar("T_co", covariant=True, default=dict[str, Any])
    B_co = TypeVar("B_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    B_co = TypeVar("B_co", covariant=True)

U = TypeVar("U")

__all__ = ["B_co", "T_co", "U"]
