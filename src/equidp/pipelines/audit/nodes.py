"""Nodes of the audit."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from equidp import audit
from equidp.algorithms import BASELINE
from equidp.audit.figures import exposure_by_group
from equidp.audit.page import audit_report
from equidp.data.records import Records, Split
from equidp.mechanism.device import choose_device
from equidp.parameters import Settings, concerning
from equidp.pipelines.provenance import provenance_facts
from equidp.pipelines.training.nodes import model_card
from equidp.training import augmentation, loss_of, make_model
from equidp.training.planning import partition, plan_of
from equidp.training.statement import membership_facts


def audit_algorithm(train: Records, test: Records, public: Records, settings: Settings) -> dict[str, Any]:
    """Canaries against the claimed ε, and membership inference per group; audit.json."""
    findings = audit.run(
        Split(train, test, public),
        _training_setup(train, public, settings),
        settings.audit,
        seed=settings.seed,
        groupings=settings.data.groups,
        progress=True,
    )
    findings["training"] |= {
        "unit": settings.privacy.unit,
        "membership": membership_facts(train.membership),
        "card": model_card(settings.audited, train, settings),
    }
    return findings


def _training_setup(train: Records, public: Records, settings: Settings) -> audit.TrainingSetup:
    """How the audited algorithm trains."""
    loop = settings.training
    algorithm, baseline = (settings.algorithm(name).averaged(loop.average) for name in (settings.audited, BASELINE))
    plan = plan_of(settings.audited, train, settings)
    device = choose_device(loop.device)
    return audit.TrainingSetup(
        build_model=lambda schema: make_model(schema, settings.model, algorithm, settings.seed),
        algorithm=algorithm,
        plan=plan,
        loss=loss_of(loop, train, device),
        learning_rate=loop.rate(plan.steps),
        optimizer=loop.descent,
        grouping=partition(algorithm, settings.data.groups[0]),
        by_unit=settings.privacy.by_unit,
        physical_batch_size=loop.physical_batch_size,
        precision=loop.precision,
        device=device,
        public=public if len(public) else None,
        augmentation=augmentation(loop, train.schema, settings.seed),
        baseline=baseline,
    )


def draw_exposure(findings: dict[str, Any], settings: Settings) -> go.Figure:
    """Who is exposed most, before and after privacy."""
    return exposure_by_group(findings, settings.data.groups[0])


def write_report(findings: dict[str, Any], provenance: dict[str, Any], settings: Settings) -> str:
    """The HTML page of the audit, one self-contained file."""
    shown = concerning(settings.to_dict(), [settings.audited]) | {"audit": settings.audit.model_dump(mode="json")}
    title = f"Audit of {settings.audited} on {settings.dataset}"
    return audit_report(title, findings, shown, provenance_facts(provenance))
