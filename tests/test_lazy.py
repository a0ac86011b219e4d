"""Loading on first use: alike in every package that does it."""

import subprocess
import sys

import pytest

import meshwright
import meshwright.planner
import meshwright.solver

PACKAGES = [meshwright, meshwright.planner, meshwright.solver]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_every_name_is_loaded_once_and_kept(package):
    for name in package.__all__:
        found = getattr(package, name)
        assert vars(package)[name] is found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.__name__)
def test_a_name_that_is_not_there_is_said_with_its_package(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nonsense'"):
        _ = package.nonsense
    assert not hasattr(package, "_nothing")


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys, meshwright as mw, meshwright.planner as planner; "
        "print('meshwright.planner.methods' in sys.modules, end=' '); planner.Zero; "
        "print('meshwright.planner.methods' in sys.modules, 'meshwright.planner.planner' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]
