"""Decoders of images, with webdataset's names: pillow's, or simplejpeg's for JPEG where it is installed.

simplejpeg and pillow both call libjpeg-turbo with its default settings and return the same pixels; simplejpeg takes a
third less time (docs/benchmarks.md).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardcache.errors import ConfigError

EXTENSIONS = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"})

_MODES = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
_JPEG = b"\xff\xd8\xff"


def image_decoders() -> Mapping[str, Callable[[], Callable[[Any], Any]]]:
    """Return the factories of all image decoders by name.

    "rgb8" gives a numpy array of uint8, height x width x 3; "rgb" one of float32 from 0 to 1; "torchrgb8" and
    "torchrgb" give such tensors as 3 x height x width; "pilrgb" gives a PIL image. The same for "l" (height x
    width) and "rgba". "torch" is "torchrgb", "pil" is "pilrgb".
    """
    names = {}
    for color in _MODES:
        for container in ("", "torch"):
            for depth in ("", "8"):
                names[f"{container}{color}{depth}"] = ImageDecoder(color, container or "numpy", depth == "8").checked
        names[f"pil{color}"] = ImageDecoder(color, "pil", True).checked
    return names | {"torch": names["torchrgb"], "torch8": names["torchrgb8"], "pil": names["pilrgb"]}


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes an image file.

    Attributes:
        color: "l", "rgb" or "rgba".
        container: "numpy", "torch" or "pil".
        is_uint8: True for values from 0 to 255, False for floats from 0 to 1.
    """

    color: str
    container: str
    is_uint8: bool

    def checked(self) -> ImageDecoder:
        """Return this decoder. Raises ConfigError if a library that it needs is not installed."""
        try:
            import numpy  # noqa: F401
            import PIL.Image  # noqa: F401
        except ImportError as exn:
            raise ConfigError(
                f"decoding images needs the Python package {exn.name}", remedy="pip install pillow numpy"
            ) from exn
        return self

    def __call__(self, data: Any) -> Any:
        """Return the image in a file with these bytes."""
        if self.container == "pil":
            return _pillow(data, _MODES[self.color])
        pixels = _pixels(data, self.color)
        if not self.is_uint8:
            pixels = pixels.astype("float32") / 255
        if self.container == "numpy":
            return pixels
        import torch

        tensor = torch.from_numpy(pixels)
        return tensor if tensor.ndim == 2 else tensor.permute(2, 0, 1).contiguous()


def _pillow(data: Any, mode: str) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert(mode)  # reads the whole file, which `open` alone does not


def _pixels(data: Any, color: str) -> Any:
    """Return an image as a numpy array of uint8 that owns its memory."""
    import numpy as np

    pixels = _fast_rgb(data) if color == "rgb" and bytes(data[:3]) == _JPEG else None
    return np.array(_pillow(data, _MODES[color])) if pixels is None else pixels


def _fast_rgb(data: Any) -> Any:
    """Return the pixels of a JPEG by simplejpeg; None if it is not installed, or would return others than pillow."""
    try:
        import simplejpeg
    except ImportError:
        return None
    try:
        if simplejpeg.decode_jpeg_header(data)[2] == "YCbCr":  # of CMYK it makes slightly different RGB
            return simplejpeg.decode_jpeg(data)
    except ValueError:
        pass  # damaged, which pillow describes or tolerates
    return None
