"""Write shards of recordings: tones of different lengths, and a manifest that says which tone."""

import io
import json
import random
import wave
from pathlib import Path

import numpy as np

from shardcache.writing import ShardWriter

RATE = 8_000
RECORDINGS = 200
TONES = {"low": 200, "middle": 600, "high": 1_800}


def wav(frequency: float, seconds: float) -> bytes:
    """Return a recording of a tone."""
    times = np.arange(int(RATE * seconds)) / RATE
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((8_000 * np.sin(2 * np.pi * frequency * times)).astype("<i2").tobytes())
    return data.getvalue()


def main() -> None:
    """Write all; the same in each run."""
    dice = random.Random(7)
    with ShardWriter("shards/", shard_size_bytes=2**20) as shards, Path("manifest.jsonl").open("w") as manifest:
        for number in range(RECORDINGS):
            tone = dice.choice(list(TONES))
            seconds = min(dice.expovariate(1) + 0.2, 4)
            shards.write({"__key__": f"utt{number:04d}", "wav": wav(TONES[tone], seconds)})
            row = {"audio_filepath": f"utt{number:04d}.wav", "duration": seconds, "text": tone}
            print(json.dumps(row), file=manifest)


if __name__ == "__main__":
    main()
