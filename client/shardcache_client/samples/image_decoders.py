"""Decoders of images: by pillow, or by simplejpeg for JPEG where it is installed.

Both return the same pixels; simplejpeg is faster. An image that simplejpeg cannot decode, or would
decode differently, is left to pillow.
"""

import io
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

COLORS = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
"""The colors in the names of decoders, each with Pillow's mode: grey, RGB, and RGB with alpha."""

_JPEG = b"\xff\xd8\xff"  # the first bytes of a JPEG file


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes an image file.

    Attributes:
        color: "l" (grey), "rgb", or "rgba" (with alpha).
        container: "numpy" (height x width x colors), "torch" (colors x height x width) or "pil".
            Grey arrays and tensors are height x width.
        is_uint8: True for values from 0 to 255, False for floats from 0 to 1.
    """

    color: str
    container: str
    is_uint8: bool

    def __call__(self, data: Any) -> Any:
        """Return the image in a file with these bytes."""
        if self.container == "pil":
            return _decoded_by_pillow(data, COLORS[self.color])
        import numpy as np

        pixels = None
        if self.color == "rgb" and bytes(data[:3]) == _JPEG:
            pixels = _decoded_by_simplejpeg(data)
        if pixels is None:
            image = _decoded_by_pillow(data, COLORS[self.color])
            pixels = np.array(image)  # This makes a writable copy.
        if not self.is_uint8:
            pixels = pixels.astype("float32") / 255
        if self.container == "numpy":
            return pixels
        import torch

        tensor = torch.from_numpy(pixels)
        if tensor.ndim == 2:  # grey
            return tensor
        return tensor.permute(2, 0, 1).contiguous()


def _decoded_by_pillow(data: Any, mode: str) -> Any:
    """Return a PIL image in one of pillow's modes."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert(mode)  # This reads the whole file, which `open` alone does not.


def _decoded_by_simplejpeg(data: Any) -> Any:
    """Return the RGB pixels of a JPEG, as a numpy array.

    Returns None if simplejpeg is not installed, fails, or would return other pixels than pillow.
    """
    # simplejpeg raises ValueError for a damaged file, which pillow then describes or tolerates.
    with suppress(ImportError, ValueError):
        import simplejpeg

        _height, _width, color_space, _subsampling = simplejpeg.decode_jpeg_header(data)
        # For CMYK, simplejpeg returns slightly different RGB values than pillow.
        if color_space == "YCbCr":
            return simplejpeg.decode_jpeg(data)
    return None
