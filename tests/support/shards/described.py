"""Values of samples as JSON holds them, to compare libraries with each other."""

from decimal import Decimal
from typing import Any

import numpy as np
from PIL import Image


def describe(value: Any) -> Any:
    """Return a value as JSON can hold it, with its type."""
    if isinstance(value, Image.Image):
        return ["image", value.mode, list(value.size), value.tobytes().hex()]
    if type(value).__module__ == "torch":
        array = value.numpy()
        return ["tensor", str(array.dtype), list(array.shape), array.tobytes().hex()]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), list(value.shape), value.tobytes().hex()]
    if isinstance(value, np.generic):
        return ["scalar", str(value.dtype), value.tobytes().hex()]
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, Decimal):
        return ["decimal", str(value)]
    if isinstance(value, list | tuple):
        return ["list", *map(describe, value)]
    if isinstance(value, float):
        return ["float", value.hex()]
    return [type(value).__name__, value]
