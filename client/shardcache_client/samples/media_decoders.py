"""Decoders of video and sound, by torchcodec."""

from collections.abc import Callable
from functools import cache
from typing import Any


def video(data: Any) -> Any:
    """Return torchcodec's decoder of a video."""
    decoder_class = _movable_decoder_class()
    return decoder_class(bytes(data))


@cache
def _movable_decoder_class() -> Callable[[bytes], Any]:
    """Return the class of video decoders.

    The class is defined on first use, because its base class is in torchcodec, which not every user
    has installed.
    """
    from torchcodec.decoders import VideoDecoder

    class MovableVideoDecoder(VideoDecoder):  # type: ignore[misc]
        """A VideoDecoder that is pickled as the encoded video.

        A process that gets torchcodec's own class, from a loader's worker for instance, crashes.
        """

        def __init__(self, encoded: bytes) -> None:
            super().__init__(encoded)
            self._encoded = encoded

        def __reduce__(self) -> tuple[Any, ...]:
            return video, (self._encoded,)

    return MovableVideoDecoder


def audio(data: Any) -> Any:
    """Return the samples of a sound, as torchcodec's `AudioSamples`."""
    from torchcodec.decoders import AudioDecoder

    return AudioDecoder(bytes(data)).get_all_samples()


def torch_audio(data: Any) -> tuple[Any, int]:
    """Return the samples of a sound (channels x time), and the number of samples per second."""
    samples = audio(data)
    return samples.data, samples.sample_rate


def torch_video(data: Any) -> tuple[Any, Any, dict[str, float]]:
    """Return frames (time x height x width x 3), sound (channels x time), and their rates.

    The rates are `video_fps` and, if there is sound, `audio_fps`, as torchvision's `read_video`
    names them.
    """
    import torch
    from torchcodec.decoders import AudioDecoder, VideoDecoder

    encoded = bytes(data)
    decoder = VideoDecoder(encoded, dimension_order="NHWC")
    frames = decoder[:]
    rates = {"video_fps": decoder.metadata.average_fps}
    try:
        sound = AudioDecoder(encoded)
    except ValueError:
        # The video could be opened, so the file merely has no sound. The tensor that stands for the
        # sound has one channel without samples.
        return frames, torch.empty(1, 0), rates
    samples = sound.get_all_samples()
    return frames, samples.data, rates | {"audio_fps": samples.sample_rate}
