"""Rules, which describe each operation as a loop nest."""

from meshwright.rules.base import Loop, LoopNest, Signature, TensorType, nest
from meshwright.rules.registry import has_rule, kernel_name, loop_nest, rule

__all__ = ["Loop", "LoopNest", "Signature", "TensorType", "has_rule", "kernel_name", "loop_nest", "nest", "rule"]
