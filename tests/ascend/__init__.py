"""Proofs of the Triton kernels for Ascend on a machine without an NPU: ``make ascend``, docs/ascend.md.

``keys`` and ``test_keys`` need Python alone; everything else runs in the environment that ``make ascend`` creates.
"""
