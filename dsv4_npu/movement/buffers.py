"""Registered memory as a transfer engine wants it: one pointer, length and item length per layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsv4_npu.movement.payload import STATE_PAGE
from dsv4_npu.pools import DSV4Pools


class BufferInfo(NamedTuple):
    """Per layer tensor: address, bytes, and bytes of one item (page or row), in the same order.

    Item ``i`` of a layer lies at ``pointers[layer] + i · item_lengths[layer]``. Target layers come before draft stages.
    """

    pointers: list[int]
    lengths: list[int]
    item_lengths: list[int]


def buffer_infos(pools: DSV4Pools) -> dict[str, BufferInfo]:
    """The buffers that the lists of :class:`~dsv4_npu.movement.payload.PayloadLists` of the same name index.

    ``full``: C4 entries of all layers, indexer rows, then indexer scales where they are separate. ``c4_state``: C4
    attention, then C4 indexer.
    """

    def of(tensors: list[torch.Tensor], items: int | None = None) -> BufferInfo:
        info = BufferInfo([], [], [])
        for tensor in tensors:
            for layer in tensor:
                size = layer.numel() * layer.element_size()
                info.pointers.append(layer.data_ptr())
                info.lengths.append(size)
                info.item_lengths.append(size // (layer.shape[0] if items is None else layer.shape[0] // items))
        return info

    return {
        "full": of(pools.c4.tensors() + pools.index.tensors()),
        "swa": of(pools.swa.tensors()),
        "c128": of(pools.c128.tensors()),
        "c4_state": of(pools.c4_state.tensors() + pools.index_state.tensors()),
        "c128_state": of(pools.c128_state.tensors(), STATE_PAGE),
    }
