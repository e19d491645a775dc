"""The prefix tree's part that owns C128 pages: complete pages only, each node a counted holder."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.hardware_backend.npu.dsv4.c128_sidecar_component import C128SidecarComponent

from dsv4_npu import addressing
from dsv4_npu.sglang.verify import verify_applied

I64 = npt.NDArray[np.int64]


class C128Component(C128SidecarComponent):  # type: ignore[misc]
    """SGLang's component with page ids on the host, where the ledger is: no call of it reads the device.

    A node's value is an int32 tensor on the CPU with the page that its end completes. The component names its pages to
    the allocator, whose accounting then covers the tree.
    """

    def __init__(self, cache: Any, params: Any) -> None:
        verify_applied()
        super().__init__(cache, params)
        self.allocator.register_c128_holder(self.held_pages)

    @property
    def group_tokens(self) -> int:
        """Tokens whose entries fill one C128 page."""
        return addressing.C128_RATIO * int(self.allocator.c128_attn_allocator.page_size)

    def held_pages(self) -> I64:
        """The pages that all nodes name, as a multiset."""
        found = [np.zeros(0, np.int64)]
        waiting = [self.tree_core.root_node]
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            value = node.component_data[self.component_type].value
            if value is not None:
                found.append(value.cpu().numpy().astype(np.int64))
        return np.concatenate(found)

    def prepare_for_caching_req(self, req: Any, insert_params: Any, token_ids_len: int, is_finished: bool) -> int:
        """How many tokens of a request the tree may take: complete C128 pages, which it is handed from the row."""
        cache_len: int = self.floor_cache_len(token_ids_len)
        bigram = 1 if self.tree_core.is_eagle and cache_len > 0 else 0
        count = (cache_len - bigram) // self.group_tokens
        pool = self.cache.req_to_token_pool
        insert_params.c128_value = torch.from_numpy(pool.sidecar.prefix(int(req.kv.req_pool_idx), 0, count))
        return cache_len

    def _collect_device_pages(self, node_id: int) -> torch.Tensor:
        chunks = []
        node, root = self.tree_core.node_by_id(node_id), self.tree_core.root_node
        while node is not root:
            value = node.component_data[self.component_type].value
            if value is not None:
                chunks.append(value)
            node = node.parent
        return torch.cat(chunks[::-1]) if chunks else torch.zeros(0, dtype=torch.int32)

    def commit_hicache_transfer(self, node: Any, phase: Any, transfers: Any = (), **kwargs: Any) -> None:
        """As SGLang's; pages that were loaded back are known to the host from then on."""
        super().commit_hicache_transfer(node, phase, transfers, **kwargs)
        for transfer in transfers:
            for node_id in transfer.nodes_to_load or []:
                data = self.tree_core.node_by_id(node_id).component_data[self.component_type]
                if data.value is not None:
                    data.value = data.value.to("cpu", torch.int32)

    def _expand_page_indices(self, page_ids: torch.Tensor, page_size: int) -> torch.Tensor:
        """Slots of pages, on the device: a copy between host and device asks for them."""
        pages = page_ids.to(self.allocator.device, torch.int64)
        return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()
