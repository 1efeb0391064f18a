"""From a sample's bytes to what the dataset yields: its choice of members, its decoders and functions, in order.

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
`tensor`                                          `torch.load(…, weights_only=True)`
`video`, `audio`                                  torchcodec's `VideoDecoder`; its `AudioSamples`
`torch_video`, `torch_audio`                      (frames, t × h × w × 3, sound, rates); (sound, its rate)
`pickle`                                          the object: code from the shard runs in your process
================================================  =========================================================
"""

import io
import json
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from typing import Any, Literal

from shardcache.errors import ConfigError, DecodeError, MissingMemberError, did_you_mean
from shardcache_client.files import Sample, TokenBlocks, View

Decoder = Callable[[Any], Any]
"""Returns the value of a member, given its bytes, or a Buffer of them."""

Spec = str | type | Decoder
"""A decoder, its name, or one of the types int, float, str and bytes."""

_IMAGES = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"})
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

    return torch.load(io.BytesIO(data), weights_only=True)


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
    "float": float,
    "int": int,
    "json": _json,
    "msgpack": _msgpack,
    "npy": _npy,
    "npz": _npz,
    "numpy": _npy,
    "pickle": pickle.loads,
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


def by_extension(name: str) -> Callable[[str], Decoder | None]:
    """Return a function from an extension to its decoder, or None: images by `name`, the rest as webdataset does."""
    if name not in _OF_IMAGES:
        raise ConfigError(
            f"decode is {name!r}, which is not an image decoder{did_you_mean(name, _OF_IMAGES)}",
            remedy=f"choose one of {', '.join(sorted(_OF_IMAGES))}; or name the members, as in {{'json': 'json'}}",
        )
    return partial(_by_extension, decoder(name))


def _by_extension(image: Decoder, extension: str) -> Decoder | None:
    last = extension.rpartition(".")[2]
    return image if last in _IMAGES else _BY_EXTENSION.get(last)


def _decoder_of(extension: str, spec: Spec) -> Decoder:
    try:
        return decoder(spec)
    except ConfigError as exn:
        raise ConfigError(f"decode[{extension!r}]: {exn.message}", remedy=exn.remedy) from None


Decode = Callable[[Sample], Any] | Mapping[str, Spec] | str
Missing = Literal["error", "skip"] | Mapping[str, Any]


class Members:
    """A choice of members by extension; of "jpg;png", the first that a sample has, under the name of the first."""

    def __init__(self, names: Iterable[str], *, others: bool = False) -> None:
        self.unread: set[str] = set()  # extensions seen in shards, of which no members are read
        self._others = others  # True to read other members, too
        self._names: dict[str, str] = {}  # from each extension to the first of its alternatives
        self._alternatives: list[list[str]] = []
        for alternatives in names:
            first, *rest = group = alternatives.lower().split(";")
            self._alternatives += [group] if rest else []
            for extension in group:
                if not extension or extension.startswith((".", "__")):
                    raise ConfigError(f"{alternatives!r} names no member", remedy='write extensions as "jpg", no dot')
                if extension in self._names:
                    raise ConfigError(f"the member {extension!r} is named twice")
                self._names[extension] = first
        if not self._names:
            raise ConfigError("members is empty", remedy="omit it to get all members")
        self.names = tuple(dict.fromkeys(self._names.values()))

    def reads(self, extension: str) -> bool:
        """Return True if members with this extension are read."""
        reads = self._others or extension in self._names
        if not reads:
            self.unread.add(extension)
        return reads

    def choose(self, sample: Sample) -> Sample:
        """Return a sample with the first of its alternatives only, under their common name, in the tar's order."""
        if not self._alternatives:
            return sample
        lost: set[str] = set()
        for group in self._alternatives:
            lost.update([extension for extension in group if extension in sample][1:])
        return {self._names.get(name, name): value for name, value in sample.items() if name not in lost}


class Dropped(Enum):
    """Results of a pipeline that are not yielded."""

    FILTERED = "filter() rejected the sample"
    INCOMPLETE = "a member is missing, and missing='skip'"


@dataclass(frozen=True)
class Pipeline:
    """From a sample's bytes to what the dataset yields. Can be pickled if its functions can."""

    required: tuple[str, ...] = ()  # members that each sample must have
    missing: Missing = "error"  # for those that one lacks: raise, skip the sample, or take the value from this mapping
    decoder_of: Callable[[str], Decoder | None] | None = None  # by extension; None to leave a member as it is
    decode: Callable[[Sample], Any] | None = None
    stages: tuple[tuple[bool, Callable[[Any], Any]], ...] = ()  # further functions; True for a filter
    members: Members | None = None  # the members to read; None for all
    blocks: TokenBlocks | None = None  # the blocks of tokens that are samples; None for the samples of the tars
    prefix: str = ""  # of the extensions of members, but for those that are joined
    url_of: Callable[[str, str], str] | None = field(default=None, compare=False)  # see `Manifest.url_of`

    @classmethod
    def of(
        cls, decode: Decode | None, members: Iterable[str] | None, missing: Missing, blocks: TokenBlocks | None = None
    ) -> "Pipeline":
        """Build from the arguments of a dataset. Raises ConfigError if they are invalid."""
        is_named = isinstance(decode, str | Mapping)
        if blocks is not None and (is_named or members is not None or missing != "error"):
            remedy = "omit members and missing; pass a function as decode"
            raise ConfigError("blocks of tokens have no members to choose or decode by name", remedy=remedy)
        chosen = None if members is None else Members([members] if isinstance(members, str) else members)
        required = () if chosen is None else chosen.names
        decoder_of: Callable[[str], Decoder | None] | None = None
        if isinstance(decode, str):
            decoder_of = by_extension(decode)
        elif isinstance(decode, Mapping):
            named = Members(decode, others=True)
            decoder_of = dict(zip(named.names, map(_decoder_of, decode, decode.values()), strict=True)).get
            if chosen is not None and (left_out := set(named.names) - set(required)):
                raise ConfigError(f"decode names the member {min(left_out)!r}, which members leaves out")
            required = required or named.names
            chosen = chosen or named
        if isinstance(missing, Mapping) and (unknown := set(missing) - set(required)):
            raise ConfigError(
                f"missing has a value for {min(unknown)!r}, which neither members nor decode names",
                remedy="name it in members, too",
            )
        function = None if isinstance(decode, str | Mapping) else decode
        return cls(required, missing, decoder_of, function, members=chosen, blocks=blocks)

    def __bool__(self) -> bool:
        """Return True if samples have to go through this pipeline."""
        return bool(self.required or self.decoder_of or self.decode or self.stages)

    @property
    def filters(self) -> bool:
        """True if samples may be filtered out."""
        return any(is_filter for is_filter, _ in self.stages)

    def view(self, shard: int, column: str | None = None) -> View:
        """Return the form in which samples of a shard, or of those beside it in a column, are read."""
        prefix, missing = self.prefix if column is None else column, self.missing
        filled = not isinstance(missing, str) and any(name.startswith(prefix) for name in missing)
        unmatched = missing if isinstance(missing, str) else "fill" if filled else "error"
        return View(None if self.members is None else self.members.reads, self.blocks, prefix, unmatched)

    def then(self, function: Callable[[Any], Any], *, is_filter: bool = False) -> "Pipeline":
        """Return this pipeline with one more stage."""
        return replace(self, stages=(*self.stages, (is_filter, function)))

    def __call__(self, sample: Sample) -> Any:
        """Return what becomes of a sample, or a `Dropped`. Raises MissingMemberError, DecodeError."""
        if self.members is not None:
            sample = self.members.choose(sample)
        absent = [name for name in self.required if name not in sample]
        if absent and self.missing == "skip":
            return Dropped.INCOMPLETE
        defaults = self.missing if isinstance(self.missing, Mapping) else {}
        for name in absent:
            if name not in defaults:
                raise MissingMemberError.of(name, sample, self.members.unread if self.members else ())
        if self.decoder_of is not None:
            for extension in sample:
                if not extension.startswith("__") and (decoder := self.decoder_of(extension)) is not None:
                    self._decode(sample, extension, decoder)
        if absent:
            sample |= {name: deepcopy(defaults[name]) for name in absent}
        return self._staged(sample, sample.get("__key__"), sample.get("__url__"))

    def _decode(self, sample: Sample, extension: str, decoder: Decoder) -> None:
        try:
            sample[extension] = decoder(sample[extension])
        except Exception as exn:
            what = f"member {extension!r} of the sample {sample.get('__key__')!r}"
            url = self.url_of(sample["__url__"], extension) if self.url_of else sample.get("__url__")
            raise _undecodable(what, f"{type(exn).__name__}: {exn}", url, "member or its decoder") from exn

    def _staged(self, item: Any, key: object, url: str | None) -> Any:
        """Return what decode and the stages make of the sample with this key."""
        try:
            if self.decode is not None:
                item = self.decode(item)
            for is_filter, function in self.stages:
                if not is_filter:
                    item = function(item)
                elif not function(item):
                    return Dropped.FILTERED
        except Exception as exn:  # it is the user's code, and may raise anything
            fault = f"{type(exn).__name__}: {exn}{_line(exn)}{_has(exn, item)}"
            raise _undecodable(f"sample {key!r}", fault, url, "sample or the function") from exn
        return item


@dataclass(frozen=True)
class PipelineBySource(Pipeline):
    """The pipelines of several sources; a sample's `__source__` chooses its own. Otherwise has only stages."""

    sources: Mapping[str, Pipeline] = field(default_factory=dict)  # by name, in the order of the manifest
    firsts: tuple[int, ...] = ()  # number in the manifest of each source's first shard

    def __bool__(self) -> bool:
        """Return True if samples have to go through these pipelines."""
        return bool(self.stages) or any(self.sources.values())

    @property
    def filters(self) -> bool:
        """True if samples may be filtered out."""
        return super().filters or any(source.filters for source in self.sources.values())

    def view(self, shard: int, column: str | None = None) -> View:
        """Return the form in which samples of a shard are read; see `Pipeline`."""
        return [*self.sources.values()][bisect_right(self.firsts, shard) - 1].view(shard, column)

    def __call__(self, sample: Sample) -> Any:
        """Return what becomes of a sample, or a `Dropped`. Raises what the pipelines raise."""
        key, url = sample.get("__key__"), sample.get("__url__")
        item = self.sources[sample["__source__"]](sample)
        return item if item.__class__ is Dropped else self._staged(item, key, url)


def _undecodable(what: str, fault: str, url: str | None, culprit: str) -> DecodeError:
    remedy = f"fix the {culprit}; until then an on_error handler can skip the sample"
    return DecodeError(f"the {what} could not be decoded ({fault})", url=url, remedy=remedy)


def _has(exn: Exception, item: object) -> str:
    """Return the members of a sample of which the user's function wanted another."""
    if not isinstance(exn, KeyError) or not isinstance(item, dict) or "__key__" not in item:
        return ""
    return f"; it has: {', '.join(name for name in item if not name.startswith('__'))}"


def _line(exn: Exception) -> str:
    """Return the line of the user's function that raised it, as a DataLoader does not show the original traceback."""
    trace = exn.__traceback__ and exn.__traceback__.tb_next
    return f", {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
