"""How many tokens and requests a deployment holds: the ``plan`` command over :mod:`dsv4_npu.budget`."""

from dsv4_npu.planning.plan import Change, Deployment, Plan, make_plan

__all__ = ["Change", "Deployment", "Plan", "make_plan"]
