"""Lets torchvision's PyPI wheel, built for CUDA, be imported beside a CPU build of torch.

Copied into the environment of `make sglang-test` and imported there at start-up through a .pth file. Declares the two
operators that torchvision's compiled part would have registered, just before torchvision is imported.
"""

import importlib.abc
import sys

_declared = []


class DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; acts when torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _declared.append(library)


sys.meta_path.insert(0, DeclareOperators())
