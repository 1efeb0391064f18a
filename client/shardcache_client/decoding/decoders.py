"""Decoders by name, and the table of those that a dataset applies to its members."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from shardcache.errors import ConfigError, did_you_mean
from shardcache_client.decoding import images
from shardcache_client.decoding.images import image_decoders
from shardcache_client.decoding.media import media_decoders

Decoder = Callable[[Any], Any]
"""Returns the value of a member, given its bytes, or a Buffer of them."""

Spec = str | type | Decoder
"""A decoder, its name, or one of the types int, float, str and bytes."""


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
_IMAGES = image_decoders()
_MEDIA = media_decoders()

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
    """Return a decoder.

    Raises ConfigError if the name is unknown, or a library that the decoder needs is not installed.
    """
    if isinstance(spec, str):
        return _named(spec)
    if spec in _TYPES:
        return _TYPES[spec]
    if callable(spec):
        return spec
    raise ConfigError(f"{spec!r} is not a decoder", remedy="give a name, a function of the member's bytes, or a type")


def _named(name: str) -> Decoder:
    if name in _PLAIN:
        return _PLAIN[name]
    factories = {**_IMAGES, **_MEDIA}
    if name in factories:
        return factories[name]()
    known = sorted({*_PLAIN, *factories})
    raise ConfigError(
        f"unknown decoder {name!r}{did_you_mean(name, known)}",
        remedy=f"choose one of {', '.join(known)}; or pass a function of the member's bytes",
    )


def by_extension(name: str) -> Callable[[str], Decoder | None]:
    """Return a function from an extension to its decoder, or None: images by `name`, the rest as webdataset does.

    The last component of an extension counts. Raises ConfigError if `name` is no image decoder.
    """
    if name not in _IMAGES:
        raise ConfigError(
            f"decode is {name!r}, which is not an image decoder{did_you_mean(name, _IMAGES)}",
            remedy=f"choose one of {', '.join(sorted(_IMAGES))}; or name the members, as in {{'json': 'json'}}",
        )
    return partial(_by_extension, _named(name))


def _by_extension(image: Decoder, extension: str) -> Decoder | None:
    last = extension.rpartition(".")[2]
    return image if last in images.EXTENSIONS else _BY_EXTENSION.get(last)


def decoders(specs: Mapping[str, Spec]) -> dict[str, Decoder]:
    """Return the decoders of a table by extension. Raises ConfigError as `decoder` does, naming the extension."""
    found = {}
    for extension, spec in specs.items():
        try:
            found[extension] = decoder(spec)
        except ConfigError as exn:
            raise ConfigError(f"decode[{extension!r}]: {exn.message}", remedy=exn.remedy) from None
    return found
