"""From exact training figures to their drawings: counts per bin, never the records' own values."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import nn

from equidp.accounting.ledger import Ledger
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.mechanism.diagnostics import HISTOGRAMS, binned
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.reporting import figures
from equidp.training import plan_run
from equidp.training.preparation import named_columns

RECORDS, EPOCHS = 200, 3


@pytest.fixture(scope="module")
def history() -> pd.DataFrame:
    """Drawn once."""
    return trained()


def trained() -> pd.DataFrame:
    """Three epochs of full-batch DPSGD with diagnostics."""
    torch.manual_seed(0)
    labels = torch.arange(RECORDS) % 2
    schema = Schema("toy", "tabular", (4,), ("0", "1"), {"class": ("0", "1")})
    records = Records(torch.rand(RECORDS, 4), labels, {"class": labels}, schema)
    algorithm = algorithm_settings("dpsgd", {"clip_norm": 0.5}).build()
    privacy = PrivacySettings(noise_multiplier=1.0, delta=1e-5)
    training = TrainingSettings(epochs=EPOCHS, batch_size=RECORDS)
    trainer = Trainer(
        model=nn.Linear(4, 2),
        loss=lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"),
        algorithm=algorithm,
        plan=plan_run(algorithm, units=RECORDS, groups=2, privacy=privacy, training=training),
        population=Population(records, labels),
        random=SeededRandom(0, "cpu"),
        ledger=Ledger(),
        learning_rate=0.1,
        diagnostics=True,
    )
    return pd.DataFrame(named_columns(row, ("0", "1")) for row in trainer.train(progress=False))


def test_values_are_counted_in_their_bins():
    # edges 0, 1, 2 and open above: .5 | 1, 1.5 | 2, 9; below the first edge counts there too
    assert binned(torch.tensor([0.5, 1.0, 1.5, 2.0, 9.0, -1.0]), (0.0, 1.0, 2.0)).tolist() == [2, 2, 2]
    assert binned(torch.tensor([]), (0.0, 1.0)).tolist() == [0, 0]


def test_every_sampled_record_and_every_step_is_counted_once_per_epoch(history):
    norms = history.filter(like="nonprivate/gradient_norm_histogram/")
    assert norms.shape == (EPOCHS, len(HISTOGRAMS["gradient_norm"]))
    assert norms.sum(axis=1).tolist() == [RECORDS] * EPOCHS
    assert history.filter(like="nonprivate/cosine_histogram/").sum(axis=1).tolist() == [1] * EPOCHS


def test_the_diagnostic_figures_draw_what_was_logged(history):
    chart = figures.diagnostic_distribution({"dpsgd": history}, last=2)
    assert sum(y or 0 for y in chart.data[0].y) == pytest.approx(1)
    assert len(figures.diagnostic_distribution({"dpsgd": history}, "cosine").data) == 1
    assert figures.diagnostics_in({"dpsgd": history}) == ["batch_size", "nonfinite", "mean_weight", "cosine"]
    assert figures.diagnostic_curve({"dpsgd": history}, "cosine").data[0].y[-1] == history["nonprivate/cosine"].iloc[-1]
    assert [t.name for t in figures.group_diagnostic(history, "dpsgd").data] == ["0", "1"]


def test_a_groups_terms_are_those_of_its_own_gradients(history):
    """One step per epoch, at the first on parameters that are known: everything can be computed by hand."""
    torch.manual_seed(0)
    features = torch.rand(RECORDS, 4)
    model = nn.Linear(4, 2)
    error = model(features).softmax(1).detach() - nn.functional.one_hot(torch.arange(RECORDS) % 2, 2)
    gradients = torch.cat([(error[:, :, None] * features[:, None]).flatten(1), error], dim=1)
    first = history.iloc[0]
    for group in (0, 1):
        mine = gradients[group::2]
        norms = mine.norm(dim=1)
        assert first[f"nonprivate/above/{group}"] == pytest.approx(float((norms > 0.5).float().mean()))
        assert first[f"nonprivate/excess/{group}"] == pytest.approx(float((norms - 0.5).clamp(min=0).mean()), rel=1e-5)
        assert first[f"nonprivate/mean_gradient/{group}"] == pytest.approx(float(mine.mean(0).norm()), rel=1e-5)
        # σ·C·√d, d = 10, over the group's 100 records of the batch
        assert first[f"nonprivate/noise/{group}"] == pytest.approx(1.0 * 0.5 * 10**0.5 / 100, rel=1e-5)


def test_a_secure_run_logs_nothing_more_of_its_groups(history, monkeypatch):
    monkeypatch.setattr(SeededRandom, "repeatable", False)
    columns = trained().columns
    assert "nonprivate/gradient_norm/0" in columns
    assert not [
        c for c in columns if c.startswith(("nonprivate/above", "nonprivate/excess", "nonprivate/mean_gradient"))
    ]
