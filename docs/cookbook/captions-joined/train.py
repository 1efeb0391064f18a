"""Contrastive training on images and captions that are kept apart, as for CLIP."""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

from shardcache_client import Joined, ShardDataset, Table

BATCH = 32
WIDTH = 16
VOCABULARY = 4_096


def tokens(caption: str) -> Tensor:
    """Return the words' numbers, the same in every process: a toy of a tokenizer."""
    numbers = [sum(word.encode()) % VOCABULARY for word in caption.split()]
    return torch.tensor(numbers)


def prepare(sample: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a picture and its caption's tokens."""
    return sample["jpg"], tokens(sample["row.caption"])


class TwoTowers(nn.Module):
    """One tower for images, one for captions."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, WIDTH))
        self.words = nn.EmbeddingBag(VOCABULARY, WIDTH)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return how well each image fits each caption, as logits."""
        pictures = nn.functional.normalize(self.image(images), dim=1)
        texts = nn.functional.normalize(self.words(words), dim=1)
        return 10 * pictures @ texts.T


def main() -> None:
    """Train on the captions of a file, of which only good ones are wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captions", help="a table with the columns key, caption and score")
    parser.add_argument("--least-score", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(7)
    images = ShardDataset("shards/index.json", shuffle=True, seed=7)
    table = Table(args.captions, key="key")
    joined = Joined({"": images, "row": table}, decode={"jpg": "torchrgb"})
    chosen = joined.select(lambda entry: entry.rows["row"]["score"] >= args.least_score)
    print(f"{len(chosen)} of {len(joined)} samples")

    loader = chosen.map(prepare).loader(batch_size=BATCH, num_workers=2, drop_last=True)
    model = TwoTowers()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for epoch in range(10):
        for pictures, words in loader:
            logits = model(pictures, words)
            # Captions repeat here, so a picture fits several of them.
            same = (words.unsqueeze(0) == words.unsqueeze(1)).all(2).float()
            loss = nn.functional.cross_entropy(logits, same / same.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not epoch:
            first = loss.item()
    print("the loss fell" if loss.item() < first else "the loss did not fall")


if __name__ == "__main__":
    main()
