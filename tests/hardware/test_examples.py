"""The examples in the docstrings of this package run."""

import doctest
from importlib import import_module

import pytest

MODULES = ("chip", "clusters", "collectives", "load", "lookup", "torus")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples(module):
    outcome = doctest.testmod(import_module(f"meshwright.hardware.{module}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0
