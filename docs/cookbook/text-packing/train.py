"""A small GPT, trained on blocks of whole documents without padding."""

from typing import Any

import torch
from torch import Tensor, nn

from shardcache_client import ShardDataset

BLOCK = 512
WIDTH = 64
HEADS = 4
LAYERS = 2
END = 0


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with its tokens: the bytes of its text, and an end."""
    text = sample["json"]["text"].encode()
    return {**sample, "tokens": torch.tensor([*text, END])}


def within_documents(ends: Tensor, size: int) -> Tensor:
    """Return which positions a position may attend to: earlier ones of its own document."""
    document = torch.bucketize(torch.arange(size), ends[1:].long(), right=True)
    same = document.unsqueeze(0) == document.unsqueeze(1)
    return same & torch.ones(size, size).tril().bool()


class Layer(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the values at all positions of a block."""
        heads = self.queries(self.before(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(attended.transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.perceptron(self.after(x))


class Gpt(nn.Module):
    """The model: it sees one block at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.out = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """Return the logits of each position's next token."""
        x = self.token(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


def main() -> None:
    """Train for one epoch."""
    torch.manual_seed(7)
    dataset = ShardDataset("shards/index.json", shuffle=True, seed=7, decode={"json": "json"})
    blocks = dataset.map(tokenize).pack(BLOCK, tokens=lambda sample: sample["tokens"])
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    documents = used = 0
    for block in blocks.loader(num_workers=2):
        tokens = torch.as_tensor(block["tokens"]).long()
        positions = torch.as_tensor(block["positions"]).long()
        mask = within_documents(torch.as_tensor(block["cu_seqlens"]), len(tokens))
        logits = model(tokens[:-1], positions[:-1], mask[:-1, :-1])
        # The first token of a document does not follow from the one before.
        is_next = positions[1:] > 0
        loss = nn.functional.cross_entropy(logits[is_next], tokens[1:][is_next])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        documents += len(block["samples"])
        used += len(tokens)
    print(f"{documents} documents in {len(losses)} blocks, {used / len(losses) / BLOCK:.0%} full")
    print("the loss fell" if losses[-1] < losses[0] / 2 else "the loss did not fall")


if __name__ == "__main__":
    main()
