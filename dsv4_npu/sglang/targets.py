"""What is replaced in SGLang, and by what. Pure data: importing this module imports nothing of either side.

A name is ``"module:attribute"``; the attribute may be dotted. Kinds:

* ``class``, ``function``: replaced through SGLang's hook registry. Classes are leaves, since subclasses that exist
  already would keep their old base; no target may be ``None`` or a Triton kernel object.
* ``around``: ours is called with SGLang's function as its first argument.
* ``data``: a module's value (a flag, an entry of a table as ``"module:TABLE[key]"``) set to ours.
* ``check``: a module's value that SGLang must have set to ours by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

NPU = "dsv4_npu"
EMULATED = "dsv4_npu_emulated"
BOTH = (NPU, EMULATED)
KINDS = ("class", "function", "around", "data", "check")

_DSV4 = "sglang.srt.hardware_backend.npu.dsv4"
_ALLOCATION = "sglang.srt.mem_cache.allocation"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"


@dataclass(frozen=True)
class Target:
    """One replacement.

    ``moved`` names, by release, where an older SGLang keeps the target; ``absent`` the releases that do without it.
    """

    purpose: str
    theirs: str
    ours: str
    kind: str
    platforms: tuple[str, ...] = BOTH
    moved: dict[str, str] = field(default_factory=dict, hash=False)
    absent: tuple[str, ...] = ()

    def at(self, version: str | None) -> str:
        """SGLang's name of the target in release ``version``."""
        return self.moved.get(version or "", self.theirs)


_HOOKS = (
    "maybe_write_dsv4_extend",
    "maybe_write_dsv4_decode",
    "maybe_build_dsv4_verify_bundle",
    "dsv4_state_payloads",
    "dsv4_prealloc_kwargs",
    "dsv4_unwrap_prealloc",
)

#: The memory: pools, ownership and tables.
MEMORY = (
    Target("KV pool", f"{_DSV4}.dsv4_memory_pool:DSV4NPUTokenToKVPool", "dsv4_npu.sglang.kv_pool:KVPool", "class"),
    Target(
        "allocator",
        f"{_DSV4}.dsv4_allocator:DSV4NPUTokenToKVPoolAllocator",
        "dsv4_npu.sglang.allocator:KVAllocator",
        "class",
    ),
    Target(
        "request pool",
        f"{_DSV4}.dsv4_req_to_token_pool:DSV4NPUReqToTokenPool",
        "dsv4_npu.sglang.req_pool:RequestPool",
        "class",
    ),
    Target(
        "request pool of a decode server",
        f"{_DSV4}.dsv4_req_to_token_pool:DSV4NPUDecodeReqToTokenPool",
        "dsv4_npu.sglang.req_pool:DecodeRequestPool",
        "class",
    ),
    Target(
        "C128 pages in the prefix tree",
        f"{_DSV4}.c128_sidecar_component:C128SidecarComponent",
        "dsv4_npu.sglang.c128_component:C128Component",
        "class",
    ),
    *(
        Target(name, f"{_DSV4}.dsv4_common_hooks:{name}", f"dsv4_npu.sglang.table_writes:{name}", "function")
        for name in _HOOKS
    ),
)

_SPECULATIVE = "sglang.kernels.ops.speculative"

#: The pools' sizes, and the steps between a verify and the next draft.
STEPS = (
    Target(
        "pool sizes",
        "sglang.srt.model_executor.pool_configurator:DSV4PoolConfigurator",
        "dsv4_npu.sglang.sizes:PoolSizes",
        "class",
    ),
    Target(
        "clear of rejected drafts' C128 states",
        "sglang.kernels.ops.kvcache.dsv4_c128_cleanup:clear_unaccepted_c128_draft_states",
        "dsv4_npu.sglang.verify_ops:clear_unaccepted_c128_draft_states",
        "function",
        moved={"0.5.22": "sglang.kernels.ops.attention.dsv4.c128_cleanup:clear_unaccepted_c128_draft_states"},
    ),
    Target(
        "the same clear for DSpark",
        "sglang.srt.speculative.dspark_components.dspark_worker_v2:"
        "DSparkWorkerV2._commit_target_mamba_states_after_verify",
        "dsv4_npu.sglang.dspark:clear_after_commit",
        "around",
    ),
    Target(
        "greedy verification",
        f"{_SPECULATIVE}.spec_tree:verify_tree_greedy_func",
        "dsv4_npu.sglang.verify_ops:verify_tree_greedy_func",
        "function",
        moved={"0.5.22": "sglang.srt.speculative.eagle_utils:verify_tree_greedy_func"},
    ),
    *(
        Target(name, f"{_SPECULATIVE}.eagle:{name}", f"dsv4_npu.sglang.verify_ops:{name}", "function")
        for name in ("fill_bonus_tokens_func", "fill_accept_out_cache_loc_func")
    ),
    *(
        Target(name, f"{_SPECULATIVE}.cache_locs:{name}", f"dsv4_npu.sglang.cache_locs:{name}", "function", absent=old)
        for name, old in (
            ("assign_extend_cache_locs_uniform_func", ()),
            ("fill_front_out_cache_loc_func", ("0.5.22",)),
            ("assign_draft_cache_locs_contiguous_func", ("0.5.22",)),
        )
    ),
)

#: What SGLang decides by the presence of an NPU, set where there is none.
EMULATION = (
    Target(
        "DeepSeek-V4 on an out-of-tree platform",
        "sglang.srt.platforms.interface:reject_out_of_tree_path",
        "dsv4_npu.sglang.emulated:let_deepseek_v4_pass",
        "around",
        (EMULATED,),
    ),
    Target(
        "rotary embedding without a yarn scaling",
        "sglang.srt.layers.rotary_embedding.factory:get_rope_wrapper",
        "dsv4_npu.sglang.emulated:rope_of_any_device",
        "around",
        (EMULATED,),
    ),
    Target("table writes as on an NPU", f"{_ALLOCATION}:_is_npu", "dsv4_npu.sglang.emulated:YES", "data", (EMULATED,)),
    Target("pools as on an NPU", f"{_CONFIGURATOR}:_is_npu", "dsv4_npu.sglang.emulated:YES", "data", (EMULATED,)),
    Target(
        "reservation for drafts as on an NPU",
        f"{_ALLOCATION}:ALLOC_EXTEND_FUNCS[cpu]",
        f"{_ALLOCATION}:_alloc_paged_token_slots_extend_npu",
        "data",
        (EMULATED,),
    ),
)

#: SGLang decides these when it is imported; false on an NPU, they would leak C128 pages without a word.
NPU_FLAGS = (
    Target("table writes as on an NPU", f"{_ALLOCATION}:_is_npu", "dsv4_npu.sglang.emulated:YES", "check", (NPU,)),
    Target("pools as on an NPU", f"{_CONFIGURATOR}:_is_npu", "dsv4_npu.sglang.emulated:YES", "check", (NPU,)),
)

TARGETS: tuple[Target, ...] = (*MEMORY, *STEPS, *EMULATION, *NPU_FLAGS)


def targets(platform: str | None, version: str | None) -> tuple[Target, ...]:
    """The targets of a platform of ours (None: of either) in SGLang's release ``version``."""
    return tuple(
        target
        for target in TARGETS
        if (platform is None or platform in target.platforms) and version not in target.absent
    )
