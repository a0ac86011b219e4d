"""windows"""

from meshwright.rules.base import Rule

RULES: dict[str, Rule] = {}
