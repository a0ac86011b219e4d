"""Planner: from a traced function and a mesh to a plan."""

from meshwright.planner.methods import Auto, DataParallel, Manual, Method, TensorParallel, Zero
from meshwright.planner.plan import Plan
from meshwright.planner.planner import plan

__all__ = ["Auto", "DataParallel", "Manual", "Method", "Plan", "TensorParallel", "Zero", "plan"]
