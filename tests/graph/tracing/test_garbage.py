"""The pause of the garbage collector: it ends, whatever happens, and leaves the collector as it was."""

import gc

import pytest

from meshwright.errors import TraceError
from meshwright.graph import trace
from meshwright.graph.tracing.garbage import collector_paused, heap_frozen


@pytest.fixture(autouse=True)
def nothing_frozen():
    gc.unfreeze()  # CPython 3.12 starts with some objects frozen


def test_it_pauses_and_goes_on():
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_caller_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        assert gc.get_freeze_count() == frozen > 0
    finally:
        gc.unfreeze()


def test_a_function_that_cannot_be_traced_does_not_leave_it_paused():
    def fails(x):
        raise ValueError("no")

    with pytest.raises(TraceError):
        trace(fails, 1.0)
    assert gc.isenabled()


def test_the_few_objects_that_an_interpreter_freezes_itself_are_no_frozen_heap(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    thawed = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    with heap_frozen():
        pass
    assert thawed


def test_a_frozen_heap_thaws_whatever_happens():
    with pytest.raises(ValueError, match="no"), heap_frozen():
        frozen = gc.get_freeze_count()
        assert frozen > 0
        with heap_frozen():
            assert gc.get_freeze_count() > frozen // 2  # what is freed meanwhile counts no longer
        assert gc.get_freeze_count() > frozen // 2
        assert gc.isenabled()
        raise ValueError("no")
    assert gc.get_freeze_count() == 0
