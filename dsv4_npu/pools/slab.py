"""One contiguous slab per family with a leading layer axis, so that one launch can serve all layers."""

from __future__ import annotations

import torch

from dsv4_npu import addressing
from dsv4_npu.errors import InputError
from dsv4_npu.pools.formats import RowFormat


class RowSlab:
    """Paged rows of one family: ``data [layers, pages, page, 1, width]`` and, for scaled rows, ``scale [..., 1]``.

    Slots index ``pages · page``; page 0 is the dummy. Reads of a slot < 0 return the dummy slot's row: whoever may hold
    such slots masks them.
    """

    def __init__(self, layers: int, pages: int, page: int, row: RowFormat, device: torch.device | str) -> None:
        self.row = row
        self.layers, self.pages, self.page = layers, pages, page
        shape = (layers, pages, page, 1)
        self.data = torch.zeros((*shape, row.width), dtype=row.dtype, device=device)
        self.scale = None if row.scale_dtype is None else torch.zeros((*shape, 1), dtype=row.scale_dtype, device=device)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that make up the slab."""
        return [self.data] if self.scale is None else [self.data, self.scale]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store ``rows [n, D]`` at ``slots [n]`` of ``layer``; slots < 0 go to the dummy slot.

        Raises InputError for shapes that do not fit.
        """
        if slots.ndim != 1 or rows.shape != (slots.numel(), self.row.dim):
            raise InputError(
                f"slots of shape {tuple(slots.shape)} and rows of shape {tuple(rows.shape)}; "
                f"[n] and [n, {self.row.dim}] are needed"
            )
        slots = slots.clamp_min(0)
        stored, scale = self.row.encode(rows)
        # float8 has no indexed write on every backend; its bytes have.
        flat = self._bytes(self.data[layer].view(self.pages * self.page, -1))
        flat[slots] = self._bytes(stored)
        if self.scale is not None and scale is not None:
            self.scale[layer].view(self.pages * self.page, 1)[slots] = scale

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows ``[n, D]`` at ``slots [n]`` of ``layer`` as ``dtype``."""
        slots = slots.clamp_min(0)
        flat = self._bytes(self.data[layer].view(self.pages * self.page, -1))
        stored = flat[slots].view(self.data.dtype)
        scale = None if self.scale is None else self.scale[layer].view(self.pages * self.page, 1)[slots]
        return self.row.decode(stored, scale, dtype)

    @staticmethod
    def _bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


class StateSlab:
    """Compressor ring rows ``data [layers, rows, 2 · overlap · D]``; the last row is the dummy and holds the empty row.

    Every row starts as the empty row (kv = 0, score = −inf), so a row that nobody wrote cannot weigh in a window.
    """

    def __init__(
        self, layers: int, banks: int, ring: int, ratio: int, dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.ratio, self.ring, self.layers, self.banks = ratio, ring, layers, banks
        self.rows = addressing.state_pool_rows(banks, ring, ratio)
        self.half = addressing.OVERLAP[ratio] * dim
        self.data = torch.zeros((layers, self.rows, 2 * self.half), dtype=dtype, device=device)
        self.data[..., self.half :] = float("-inf")

    @property
    def dummy(self) -> int:
        """The dummy row."""
        return self.rows - 1

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that make up the slab."""
        return [self.data]

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.numel() * self.data.element_size()
