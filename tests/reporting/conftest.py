"""A made-up comparison of three algorithms on ten classes and two sexes, as the nodes would hand it to the report."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest

from equidp.evaluation.metrics import evaluate, metrics_document

CLASSES = tuple(str(k) for k in range(10))
HOSTILE = "<script>alert(1)</script><a href='javascript:alert(2)'>{{ 7 * 7 }}</a>"


@dataclass(frozen=True)
class Sample:
    """The arguments of `html_report`."""

    title: str
    documents: dict
    privacy: dict
    histories: dict
    settings: dict
    provenance: dict
    group_table: pd.DataFrame

    def arguments(self) -> dict:
        return dict(vars(self))

    def only(self, algorithm: str) -> Sample:
        """The report of one run: the baseline's figures come with its document."""
        keep = {algorithm}
        return replace(
            self,
            documents={k: v for k, v in self.documents.items() if k in keep},
            privacy={k: v for k, v in self.privacy.items() if k in keep},
            histories={k: v for k, v in self.histories.items() if k in keep},
        )


def _scores(rng: np.random.Generator, labels: np.ndarray, skill: float) -> np.ndarray:
    scores = rng.random((len(labels), len(CLASSES)))
    scores[np.arange(len(labels)), labels] += np.where(labels == 8, skill - 0.4, skill)
    return (scores / scores.sum(axis=1, keepdims=True)).astype(np.float32)


def privacy_facts(algorithm: str, **changes: object) -> dict:
    """A `privacy.json` with ε from a real ledger."""
    facts = {
        "algorithm": algorithm,
        "private": True,
        "epsilon": 2.9866,
        "delta": 1e-5,
        "epsilon_rdp": 3.2,
        "epsilon_pld": 2.9866,
        "epsilon_published": {"value": 3.9, "formula": "classic RDP conversion, integer orders 2 to 64"},
        "adjacency": "zero-out, the slot of one record is emptied while the number of records stays",
        "sampling": "Poisson, rate 0.05",
        "unit": "record",
        "records": 1437,
        "ledger": [{"event": "poisson_gaussian", "sampling_rate": 0.05, "noise_multiplier": 1.5, "count": 200}],
        "assumptions": ["The number of records is public."],
        "diagnostics_published": [],
        "target_epsilon": 3.0,
        "noise_multiplier": 1.5,
        "secure": False,
        "seed": 0,
        "releases": ["model", "clip norms per epoch"],
        "notes": [],
    }
    return facts | changes


def _history(rng: np.random.Generator, private: bool, groups: tuple[str, ...]) -> pd.DataFrame:
    epochs = np.arange(1, 21)
    curve = 0.9 - 0.7 * np.exp(-epochs / 5) + rng.normal(0, 0.01, 20)
    frame = pd.DataFrame({"epoch": epochs, "test/accuracy": curve, "test/loss": 2.3 * np.exp(-epochs / 8)})
    if private:
        spent = np.sqrt(epochs / 20)
        frame = frame.assign(
            epsilon=2.9866 * spent, epsilon_rdp=3.2 * spent, epsilon_pld=2.9866 * spent, noise_multiplier=1.5
        )
        for k, group in enumerate(groups):
            frame[f"clip_norm/{group}"] = 1 + 0.1 * k + 0.5 * np.exp(-epochs / 10)
            frame[f"nonprivate/gradient_norm/{group}"] = 2 + 0.3 * k + np.exp(-epochs / 10)
        frame["nonprivate/cosine"] = 0.1 + 0.01 * epochs
        frame["nonprivate/mean_weight"] = 0.3 + 0.01 * epochs
    return frame


def build(sexes: tuple[str, ...] = ("Female", "Male", "Not stated")) -> Sample:
    """The sample; its last sex has no test record."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 360)
    groups = {"class": (labels, CLASSES), "sex": (rng.integers(0, 2, 360), sexes)}
    skills = {"sgd": 0.9, "dpsgd": 0.5, "dpsgd_f": 0.7}
    figures = {name: evaluate(_scores(rng, labels, s), labels, groups, classes=CLASSES) for name, s in skills.items()}
    counts = [("class", c, 40 if c == "8" else 144, 36) for c in CLASSES]
    counts += [("sex", s, 700, 180 if s != sexes[2] else 0) for s in sexes]
    return Sample(
        title="digits, seed 0",
        documents={name: metrics_document(f, None if name == "sgd" else figures["sgd"]) for name, f in figures.items()},
        privacy={
            "sgd": {"algorithm": "sgd", "private": False, "epsilon": None, "ledger": []},
            "dpsgd": privacy_facts("dpsgd"),
            "dpsgd_f": privacy_facts("dpsgd_f", epsilon_published={"value": 2.5, "formula": "counts left out"}),
        },
        histories={name: _history(rng, name != "sgd", CLASSES) for name in skills},
        settings={"dataset": "digits", "privacy": {"epsilon": 3.0, "delta": 1e-5}, "data": {"keep": {"8": 40}}},
        provenance={"commit": "0123abc", "checksums": {"digits.csv.gz": "9d2c…"}, "versions": {"torch": "2.11"}},
        group_table=pd.DataFrame(counts, columns=["grouping", "group", "train", "test"]),
    )


@pytest.fixture(scope="session")
def sample() -> Sample:
    return build()


@pytest.fixture(scope="session")
def hostile() -> Sample:
    """The same with a group whose name is markup."""
    return build(("Female", HOSTILE, "Not stated"))
