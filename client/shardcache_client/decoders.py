"""Decoders of members: from their bytes to values, by name, by type, or by extension.

Images are decoded by pillow, or by simplejpeg for JPEG where it is installed: both call libjpeg-turbo with its default
settings and return the same pixels; simplejpeg takes a third less time. Video and sound are decoded by torchcodec.

================================================  =========================================================
name                                              value
================================================  =========================================================
`rgb8`, `rgb`                                     numpy array, height × width × 3: uint8; float32, 0 to 1
`torchrgb8`, `torchrgb` or `torch`                tensor, 3 × height × width: uint8; float32, 0 to 1
`pilrgb` or `pil`                                 PIL image
`l8`, `l`, `torchl8`, `torchl`, `pill`, `rgba8`   the same in grey, height × width; and with alpha
`int`, `float`, `text`, `bytes`                   the Python types, which can be given themselves, too
`json`, `msgpack`                                 the value
`npy` or `numpy`, `npz`                           array; dict of arrays. Without pickle
`tenbin`                                          list of arrays, from webdataset's `.ten` and `.tb` files
`tensor`                                          `torch.load(…, weights_only=True)`, in the CPU's memory
`video`, `audio`                                  torchcodec's `VideoDecoder`; its `AudioSamples`
`torch_video`, `torch_audio`                      (frames, t × h × w × 3, sound, rates); (sound, its rate)
`pickle`                                          the object: code from the shard runs in your process
================================================  =========================================================

A member whose extension ends in `.gz` is decompressed for a decoder that is named or goes by extension: `json.gz` is
decoded as `json` is. A type or a function gets the bytes as they are in the shard.
"""

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from shardcache.errors import ConfigError, did_you_mean

Decoder = Callable[[Any], Any]
"""Returns the value of a member, given its bytes, or a Buffer of them."""

Spec = str | type | Decoder
"""A decoder, its name, or one of the types int, float, str and bytes."""

DecoderOf = Callable[[str, str], Decoder | None]
"""Returns the decoder of a member, given its name in the sample and its extension in the tar; None to leave its bytes.

The two differ for a member that takes the name of the first of its alternatives.
"""

_EXTENSIONS_OF_IMAGES = (
    "apng blp bmp bw cur dcx dds dib fit fits flc fli ftc ftu gbr gif icb icns ico iim im j2c "
    "j2k jfif jp2 jpc jpe jpeg jpf jpg jpx msp pbm pcd pcx pgm png pnm ppm psd pxr ras rgb rgba "
    "sgi tga tif tiff vda vst webp xbm xpm"
)
_IMAGES = frozenset(_EXTENSIONS_OF_IMAGES.split())
"""webdataset's extensions of images, but for formats that Pillow cannot read, or reads by running another program."""
_MODES = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
_JPEG = b"\xff\xd8\xff"


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

    # A tensor saved on a GPU is loaded where there may be none, and in workers, which must not touch it.
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _cbor(data: Any) -> Any:
    import cbor

    return cbor.loads(bytes(data))


# webdataset's format of several arrays (its module `tenbin`): chunks of 8 magic bytes, an int64 length, and the content
# padded to whole 64 bytes. An array is two of them: int64s of dtype, name, number of dimensions and each of these; and
# its values.
_CHUNK_MAGIC = b"~TenBin~"
_CHUNK_ALIGNMENT_BYTES = 64
_CHUNK_HEADER = struct.Struct("<8sq")


def _tenbin(data: Any) -> list[Any]:
    chunks = [*_chunks(bytes(data))]
    if len(chunks) % 2:
        raise ValueError("the file ends after the header of an array")
    return [_array_of(header, values) for header, values in zip(chunks[::2], chunks[1::2], strict=True)]


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        magic, size_bytes = _CHUNK_HEADER.unpack_from(data, at)
        at += _CHUNK_HEADER.size
        if magic != _CHUNK_MAGIC:
            raise ValueError("the file is not in the format of .ten and .tb files")
        if not 0 <= size_bytes <= len(data) - at:
            raise ValueError("the file is truncated")
        yield data[at : at + size_bytes]
        at += -(-size_bytes // _CHUNK_ALIGNMENT_BYTES) * _CHUNK_ALIGNMENT_BYTES


def _array_of(header: bytes, values: bytes) -> Any:
    import numpy as np

    numbers = np.frombuffer(header, dtype="<i8")
    kind = header[:8].rstrip(b"\0").decode("ascii")
    dimensions = int(numbers[2])
    shape = tuple(map(int, numbers[3 : 3 + dimensions]))
    return np.frombuffer(values, dtype=f"<{kind}").reshape(shape).copy()  # which owns its memory, and is writable


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
        import numpy as np

        pixels = _fast_rgb(data) if self.color == "rgb" and bytes(data[:3]) == _JPEG else None
        if pixels is None:
            pixels = np.array(_pillow(data, _MODES[self.color]))  # which owns its memory
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


def _fast_rgb(data: Any) -> Any:
    """Return the pixels of a JPEG by simplejpeg; None if it is not installed, or would return others than pillow."""
    with suppress(ImportError, ValueError):  # the latter if it is damaged, which pillow describes or tolerates
        import simplejpeg

        if simplejpeg.decode_jpeg_header(data)[2] == "YCbCr":  # of CMYK it makes slightly different RGB
            return simplejpeg.decode_jpeg(data)
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
    "cbor": _cbor,
    "float": float,
    "int": int,
    "json": _json,
    "msgpack": _msgpack,
    "npy": _npy,
    "npz": _npz,
    "numpy": _npy,
    "pickle": pickle.loads,
    "tenbin": _tenbin,
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
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), _json),
    **dict.fromkeys(("mp", "msg"), _msgpack),
    **dict.fromkeys(("ten", "tb"), _tenbin),
    "cbor": _cbor,
    "npy": _npy,
    "npz": _npz,
    "pth": _tensor,
}
"""webdataset's decoders by extension, but for those that unpickle."""


def decoder(spec: Spec) -> Decoder:
    """Return a decoder. Raises ConfigError if its name is unknown, or a library that it needs is not installed."""
    if not isinstance(spec, str):
        if callable(spec):
            return _TYPES.get(spec, spec)
        remedy = "give a name, a function of the member's bytes, or a type"
        raise ConfigError(f"{spec!r} is not a decoder", remedy=remedy)
    if spec in _OF_IMAGES:
        _check_pillow()
    if spec in _OF_MEDIA:
        _check_torchcodec()
    known: dict[str, Decoder] = _PLAIN | _OF_IMAGES | _OF_MEDIA
    if spec in known:
        return known[spec]
    raise ConfigError(
        f"unknown decoder {spec!r}{did_you_mean(spec, sorted(known))}",
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
            "pip install 'torchcodec<0.14', or a later one from PyTorch's index of CPU wheels",  # PyPI's needs CUDA
        ) from exn


@dataclass(frozen=True, slots=True)
class _GzipDecoder:
    """Decodes what has been compressed with gzip."""

    content: Decoder

    def __call__(self, data: Any) -> Any:
        """Return the value of a member, given its compressed bytes."""
        return self.content(gzip.decompress(bytes(data)))


def by_extension(name: str) -> DecoderOf:
    """Return the choice of decoders by extension: images by `name`, the rest as webdataset does."""
    if name not in _OF_IMAGES:
        raise ConfigError(
            f"decode is {name!r}, which is not an image decoder{did_you_mean(name, _OF_IMAGES)}",
            remedy=f"choose one of {', '.join(sorted(_OF_IMAGES))}; or name the members, as in {{'json': 'json'}}",
        )
    return partial(_by_extension, decoder(name))


def _by_extension(image: Decoder, _name: str, extension: str) -> Decoder | None:
    last = _uncompressed(extension).rpartition(".")[2]
    found = image if last in _IMAGES else _BY_EXTENSION.get(last)
    return _GzipDecoder(found or bytes) if _is_compressed(extension) else found


def by_table(decode: Mapping[str, Spec]) -> DecoderOf:
    """Return the choice of decoders by a table whose keys are names of members, or alternatives: "jpg;png".

    Raises ConfigError for a decoder that is unknown, or needs a library that is not installed.
    """
    decoders = {_first_of(names): _decoder_of(names, spec) for names, spec in decode.items()}
    named = frozenset(_first_of(names) for names, spec in decode.items() if isinstance(spec, str))
    return partial(_by_table, decoders, named)


def _by_table(decoders: Mapping[str, Decoder], named: Collection[str], name: str, extension: str) -> Decoder | None:
    found = decoders.get(name)
    if found is not None and name in named and _is_compressed(extension):
        return _GzipDecoder(found)
    return found


def _first_of(names: str) -> str:
    return names.lower().partition(";")[0]


def _decoder_of(names: str, spec: Spec) -> Decoder:
    try:
        return decoder(spec)
    except ConfigError as exn:
        raise ConfigError(f"decode[{names!r}]: {exn.message}", remedy=exn.remedy) from None


def _is_compressed(extension: str) -> bool:
    return extension.rpartition(".")[2] == "gz"


def _uncompressed(extension: str) -> str:
    """Return an extension without the compression: "json" for "json.gz", nothing for "gz" alone."""
    return extension.removesuffix("gz").removesuffix(".") if _is_compressed(extension) else extension
