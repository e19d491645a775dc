"""Keep a float64 model in float64: Hugging Face's code casts parts of every layer to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepFloat64(TorchFunctionMode):
    """Inside this mode every cast to float32 becomes a cast to float64.

    RMSNorm, RoPE, softmax, the indexer and the hyper-connections of the model cast to float32 whatever the model's
    dtype. With these casts two computations of the same logits agree to about 1e-13 instead of 1e-5, so a wrong memory
    row cannot hide in rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self._suspended = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Casts are what they say: for the pools, whose rows and states may be float32 and less."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._suspended:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.float:
            return args[0].double()
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        if func is torch.Tensor.to and torch.float32 in args[1:]:
            args = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*args, **(kwargs or {}))
