"""Slots of one allocation as SGLang's forward takes them, with what the table write needs and must not read back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from sglang.srt.model_executor.forward_batch_info import DSV4OutCacheLoc

I32 = npt.NDArray[np.int32]


@dataclass
class OutCacheLoc(DSV4OutCacheLoc):  # type: ignore[misc]
    """SGLang's bundle of device slots; ``given`` are the new C128 pages on the host, in the order of the requests.

    ``given`` is None in a bundle that allocates nothing, such as the window of a verify.
    """

    given: I32 | None = None
