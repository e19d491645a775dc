"""SGLang's own request life cycle over one side's classes: real requests, its radix cache, its allocation functions."""

from __future__ import annotations

import contextlib
import types
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from sglang.srt.hardware_backend.npu.dsv4 import c128_sidecar_component
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache import allocation, common
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.sglang.sides import PAGE, Side

MODEL = types.SimpleNamespace(
    is_encoder_decoder=False, hf_config=types.SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
)


class Server(Side):
    """Requests that come, are prefilled in chunks, decode, and end; nothing is computed."""

    def __init__(self, ours: bool, **sizes: Any) -> None:
        super().__init__(ours, **sizes)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.alloc,
            page_size=PAGE,
            sliding_window_size=128,
        )
        context = types.SimpleNamespace(
            server_args=None,
            params=params,
            is_hybrid_ssm=False,
            is_hybrid_swa=True,
            full_tokens_per_layer=self.alloc.size_full,
            enable_hierarchical_cache=False,
            tp_worker=None,
        )
        with self.acting():
            self.cache = create_unified_radix_cache(context)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """SGLang's functions use this side's table writes and tree component inside."""
        hooks = self.parts.hooks
        with contextlib.ExitStack() as stack:
            for name in ("maybe_write_dsv4_extend", "maybe_write_dsv4_decode"):
                stack.enter_context(mock.patch.object(allocation, name, hooks[name]))
            stack.enter_context(mock.patch.object(c128_sidecar_component, "C128SidecarComponent", self.parts.component))
            yield

    def request(self, rid: str, ids: list[int], session: Any = None) -> Req:
        """A request with its prefix matched and locked, as admission leaves it."""
        req = Req(rid, "", array("q", ids), SamplingParams(max_new_tokens=64), session=session)
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)
        return req

    def prefill(self, req: Req, end: int | None = None) -> Any:
        """Allocate ``[prefix, end)`` (to the end of the prompt by default); an unfinished prompt is checkpointed."""
        whole = len(req.full_untruncated_fill_ids)
        end = whole if end is None else end
        batch = self._running([req], [end])
        batch.prefix_lens, batch.extend_lens = [req.prefix_len], [end - req.prefix_len]
        batch.extend_num_tokens = end - req.prefix_len
        with self.acting():
            allocation.alloc_for_extend(batch)
            req.extend_end = end
            if end < whole:
                self.cache.checkpoint(req, up_to=end)
        req.prefix_len = end
        return batch.out_cache_loc_dsv4

    def step(self, reqs: list[Req]) -> Any:
        """One decode of a batch; each request gets a token."""
        batch = self._running(reqs, [req.kv.kv_allocated_len for req in reqs])
        batch.req_pool_indices = torch.tensor([req.kv.req_pool_idx for req in reqs])
        batch.req_pool_indices_cpu = batch.req_pool_indices
        with self.acting():
            allocation.alloc_for_decode(batch, 1)
        for req in reqs:
            req.output_ids.append(7)
        return batch.out_cache_loc_dsv4

    def evict_swa(self, req: Req) -> None:
        """SGLang's window eviction of a running request."""
        common.free_swa_out_of_window_slots(
            req,
            req.kv.kv_committed_len - 1,
            sliding_window_size=128,
            page_size=PAGE,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.alloc,
        )

    def end(self, req: Req, checkpoint: bool = True) -> None:
        """Finish: the tree keeps what it can."""
        req.output_ids.append(7)
        req.finished_reason = FINISH_LENGTH(length=len(req.output_ids))
        with self.acting():
            common.release_kv_cache(req, self.cache, checkpoint=checkpoint)

    def retract(self, req: Req) -> None:
        """Give everything up and compute it again later."""
        with self.acting():
            schedule_batch.release_req(
                req=req,
                remaing_req_count=1,
                req_to_token_pool=self.table,
                token_to_kv_pool_allocator=self.alloc,
                tree_cache=self.cache,
                hisparse_coordinator=None,
                offload_kv=False,
            )

    def readmit(self, req: Req) -> None:
        """A retracted request enters again."""
        req.init_next_round_input(self.cache)
        req.lock = self.cache.lock(req.last_node)

    def evict(self, tokens: int = 1 << 20) -> int:
        """Evict from the tree."""
        with self.acting():
            return self.cache.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens)).num_tokens_evicted

    def tree(self) -> dict[str, int]:
        """Sizes of the tree."""
        return {
            "full evictable": self.cache.full_evictable_size(),
            "swa evictable": self.cache.swa_evictable_size(),
            "full protected": self.cache.full_protected_size(),
            "swa protected": self.cache.swa_protected_size(),
        }

    def _running(self, reqs: list[Req], lengths: list[int]) -> Any:
        seq = torch.tensor(lengths)
        return types.SimpleNamespace(
            reqs=reqs,
            device="cpu",
            tree_cache=self.cache,
            req_to_token_pool=self.table,
            token_to_kv_pool_allocator=self.alloc,
            seq_lens=seq,
            seq_lens_cpu=seq,
            hisparse_coordinator=None,
            out_cache_loc_dsv4=None,
            maybe_evict_swa=lambda: None,
            is_dllm=lambda: False,
            encoder_lens=None,
            model_config=MODEL,
        )
