"""Decoders of video and sound, on files that FFmpeg has made."""

import functools
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from shardcache.errors import ConfigError, DecodeError
from shardcache_client.samples.decoders import decoder
from shardcache_client.stages.pipeline import Pipeline
from support.programs.guard import GUARD_S

FRAMES = 20
FPS = 10
WIDTH = 64
HEIGHT = 48
RATE = 16_000
SECONDS = 2


def _missing() -> str:
    """Return what these tests lack, as a remedy says it."""
    if shutil.which("ffmpeg") is None:
        return "needs FFmpeg (apt-get install ffmpeg)"
    try:
        decoder("video")
    except ConfigError as exn:
        return f"{exn.message}: {exn.remedy}"
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "all is there")


@functools.cache
def media(name: str, *options: str) -> bytes:
    """Return a video of FFmpeg's test picture, or a tone, as a file of this name."""
    inputs = {
        "v": ("-f", "lavfi", "-i", f"testsrc=size={WIDTH}x{HEIGHT}:rate={FPS}:duration={SECONDS}"),
        "a": ("-f", "lavfi", "-i", f"sine=frequency=440:sample_rate={RATE}:duration={SECONDS}"),
    }
    chosen = inputs["a"] if name.endswith((".wav", ".flac")) else inputs["v"] + inputs["a"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        command = ("ffmpeg", "-loglevel", "error", *chosen, *options, str(path))
        subprocess.run(command, check=True, timeout=GUARD_S)
        return path.read_bytes()


def clip(*options: str) -> bytes:
    """Return a video whose frames are stored without loss, with sound."""
    return media("clip.mkv", "-c:v", "ffv1", "-pix_fmt", "gbrp", "-c:a", "pcm_s16le", *options)


def raw_frames() -> torch.Tensor:
    """Return the clip's frames as ffmpeg decodes them: time x height x width x 3."""
    command = (
        "ffmpeg",
        "-loglevel",
        "error",
        "-i",
        "-",
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-",
    )
    done = subprocess.run(command, input=clip(), capture_output=True, check=True, timeout=GUARD_S)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8).reshape(
        FRAMES, HEIGHT, WIDTH, 3
    )


def test_a_video_gives_the_frames_that_are_asked_of_it() -> None:
    """Those that the ffmpeg program finds, as uint8 of 3 x height x width."""
    video = decoder("video")(clip())
    assert len(video) == FRAMES
    assert video.metadata.average_fps == FPS
    assert video[7].dtype == torch.uint8
    assert tuple(video[7].shape) == (3, HEIGHT, WIDTH)
    expected = raw_frames().permute(0, 3, 1, 2)
    assert torch.equal(video[7], expected[7])
    assert torch.equal(video.get_frames_at([0, 19]).data, expected[[0, 19]])


def test_a_video_passes_to_another_process() -> None:
    """A worker's, to the trainer: torchcodec's own decoder would crash there."""
    program = "import pickle, sys; print(tuple(pickle.load(sys.stdin.buffer)[3].shape))"
    pickled = pickle.dumps(decoder("video")(clip()))
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickled, capture_output=True, timeout=GUARD_S
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str((3, HEIGHT, WIDTH))


@pytest.mark.parametrize("name", ["tone.wav", "tone.flac"])
def test_sound_is_decoded_as_a_whole(name: str) -> None:
    """Sound is channels x samples from -1 to 1 at its own rate; `torch_audio` is a pair."""
    samples = decoder("audio")(media(name, "-ac", "2"))
    assert samples.sample_rate == RATE
    assert tuple(samples.data.shape) == (2, RATE * SECONDS)
    assert samples.data.dtype == torch.float32
    level = 2**-3.5  # FFmpeg's tone has an eighth, and less in each of two channels
    tone = level * torch.sin(2 * torch.pi * 440 * torch.arange(RATE * SECONDS) / RATE)
    assert torch.allclose(samples.data[0], tone, atol=1e-3)
    waveform, rate = decoder("torch_audio")(media(name, "-ac", "2"))
    assert rate == RATE
    assert torch.equal(waveform, samples.data)


def test_torch_video_is_what_webdatasets_function_returns() -> None:
    """Frames are time x height x width x channels; missing sound is an empty tensor."""
    frames, sound, rates = decoder("torch_video")(clip())
    assert torch.equal(frames, raw_frames())
    assert tuple(sound.shape) == (1, RATE * SECONDS)
    assert sound.dtype == torch.float32
    assert rates == {"video_fps": FPS, "audio_fps": RATE}
    frames, sound, rates = decoder("torch_video")(clip("-an"))
    assert torch.equal(frames, raw_frames())
    assert sound.numel() == 0
    assert rates == {"video_fps": FPS}


@pytest.mark.parametrize("name", ["video", "audio", "torch_video", "torch_audio"])
def test_undecodable_media_are_errors_of_the_sample(name: str) -> None:
    """Noise, and a file without a stream of that kind."""
    other: Any = media("tone.wav") if "video" in name else clip("-an")
    for data in (b"noise", other):
        with pytest.raises(
            DecodeError, match="the member 'mp4' of the sample 'a' could not be decoded"
        ):
            Pipeline.of({"mp4": name}, None, "error")(
                {"__key__": "a", "__url__": "file:///s.tar", "mp4": data}
            )
