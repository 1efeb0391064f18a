"""Decoders by name, and the table of those that a dataset applies to its members.

Images are decoded by pillow, or by simplejpeg for JPEG where it is installed: both call libjpeg-turbo with its default
settings and return the same pixels; simplejpeg takes a third less time (docs/benchmarks.md). Video and sound are
decoded by torchcodec.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from shardcache.errors import ConfigError, did_you_mean

Decoder = Callable[[Any], Any]
"""Returns the value of a member, given its bytes, or a Buffer of them."""

Spec = str | type | Decoder
"""A decoder, its name, or one of the types int, float, str and bytes."""

_IMAGES = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"})
_MODES = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
_JPEG = b"\xff\xd8\xff"
_PYPI_CPU = "0.14"
"""The first release of torchcodec whose wheel on PyPI needs CUDA's libraries."""


def _text(data: Any) -> str:
    return bytes(data).decode()


def _json(data: Any) -> Any:
    return json.loads(bytes(data))


def _npy(data: Any) -> Any:
    import numpy as np

    return np.load(io.BytesIO(data), allow_pickle=False)


def _npz(data: Any) -> dict[str, Any]:
    import numpy as np

    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _msgpack(data: Any) -> Any:
    import msgpack

    return msgpack.unpackb(bytes(data))


def _tensor(data: Any) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)


def _pickle(data: Any) -> Any:
    import pickle

    return pickle.loads(bytes(data))


@dataclass(frozen=True, slots=True)
class ImageDecoder:
    """Decodes an image file."""

    color: str  # "l", "rgb" or "rgba"
    container: str  # "numpy" (height x width, or height x width x colors), "torch" (colors first) or "pil"
    is_uint8: bool  # True for values from 0 to 255, False for floats from 0 to 1

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


def _video(data: Any) -> Any:
    return _movable_decoder()(bytes(data))


@cache
def _movable_decoder() -> Callable[[bytes], Any]:
    from torchcodec.decoders import VideoDecoder

    class MovableVideoDecoder(VideoDecoder):  # type: ignore[misc]
        """A VideoDecoder that passes to other processes as the encoded video; torchcodec's own would crash them."""

        def __init__(self, encoded: bytes) -> None:
            super().__init__(encoded)
            self._encoded = encoded

        def __reduce__(self) -> tuple[Any, ...]:
            return _video, (self._encoded,)

    return MovableVideoDecoder


def _audio(data: Any) -> Any:
    from torchcodec.decoders import AudioDecoder

    return AudioDecoder(bytes(data)).get_all_samples()


def _torch_audio(data: Any) -> tuple[Any, int]:
    samples = _audio(data)
    return samples.data, samples.sample_rate


def _torch_video(data: Any) -> tuple[Any, Any, dict[str, float]]:
    """Return frames (time x height x width x 3), sound (empty if there is none) and their rates."""
    import torch
    from torchcodec.decoders import AudioDecoder, VideoDecoder

    encoded = bytes(data)
    video = VideoDecoder(encoded, dimension_order="NHWC")
    frames, rates = video[:], {"video_fps": video.metadata.average_fps}
    try:
        sound = AudioDecoder(encoded)
    except ValueError:  # no sound, as the video could be opened
        return frames, torch.empty(1, 0), rates
    samples = sound.get_all_samples()
    return frames, samples.data, rates | {"audio_fps": samples.sample_rate}


_PLAIN: dict[str, Decoder] = {
    "bytes": bytes,
    "float": float,
    "int": int,
    "json": _json,
    "msgpack": _msgpack,
    "npy": _npy,
    "npz": _npz,
    "numpy": _npy,
    "pickle": _pickle,
    "tensor": _tensor,
    "text": _text,
}
_TYPES: dict[Any, Decoder] = {bytes: bytes, float: float, int: int, str: _text}
_OF_IMAGES: dict[str, Decoder] = {
    f"{'' if container == 'numpy' else container}{color}{depth}": ImageDecoder(color, container, depth == "8")
    for color in _MODES
    for container in ("numpy", "torch")
    for depth in ("", "8")
}
_OF_IMAGES |= {f"pil{color}": ImageDecoder(color, "pil", True) for color in _MODES}
_OF_IMAGES |= {"torch": _OF_IMAGES["torchrgb"], "torch8": _OF_IMAGES["torchrgb8"], "pil": _OF_IMAGES["pilrgb"]}
_OF_MEDIA = {"video": _video, "audio": _audio, "torch_video": _torch_video, "torch_audio": _torch_audio}

_BY_EXTENSION: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("mp", "msg", "msgpack"), _msgpack),
    "npy": _npy,
    "npz": _npz,
    "pth": _tensor,
}
"""webdataset's decoders by extension, but for those that unpickle."""


def decoder(spec: Spec) -> Decoder:
    """Return a decoder. Raises ConfigError if its name is unknown, or a library that it needs is not installed."""
    if isinstance(spec, str):
        return _named(spec)
    if spec in _TYPES:
        return _TYPES[spec]
    if callable(spec):
        return spec
    raise ConfigError(f"{spec!r} is not a decoder", remedy="give a name, a function of the member's bytes, or a type")


def _named(name: str) -> Decoder:
    if name in _OF_IMAGES:
        _check_pillow()
    if name in _OF_MEDIA:
        _check_torchcodec()
    known: dict[str, Decoder] = _PLAIN | _OF_IMAGES | _OF_MEDIA
    if name in known:
        return known[name]
    raise ConfigError(
        f"unknown decoder {name!r}{did_you_mean(name, sorted(known))}",
        remedy=f"choose one of {', '.join(sorted(known))}; or pass a function of the member's bytes",
    )


def _check_pillow() -> None:
    try:
        import numpy  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as exn:
        raise ConfigError(
            f"decoding images needs the Python package {exn.name}", remedy="pip install pillow numpy"
        ) from exn


def _check_torchcodec() -> None:
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as exn:  # without FFmpeg's libraries it is a RuntimeError
        raise ConfigError(
            f"decoding video and audio needs torchcodec: {str(exn).splitlines()[0] if str(exn) else exn!r}",
            remedy="install FFmpeg, 4 to 8, and torchcodec of a release that fits your torch; without a GPU, "
            f"pip install 'torchcodec<{_PYPI_CPU}', or a later one from PyTorch's index of CPU wheels",
        ) from exn


def by_extension(name: str) -> Callable[[str], Decoder | None]:
    """Return a function from an extension to its decoder, or None: images by `name`, the rest as webdataset does."""
    if name not in _OF_IMAGES:
        raise ConfigError(
            f"decode is {name!r}, which is not an image decoder{did_you_mean(name, _OF_IMAGES)}",
            remedy=f"choose one of {', '.join(sorted(_OF_IMAGES))}; or name the members, as in {{'json': 'json'}}",
        )
    return partial(_by_extension, _named(name))


def _by_extension(image: Decoder, extension: str) -> Decoder | None:
    last = extension.rpartition(".")[2]
    return image if last in _IMAGES else _BY_EXTENSION.get(last)


def decoders(specs: Mapping[str, Spec]) -> dict[str, Decoder]:
    """Return the decoders of a table by extension. Raises ConfigError as `decoder` does, naming the extension."""
    found = {}
    for extension, spec in specs.items():
        try:
            found[extension] = decoder(spec)
        except ConfigError as exn:
            raise ConfigError(f"decode[{extension!r}]: {exn.message}", remedy=exn.remedy) from None
    return found
