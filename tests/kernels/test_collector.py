"""The collector stays out of minibatches, and is as it was afterwards."""

import gc
import weakref

import pytest

from odc_kernels.collector import collected_between


class Cycle:
    def __init__(self):
        self.me = self


def test_cycles_are_collected_when_asked_and_not_before():
    with collected_between() as collect:
        assert not gc.isenabled()
        gone = weakref.ref(Cycle())
        assert gone() is not None
        collect()
        assert gone() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_it_is_on_again_after_an_error_and_off_where_it_was_off():
    with pytest.raises(RuntimeError), collected_between():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with collected_between():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
