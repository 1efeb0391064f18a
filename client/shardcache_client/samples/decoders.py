"""Decoders of members' bytes, chosen by name, by type, or by the member's extension.

Images are decoded by pillow, or by simplejpeg for JPEG where it is installed: both call
libjpeg-turbo with its default settings and return the same pixels; simplejpeg takes a third less
time. Video and sound are decoded by torchcodec.

====================================  ========================================================
name                                  value
====================================  ========================================================
`rgb8`                                numpy array of uint8: height × width × 3
`rgb`                                 the same of float32, from 0 to 1
`rgba8`, `rgba`                       the same with alpha: height × width × 4
`l8`, `l`                             the same in grey: height × width
`torchrgb8`, `torchrgb`, `torchl`, …  tensor, with the colors first: 3 × height × width
`torch8`, `torch`                     the same as `torchrgb8`, `torchrgb`
`pilrgb` or `pil`, `pilrgba`, `pill`  PIL image
`int`, `float`, `text`, `bytes`       int, float, str, bytes
`json`, `msgpack`, `cbor`             the value
`npy` or `numpy`                      numpy array; pickled objects in it are refused
`npz`                                 dict of such arrays
`tenbin`                              list of arrays, from webdataset's `.ten` and `.tb` files
`tensor`                              `torch.load(…, weights_only=True)`, in the CPU's memory
`video`                               torchcodec's `VideoDecoder`
`audio`                               torchcodec's `AudioSamples`
`torch_video`                         frames, sound and rates: see `media_decoders`
`torch_audio`                         sound and its rate: see `media_decoders`
`pickle`                              the object: code from the shard runs in your process
====================================  ========================================================

A decoder can also be given as a type, such as int or str, or as a function of the bytes.

A member whose extension ends in `.gz` is decompressed first if its decoder is chosen by name or by
extension: `json.gz` is decoded as `json` is. A type or a function gets the bytes as they are in the
shard.
"""

import gzip
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardcache.shared.exceptions import ConfigError
from shardcache.shared.wording.remedies import did_you_mean
from shardcache_client.arguments.values import shown
from shardcache_client.samples.image_decoders import COLORS, ImageDecoder
from shardcache_client.samples.media_decoders import audio, torch_audio, torch_video, video
from shardcache_client.samples.member_choice import common_name
from shardcache_client.samples.plain_decoders import (
    cbor_value,
    json_value,
    msgpack_value,
    npy,
    npz,
    tenbin,
    tensor,
    text,
)

Decoder = Callable[[Any], Any]
"""Returns the value of a member, given the member's bytes.

With `zero_copy`, the bytes are not copied from the shard: the decoder gets a `Buffer`, which is a
numpy array on the mapped file.
"""

Spec = str | type | Decoder
"""A decoder, its name, or a type that is called with the bytes; str decodes them as UTF-8."""

DecoderChoice = Callable[[str, str], Decoder | None]
"""Returns the decoder of a member, given the member's name in the sample and extension in the tar.

Returns None for a member whose value is its bytes. The name and the extension may differ: if the
user asks for "jpg;png", a member "png" has the name "jpg" in its sample; see `member_choice`.
"""

_SPACED_IMAGE_EXTENSIONS = (
    "apng blp bmp bw cur dcx dds dib fit fits flc fli ftc ftu gbr gif icb icns ico iim im j2c "
    "j2k jfif jp2 jpc jpe jpeg jpf jpg jpx msp pbm pcd pcx pgm png pnm ppm psd pxr ras rgb rgba "
    "sgi tga tif tiff vda vst webp xbm xpm"
)
_IMAGE_EXTENSIONS = frozenset(_SPACED_IMAGE_EXTENSIONS.split())
"""webdataset's extensions of images, except for formats that Pillow alone cannot read.

Pillow has no reader for some formats, and reads others by running another program.
"""


_PLAIN_DECODERS: dict[str, Decoder] = {
    "bytes": bytes,
    "cbor": cbor_value,
    "float": float,
    "int": int,
    "json": json_value,
    "msgpack": msgpack_value,
    "npy": npy,
    "npz": npz,
    "numpy": npy,
    "pickle": pickle.loads,
    "tenbin": tenbin,
    "tensor": tensor,
    "text": text,
}
_TYPE_DECODERS: dict[Any, Decoder] = {bytes: bytes, float: float, int: int, str: text}
_IMAGE_DECODERS: dict[str, Decoder] = {}
for _color in COLORS:
    _IMAGE_DECODERS |= {
        _color: ImageDecoder(_color, "numpy", is_uint8=False),
        f"{_color}8": ImageDecoder(_color, "numpy", is_uint8=True),
        f"torch{_color}": ImageDecoder(_color, "torch", is_uint8=False),
        f"torch{_color}8": ImageDecoder(_color, "torch", is_uint8=True),
        f"pil{_color}": ImageDecoder(_color, "pil", is_uint8=True),  # PIL images are of uint8 only
    }
_IMAGE_DECODERS |= {
    "torch": _IMAGE_DECODERS["torchrgb"],
    "torch8": _IMAGE_DECODERS["torchrgb8"],
    "pil": _IMAGE_DECODERS["pilrgb"],
}
_MEDIA_DECODERS = {
    "video": video,
    "audio": audio,
    "torch_video": torch_video,
    "torch_audio": torch_audio,
}

_EXTENSION_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json_value),
    **dict.fromkeys(("mp", "msg"), msgpack_value),
    **dict.fromkeys(("ten", "tb"), tenbin),
    "cbor": cbor_value,
    "npy": npy,
    "npz": npz,
    "pth": tensor,
}
"""webdataset's decoders by extension, except those that unpickle."""


def decoder(spec: Spec) -> Decoder:
    """Return the decoder that a user has asked for.

    Raises ConfigError if its name is unknown, or if a library that it needs is not installed.
    """
    if isinstance(spec, type):
        return _TYPE_DECODERS.get(spec, spec)
    if not isinstance(spec, str):
        if callable(spec):
            return spec
        raise ConfigError(
            f"{shown(spec)} is not a decoder",
            remedy="give a name, a function of the member's bytes, or a type",
        )
    if spec in _IMAGE_DECODERS:
        _check_pillow()
    if spec in _MEDIA_DECODERS:
        _check_torchcodec()
    decoders: dict[str, Decoder] = _PLAIN_DECODERS | _IMAGE_DECODERS | _MEDIA_DECODERS
    if spec in decoders:
        return decoders[spec]
    raise ConfigError(
        f"unknown decoder {spec!r}{did_you_mean(spec, sorted(decoders))}",
        remedy=f"choose one of {', '.join(sorted(decoders))}; or pass a function of the member's "
        "bytes",
    )


def _check_pillow() -> None:
    """Raise ConfigError if pillow or numpy is not installed."""
    try:
        import numpy  # noqa: F401
        import PIL.Image  # noqa: F401
    except ImportError as exn:
        raise ConfigError(
            f"decoding images needs the Python package {exn.name}",
            remedy="pip install pillow numpy",
        ) from exn


def _check_torchcodec() -> None:
    """Raise ConfigError if torchcodec or FFmpeg is not installed."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as exn:
        # If FFmpeg's libraries are missing, the error is a RuntimeError with a report of many
        # lines, of which the first is enough.
        reason = repr(exn)
        if str(exn):
            reason = str(exn).splitlines()[0]
        raise ConfigError(
            f"decoding video and audio needs torchcodec: {reason}",
            # Later releases on PyPI need CUDA, so a machine without a GPU cannot use them.
            remedy="install FFmpeg 4 to 8, and a release of torchcodec that fits your torch; "
            "without a GPU, pip install 'torchcodec<0.14', or a CPU wheel from PyTorch's index",
        ) from exn


@dataclass(frozen=True, slots=True)
class _GzipDecoder:
    """Decompresses a member with gzip, and decodes its content.

    Attributes:
        decode: decoder of the decompressed bytes.
    """

    decode: Decoder

    def __call__(self, data: Any) -> Any:
        """Return the value of a member, given its compressed bytes."""
        return self.decode(gzip.decompress(bytes(data)))


def choice_by_extension(image_decoder: str) -> DecoderChoice:
    """Return a function that chooses a member's decoder by extension, as webdataset does.

    Raises ConfigError if there is no such image decoder, or if it needs a missing library.

    Args:
        image_decoder: name of the decoder for all images.
    """
    if image_decoder not in _IMAGE_DECODERS:
        hint = did_you_mean(image_decoder, _IMAGE_DECODERS)
        names = ", ".join(sorted(_IMAGE_DECODERS))
        raise ConfigError(
            f"decode is {image_decoder!r}, which is not an image decoder{hint}",
            remedy=f"choose one of {names}; or name the members, as in {{'json': 'json'}}",
        )
    return partial(_decoder_by_extension, decoder(image_decoder))


def _decoder_by_extension(decode_image: Decoder, _name: str, extension: str) -> Decoder | None:
    """Return the decoder of a member; None if its value is its bytes.

    Args:
        decode_image: decoder of images.
        _name: unused, as the choice depends on the extension alone.
        extension: extension of the member.
    """
    # As in webdataset, only the part after the last dot counts: "seg.png" is a PNG.
    _, _, last = _uncompressed(extension).rpartition(".")
    decode = _EXTENSION_DECODERS.get(last)
    if last in _IMAGE_EXTENSIONS:
        decode = decode_image
    if not _is_compressed(extension):
        return decode
    # A member without a decoder, such as "bin.gz", is decompressed to its bytes.
    return _GzipDecoder(decode or bytes)


def choice_by_table(decode: Mapping[str, Spec]) -> DecoderChoice:
    """Return a function that chooses a member's decoder by the user's table.

    Raises ConfigError for a decoder that is unknown, or needs a library that is not installed.

    Args:
        decode: the decoders by name of a member, by alternatives such as "jpg;png", or by a pattern
            such as "*.jpg".
    """
    decoders: dict[str, Decoder] = {}
    names_of_plain: set[str] = set()  # names of members whose decoders expect plain data
    for entry, spec in decode.items():
        name = common_name(entry)  # in lower case: "jpg" for "JPG;png"
        decoders[name] = _decoder_of(entry, spec)
        # A decoder that is given by its name expects plain data, so compressed members are
        # decompressed for it. A function or a type gets the bytes as they are.
        if isinstance(spec, str):
            names_of_plain.add(name)
    return partial(_decoder_by_table, decoders, names_of_plain)


def _decoder_by_table(
    decoders: Mapping[str, Decoder], names_of_plain: Collection[str], name: str, extension: str
) -> Decoder | None:
    """Return the decoder of a member; None if its value is its bytes.

    Args:
        decoders: decoders by name of the member, in lower case.
        names_of_plain: names of the members whose decoders expect plain data: such a member is
            decompressed first if it is compressed.
        name: name of the member in the sample.
        extension: extension of the member in the tar.
    """
    name = name.lower()
    decode = decoders.get(name)
    if decode is None:
        return None
    if name in names_of_plain and _is_compressed(extension):
        return _GzipDecoder(decode)
    return decode


def _decoder_of(entry: str, spec: Spec) -> Decoder:
    """Return the decoder that the table gives for `entry`. Errors name the entry."""
    try:
        return decoder(spec)
    except ConfigError as exn:
        raise ConfigError(f"decode[{entry!r}]: {exn.message}", remedy=exn.remedy) from None


def _is_compressed(extension: str) -> bool:
    """Return True if an extension ends in "gz"."""
    _, _, last = extension.rpartition(".")
    return last == "gz"


def _uncompressed(extension: str) -> str:
    """Return an extension without the compression: "json" for "json.gz", "" for "gz" alone."""
    if not _is_compressed(extension):
        return extension
    return extension.removesuffix("gz").removesuffix(".")
