"""Decoders of video and sound by torchcodec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardcache.errors import ConfigError


def media_decoders() -> dict[str, Callable[[], Callable[[Any], Any]]]:
    """Return the factories of the decoders by name.

    "video" gives torchcodec's `VideoDecoder`, which decodes the frames that are asked of it; "audio" gives
    its `AudioSamples`, the whole recording as floats (`data`, channels x samples) with its `sample_rate`.
    """
    return {"video": _video_decoder, "audio": _audio_decoder}


def _video_decoder() -> Callable[[Any], Any]:
    _check()
    return _video


def _audio_decoder() -> Callable[[Any], Any]:
    _check()
    return _audio


def _video(data: Any) -> Any:
    from torchcodec.decoders import VideoDecoder

    return VideoDecoder(bytes(data))


def _audio(data: Any) -> Any:
    from torchcodec.decoders import AudioDecoder

    return AudioDecoder(bytes(data)).get_all_samples()


def _check() -> None:
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as exn:  # without FFmpeg's libraries it is a RuntimeError
        raise ConfigError(
            f"decoding video and audio needs torchcodec: {str(exn).splitlines()[0] if str(exn) else exn!r}",
            remedy="pip install torchcodec, of the release that fits your torch; and install FFmpeg, 4 to 8",
        ) from exn
