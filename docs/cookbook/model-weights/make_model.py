"""Write the weights of a model, as several safetensors files."""

from pathlib import Path

import torch
from safetensors.torch import save_file

FILES = 4
LAYERS = 8


def main() -> None:
    """Write all files; the same ones in each run."""
    torch.manual_seed(7)
    Path("model").mkdir(exist_ok=True)
    for number in range(1, FILES + 1):
        layers = range((number - 1) * LAYERS, number * LAYERS)
        weights = {f"layers.{layer}.weight": torch.randn(256, 256) for layer in layers}
        save_file(weights, f"model/model-{number:05d}-of-{FILES:05d}.safetensors")


if __name__ == "__main__":
    main()
