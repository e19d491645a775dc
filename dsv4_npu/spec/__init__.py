"""The rules of speculation: verify, accept, commit. No storage lives here."""

from dsv4_npu.spec.commit import CommitPlan, accepted_rows, accepted_tokens, plan_commit
from dsv4_npu.spec.verify import VerifyResult, accept_greedy, accept_rejection, chain_layout

__all__ = [
    "CommitPlan",
    "VerifyResult",
    "accept_greedy",
    "accept_rejection",
    "accepted_rows",
    "accepted_tokens",
    "chain_layout",
    "plan_commit",
]
