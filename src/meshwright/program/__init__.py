"""The one form of a step: operations with stable ids on typed values, with regions for loops, branches, checkpoints."""

from meshwright.program.program import Operation as Operation
from meshwright.program.program import Program as Program
