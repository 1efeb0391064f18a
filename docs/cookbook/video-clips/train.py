"""Video: frames of clips in a permutation of all of them, since their shards are sorted."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from shardcache_client import ShardDataset

BATCH = 16
TAKEN = (0, 4, 8)  # numbers of the frames that the model sees


def prepare(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return some frames of a clip, decoded in the worker, and its class."""
    frames = []
    with Image.open(io.BytesIO(sample["webp"])) as clip:
        for number in TAKEN:
            clip.seek(number)
            frames.append(np.asarray(clip.convert("L"), dtype=np.float32) / 255)
    return torch.from_numpy(np.stack(frames)), int(sample["cls"])


def main() -> None:
    """Train on all clips; print how they came, and whether it learned."""
    torch.manual_seed(7)
    dataset = ShardDataset("shards/index.json", shuffle="global", seed=7, batch_size=BATCH)
    first = [sample["cls"] for sample, _ in zip(dataset, range(BATCH), strict=False)]
    print(f"the first batch has {len(set(first))} classes")

    loader = dataset.map(prepare).loader(batch_size=BATCH, num_workers=2)
    model = nn.Sequential(
        nn.Conv2d(len(TAKEN), 16, 5, stride=2), nn.ReLU(), nn.AdaptiveMaxPool2d(3), nn.Flatten(), nn.Linear(144, 4)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(16):
        loader.set_epoch(epoch)
        right = seen = 0
        for frames, labels in loader:
            logits = model(frames)
            loss = nn.functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
    print("it learned" if right > 0.7 * seen else f"it did not learn: {right} of {seen} right")


if __name__ == "__main__":
    main()
