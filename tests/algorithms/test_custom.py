"""Custom: what combines, what is refused and why, and the ε that follows from the parts."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from equidp.accounting.events import fuse
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.custom import PARTS, make_part
from equidp.errors import EquidpError
from equidp.mechanism.parts import Part

KINDS = [kind for kind in PARTS if kind not in ("update", "acceptance", "released_weights")]
COMBINATIONS = [dict(zip(KINDS, names, strict=True)) for names in itertools.product(*(PARTS[k] for k in KINDS))]


def test_the_page_names_every_part() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms" / "custom.md").read_text(encoding="utf-8")
    for kind, parts in PARTS.items():
        (row,) = re.findall(rf"^\| `{kind}` \|(.*)\|$", page, flags=re.M)
        assert set(re.findall(r"`(\w+)`", row)) == set(parts), kind


def test_the_page_names_the_settings_that_no_algorithm_has() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms" / "custom.md").read_text(encoding="utf-8")
    known = {field for kind in ALGORITHMS.values() for field in kind.model_fields}
    own = {field for parts in PARTS.values() for part in parts.values() for field in part.model_fields} - known
    (named,) = re.findall(r"in the algorithm that introduced it. Exceptions:\n\n(.*?)\n\n", page, flags=re.S)
    assert set(re.findall(r"^\| `(\w+)` \|", named, flags=re.M)) - known == own  # other rows name another default


def test_every_combination_trains_within_its_bound_or_says_why_not(lab: Any) -> None:
    built = refused = 0
    for names in COMBINATIONS:
        try:
            algorithm = algorithm_settings("custom", names).build()
        except EquidpError as error:
            refused += any(reason in error.message for reason in ("does not hold here", "needs", "no bound"))
            continue
        assert algorithm.events(lab.plan())
        built += 1
    assert built > 100
    assert built + refused == len(COMBINATIONS)


@pytest.mark.parametrize("weights", sorted(set(PARTS["weights"]) - {"unit", "constant_length"}))
@pytest.mark.parametrize("side_release", sorted(PARTS["side_release"]))
def test_weight_rules_train_beside_side_releases(lab: Any, weights: str, side_release: str) -> None:
    options = {"weights": weights, "side_release": side_release, "acceptance": {"name": "annealing"}}
    try:
        run = lab.trained("custom", options)
    except EquidpError as error:
        assert "does not use" in error.message  # noqa: PT017
        return
    assert run.parameters.isfinite().all()
    assert run.trainer.algorithm.covers(run.trainer.plan, run.trainer.ledger.events)


@pytest.mark.slow
def test_a_combination_that_no_paper_has(lab: Any) -> None:
    options = {
        "weights": {"name": "psasc", "scale": 0.8},
        "side_release": {"name": "group_clip_counts", "count_noise_multiplier": "5x"},
        "schedule": {"name": "phases", "clip_decay": 1.0},
        "contribution": {"name": "inner_momentum", "momentum_length": 1},
        "update": {"name": "outer_momentum"},
        "initial": {"clip_norm": 0.5},
    }
    algorithm = algorithm_settings("custom", options).build()
    plan = algorithm.calibrated(lab.plan(records=2000, batch_size=20), 1.0)
    run = lab.trained("custom", options, plan=plan)
    expected = [fuse(plan.noise_multiplier * f, 5 * plan.noise_multiplier) for f in (0.64, 0.8, 1.0)]
    assert [e.noise_multiplier for e in run.trainer.ledger.events] == pytest.approx(expected)
    assert 0.99 < algorithm.epsilon(plan).value <= 1.0


def test_a_schedule_scales_a_led_bound_for_a_step_and_leaves_what_leads_it_alone(lab: Any) -> None:
    # empty batches without noise: the share within C is 0, so C grows by e^(0.2·0.5) a step; factors are 4, 4, 1, 1
    options = {
        "side_release": "quantile",
        "schedule": {"name": "phases", "phases": 2, "phase_decay": 1.0, "clip_decay": 4.0},
    }
    trainer = lab.trainer("custom", options, random=lab.random(coins=False, noise=0.0))
    bounds = []
    for _ in range(4):
        trainer.run_steps(1)
        bounds.append(float(trainer.shown["sensitivity"]))
    assert bounds == pytest.approx([4.0, 4 * math.exp(0.1), math.exp(0.2), math.exp(0.3)])
    assert float(trainer.public["clip_norm"]) == pytest.approx(math.exp(0.4))


@pytest.mark.parametrize(
    ("options", "whole"),
    [
        ({}, True),
        ({"acceptance": "annealing"}, True),
        ({"side_release": "group_clip_counts"}, False),
        ({"acceptance": {"name": "annealing", "energy": "private"}}, False),
        ({"sampler": "importance", "weights": "constant_length"}, False),
    ],
)
def test_a_figure_that_leaves_a_release_out_is_marked_as_no_guarantee(
    lab: Any, options: dict[str, Any], whole: bool
) -> None:
    published = algorithm_settings("custom", options).build().published_epsilon(lab.plan())
    assert published is not None
    assert published.guarantee == whole
    assert ("left out" in published.formula) == (not whole)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"weights": "unit"}, "no bound"),
        ({"weights": "constant_length"}, "needs contribution"),
        ({"sampler": "importance"}, "constant_length"),
        ({"sampler": "importance", "weights": "constant_length", "schedule": "linear"}, "schedule must be constant"),
        ({"sampler": "importance", "weights": "constant_length", "side_release": "quantile"}, "side release"),
        (
            {"sampler": "importance", "weights": "constant_length", "contribution": "inner_momentum"},
            "plain gradients",
        ),
        (
            {
                "sampler": "importance",
                "weights": "constant_length",
                "acceptance": {"name": "annealing", "energy": "private"},
            },
            "does not pay",
        ),
        ({"weights": "normalise", "side_release": "quantile"}, "does not use"),
        ({"weights": "flat", "side_release": "strict_bound"}, "does not use"),
        ({"contribution": "record_momentum"}, "full_batch"),
    ],
)
def test_parts_that_cannot_hold_together_are_refused_with_a_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(EquidpError, match=reason):
        algorithm_settings("custom", options).build()


def test_importance_sampling_goes_with_a_public_acceptance(lab: Any) -> None:
    options = {"sampler": "importance", "weights": "constant_length", "acceptance": "annealing"}
    run = lab.trained("custom", options, plan=lab.plan(epochs=2))
    assert run.trainer.algorithm.covers(run.trainer.plan, run.trainer.ledger.events)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "psacs"}, "Did you mean 'psasc'"),
        ({"weights": {"name": "psasc", "skale": 1}}, "Did you mean 'scale'"),
        ({"weights": {"name": "psasc", "scale": -1}}, r"custom\.weights\.scale=-1 is not valid"),
        ({"side_release": {"name": "group_size_counts", "count_noise_multiplier": math.inf}}, "=inf is not valid"),
        (
            {"side_release": {"name": "group_size_counts", "count_noise_multiplier": 0}},
            r"=0 is not valid: .* than 0\.$",
        ),
        ({"side_release": {"name": "group_size_counts", "count_noise_multiplier": "0x"}}, "='0x' is not valid"),
        ({"side_release": {"name": "group_size_counts", "count_noise_multiplier": "0.00x"}}, "='0.00x' is not valid"),
        (
            {"weights": {"scale": 1}},
            r"custom\.weights has no name: give custom\.weights\.name, one of constant_length, ",
        ),
        ({"initial": {"clip_norm": -1}}, r"custom\.initial\.clip_norm=-1 is not valid"),
        (
            {"side_release": {"name": "quantile", "count_noise_multiplier": "much"}},
            r"custom\.side_release\.count_noise_multiplier='much' is not valid: .* or a ratio such as 10x\.",
        ),
        ({"acceptance": {"name": "annealing", "stop_on": "published_epsilon"}}, "acceptance is not valid: stop_on="),
        ({"initial": {"clip_nrom": 1}}, "Did you mean 'clip_norm'"),
        ({"waits": "flat"}, "Did you mean 'weights'"),
    ],
)
def test_misspelt_input_is_told_what_would_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        algorithm_settings("custom", options).build()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpsgdf", {}),
        ("dpsgd_f", {"clip_nrom": 1}),
        ("dpsgd", {"clip_norm": 0}),
        ("dpsgd", {"clip_norm": "inf"}),
        ("auto_s", {"stability": 0}),
    ],
)
def test_named_algorithms_refuse_what_does_not_exist(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(EquidpError):
        algorithm_settings(name, options)


def test_start_values_have_defaults_and_can_be_set() -> None:
    algorithm = algorithm_settings("custom", {"weights": "scale_or_clip", "initial": {"clip_norm": 2}}).build()
    assert dict(algorithm.initial) == {"clip_norm": 2.0, "strict_clip_norm": 50.0}


@pytest.mark.parametrize("kind", sorted(PARTS))
def test_every_part_describes_itself_and_its_settings(kind: str) -> None:
    for name, part in PARTS[kind].items():
        made = make_part(kind, {"name": name})
        assert isinstance(made, Part)
        assert (part.__doc__ or "").strip()


def test_every_setting_of_every_algorithm_has_a_default() -> None:
    for settings in ALGORITHMS.values():
        assert settings().build().name in ALGORITHMS
