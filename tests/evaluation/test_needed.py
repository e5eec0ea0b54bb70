"""The ε at which runs reach a figure."""

from __future__ import annotations

import pandas as pd
import pytest

from equidp.errors import EquidpError
from equidp.evaluation.needed import epsilon_needed


def history(*accuracies: float | None) -> pd.DataFrame:
    """One row per epoch, ε 1, 2, 3 …; None: not evaluated."""
    return pd.DataFrame({"epsilon": range(1, len(accuracies) + 1), "test/accuracy": accuracies}, dtype=float)


def test_epsilon_is_that_of_the_first_epoch_that_reaches_the_figure():
    runs = {0: history(0.5, 0.9, 0.8, 0.95), 1: history(0.5, None, 0.7, 0.9)}
    needed = epsilon_needed(runs, 0.9)
    assert needed.by_seed == {0: 2.0, 1: 4.0}
    assert needed.interval is not None
    # t(1) at 97.5 % is 12.706, s = √2
    assert (needed.interval.mean, needed.interval.half_width) == (3.0, pytest.approx(12.706, rel=1e-4))
    assert str(needed) == "3.00 ± 12.71"


def test_a_seed_that_falls_short_leaves_no_mean():
    needed = epsilon_needed({0: history(0.5, 0.9), 1: history(0.5, 0.6)}, 0.9)
    assert needed.interval is None
    assert str(needed) == "reached by 1 of 2 seeds"


@pytest.mark.parametrize(
    ("runs", "words"), [({}, "make the runs first"), ({0: history(0.9).drop(columns="epsilon")}, "no column epsilon")]
)
def test_what_has_no_curve_is_refused(runs, words):
    with pytest.raises(EquidpError, match=words):
        epsilon_needed(runs, 0.9)
