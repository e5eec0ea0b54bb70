"""Records: parts that do not fit together are refused, by the dataset's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from equidp.data.records import Records, Schema, Split
from equidp.errors import EquidpError

SCHEMA = Schema("toy", "tabular", (2,), ("no", "yes"), {"class": ("no", "yes")})
LABELS = torch.tensor([0, 1, 1])
WHOLE = Records(torch.zeros(3, 2), LABELS, {"class": LABELS}, SCHEMA)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"features": torch.zeros(2, 2)}, "features has 2 rows, labels have 3"),
        ({"features": torch.zeros(3, 4)}, r"features have shape \(4,\), the schema says \(2,\)"),
        ({"features": torch.zeros(3, 2).double()}, r"features are float64, and must be float32 \(images uint8, .*\)"),
        ({"features": torch.zeros(3, 2).numpy()}, "features are of type ndarray, and must be a torch.Tensor"),
        ({"labels": [0, 1, 1]}, "labels are of type list, and must be a torch.Tensor"),
        ({"labels": LABELS[:, None]}, r"labels have shape \(3, 1\), and must be one number per record"),
        ({"unit": LABELS[:, None]}, r"unit have shape \(3, 1\), and must be one number per record"),
        ({"labels": LABELS.int()}, "labels are int32, and must be int64"),
        ({"groups": {"class": LABELS.float()}}, r"groups\[class\] are float32, and must be int64"),
        ({"unit": torch.zeros(1)}, "unit has 1 rows, labels have 3"),
        ({"labels": LABELS + 1}, "labels are from 1 to 2, and must be from 0 to 1"),
        ({"groups": {"class": LABELS - 1}}, r"groups\[class\] are from -1 to 0, and must be from 0 to 1"),
        ({"groups": {"sex": LABELS}}, r"groupings are \['sex'\], the schema says \['class'\]"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(part: dict[str, Any], message: str) -> None:
    with pytest.raises(EquidpError, match=f"^Records of dataset 'toy' do not fit together: {message}; correct"):
        dataclasses.replace(WHOLE, **part)


def test_what_a_notebook_shows_of_records_has_no_values_of_theirs() -> None:
    owned = dataclasses.replace(WHOLE, unit=LABELS)
    assert repr(owned) == "<3 Records of toy: features [3, 2], labels [3], unit [3], groups class>"
    assert repr(Split(owned, WHOLE, WHOLE.take(LABELS == 2))).count("tensor") == 0
