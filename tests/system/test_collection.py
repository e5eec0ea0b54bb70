"""Garbage collection: a command's imports are passed over, a notebook's process is left as it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import click
import pytest

from equidp.system import collection


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()  # as for all tests


def test_a_command_collects_nothing_until_its_imports_are_done() -> None:
    with click.Context(click.Command("run")), collection.postponed():
        assert not gc.isenabled()
        collection.settle()
        assert gc.isenabled()
        assert gc.get_freeze_count()
    assert gc.isenabled()


def test_a_command_that_is_refused_before_leaves_the_collector_on() -> None:
    with pytest.raises(ValueError, match="refused"), click.Context(click.Command("run")), collection.postponed():
        raise ValueError("refused")
    assert gc.isenabled()


def test_in_a_notebook_garbage_is_collected_all_the_time() -> None:
    with collection.postponed():
        assert gc.isenabled()
        collection.settle()
    assert not gc.get_freeze_count()


def test_who_has_switched_the_collector_off_finds_it_off() -> None:
    gc.disable()
    with click.Context(click.Command("run")), collection.postponed():
        collection.settle()
        assert not gc.isenabled()
    assert not gc.isenabled()
