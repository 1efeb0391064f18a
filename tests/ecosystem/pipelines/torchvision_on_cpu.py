"""torchvision imported beside a torch for CPUs, of which PyPI has no build.

Its compiled operators are for CUDA and do not load. Transforms need none of them, but the import
asks for two by name.
"""

import sys

import torch

try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{operator}",
            "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        )
    import torchvision

__all__ = ["torchvision"]
