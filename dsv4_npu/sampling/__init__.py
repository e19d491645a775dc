"""The sampling functions under the names and argument lists that SGLang uses for ``sgl_kernel_npu.sample``.

    from dsv4_npu.sampling import chain_speculative_sampling_triton as chain_speculative_sampling

Each takes ``backend``: "auto" (this package's kernel for the tensors' device), "triton", "cpu" (C++), "ref", or
"sgl_kernel_npu": the installed library's function if it passes the self-check, else this package's own, said once.
"""

from __future__ import annotations

from dsv4_npu.sampling.bindings import (
    BACKENDS,
    chain_speculative_sampling_triton,
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from dsv4_npu.sampling.self_check import first_failure

__all__ = [
    "BACKENDS",
    "chain_speculative_sampling_triton",
    "first_failure",
    "top_k_renorm_prob",
    "top_p_renorm_prob",
    "tree_speculative_sampling_target_only",
    "verify_tree_greedy",
]
