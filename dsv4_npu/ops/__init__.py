"""The kernels, one folder per op: schema, oracle, C++ CPU kernel, shape function, Triton kernel.

    dsv4_npu.ops.move_kv_(slab, tgt, src)                       checked, on the device of the tensors
    dsv4_npu.ops.move_kv_(slab, tgt, src, backend="ref")        a named implementation: cpu, triton or ref
    torch.ops.dsv4_npu.move_kv_(slab, tgt, src)                 the bare op, as torch.compile sees it

C++ and Triton write tensors behind autograd's back: their ``_version`` stays as it was, so autograd cannot notice that
a tensor it saved has changed.

Importing this package needs neither Triton nor the compiled extension; see :mod:`dsv4_npu.ops.availability`.
"""

from __future__ import annotations

from dsv4_npu.ops.chain_speculative_sampling import chain_speculative_sampling
from dsv4_npu.ops.clear_c128_draft_states import clear_c128_draft_states_
from dsv4_npu.ops.clear_request_states import clear_request_states_
from dsv4_npu.ops.compact_accept import compact_accept_
from dsv4_npu.ops.extend_slots import extend_slots
from dsv4_npu.ops.fill_bonus_tokens import fill_bonus_tokens_
from dsv4_npu.ops.gather_accepted_slots import gather_accepted_slots
from dsv4_npu.ops.move_kv import move_kv_
from dsv4_npu.ops.top_k_renorm_prob import top_k_renorm_prob
from dsv4_npu.ops.top_p_renorm_prob import top_p_renorm_prob
from dsv4_npu.ops.tree_speculative_sampling_target_only import tree_speculative_sampling_target_only
from dsv4_npu.ops.verify_tree_greedy import verify_tree_greedy

__all__ = [
    "chain_speculative_sampling",
    "clear_c128_draft_states_",
    "clear_request_states_",
    "compact_accept_",
    "extend_slots",
    "fill_bonus_tokens_",
    "gather_accepted_slots",
    "move_kv_",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]
