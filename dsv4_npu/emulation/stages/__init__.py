"""Draft stages with memory of their own: an MTP layer, or the stages of a DSpark checkpoint, over the target's pools.

Their rows lie in the SWA slab behind the target's layers, on the target's pages: whatever maps, frees, shares or moves
an SWA page does so for them too. They have no compressor.
"""

from dsv4_npu.emulation.stages.drafter import OwnDrafter, Proposal, StageRounds
from dsv4_npu.emulation.stages.net import StageNet, build_stages

__all__ = ["OwnDrafter", "Proposal", "StageNet", "StageRounds", "build_stages"]
