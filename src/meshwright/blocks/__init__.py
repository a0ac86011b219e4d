"""Blocks: the parts of a program whose split follows from one contraction's split, and the segments that repeat."""

from meshwright.blocks.block import Block, Contraction, Segment
from meshwright.blocks.blocks import Blocks
from meshwright.blocks.find import blocks_of, find_blocks

__all__ = ["Block", "Blocks", "Contraction", "Segment", "blocks_of", "find_blocks"]
