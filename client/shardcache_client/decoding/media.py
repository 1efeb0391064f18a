"""Decoders of video and sound by torchcodec."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from shardcache.errors import ConfigError

_PYPI_CPU = "0.14"
"""The first release of torchcodec whose wheel on PyPI needs CUDA's libraries."""


def media_decoders() -> dict[str, Callable[[], Callable[[Any], Any]]]:
    """Return the factories of the decoders by name.

    "video" gives torchcodec's `VideoDecoder`, which decodes the frames that are asked of it; "audio" gives
    its `AudioSamples`, the whole recording as floats (`data`, channels x samples) with its `sample_rate`. "torch_video"
    and "torch_audio" decode all of it, to what webdataset's functions of these names return: frames as uint8 (time x
    height x width x 3), sound and a dict of their rates; sound and its rate.
    """
    decoders = {"video": _video, "audio": _audio, "torch_video": _torch_video, "torch_audio": _torch_audio}
    return {name: partial(_checked, decoder) for name, decoder in decoders.items()}


def _checked(decoder: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the decoder, after checking for torchcodec."""
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError, OSError) as exn:  # without FFmpeg's libraries it is a RuntimeError
        raise ConfigError(
            f"decoding video and audio needs torchcodec: {str(exn).splitlines()[0] if str(exn) else exn!r}",
            remedy="install FFmpeg, 4 to 8, and torchcodec of a release that fits your torch; without a GPU, "
            f"pip install 'torchcodec<{_PYPI_CPU}', or a later one from PyTorch's index of CPU wheels",
        ) from exn
    return decoder


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


def _torch_video(data: Any) -> tuple[Any, Any, dict[str, float]]:
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


def _torch_audio(data: Any) -> tuple[Any, int]:
    samples = _audio(data)
    return samples.data, samples.sample_rate
