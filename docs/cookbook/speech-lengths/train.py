"""Speech: batches of recordings of similar length, with texts and durations from a manifest."""

import io
import wave
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardcache_client import Joined, ShardDataset, Table, batch_by_length

TONES = ("low", "middle", "high")
MAX_SECONDS = 12.0  # of a padded batch
RATE = 8_000
WINDOW = 256


def prepare(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the recording's spectra, one row each 32 ms, and its tone."""
    with wave.open(io.BytesIO(sample["wav"])) as file:
        sound = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
    windows = torch.from_numpy(sound[: len(sound) // WINDOW * WINDOW].copy()).view(-1, WINDOW)
    spectra = torch.fft.rfft(windows).abs().log1p()
    return spectra, TONES.index(sample["row.text"])


def length(item: tuple[Tensor, int]) -> int:
    """Return the number of a recording's spectra."""
    return len(item[0])


def pad(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return spectra, their lengths, and the tones."""
    lengths = torch.tensor([length(item) for item in items])
    spectra = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
    return spectra, lengths, torch.tensor([item[1] for item in items])


def main() -> None:
    """Train for some epochs; print how much of the batches was padding, and whether it learned."""
    torch.manual_seed(7)
    recordings = ShardDataset("shards/index.json", shuffle=True, seed=7)
    manifest = Table("manifest.jsonl", key="audio_filepath", pattern=r"(.*)\.wav")
    joined = Joined({"": recordings, "row": manifest})
    long_enough = joined.select(lambda entry: entry.rows["row"]["duration"] >= 0.25)
    batches = batch_by_length(long_enough.map(prepare), int(MAX_SECONDS * RATE / WINDOW), length, collate=pad)
    model = nn.Linear(WINDOW // 2 + 1, len(TONES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = batches.loader(num_workers=2)
    recorded = padded = right = seen = 0
    for _ in range(5):
        right = seen = 0
        for spectra, lengths, tones in loader:
            mean = spectra.sum(1) / lengths.unsqueeze(1)  # padding is zero
            logits = model(mean)
            loss = nn.functional.cross_entropy(logits, tones)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorded += int(lengths.sum())
            padded += spectra.shape[0] * spectra.shape[1]
            right += int((logits.argmax(1) == tones).sum())
            seen += len(tones)
    print(f"{seen} recordings an epoch; padding is {'less' if padded < 1.15 * recorded else 'more'} than 15 %")
    print("it learned" if right > 0.9 * seen else f"it did not learn: {right} of {seen} right")


if __name__ == "__main__":
    main()
