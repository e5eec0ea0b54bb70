"""Nodes of the audit."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from equidp import audit
from equidp.audit.figures import exposure_by_group
from equidp.audit.page import audit_report
from equidp.data.records import Records, Split
from equidp.mechanism.device import choose_device
from equidp.parameters import Settings
from equidp.pipelines.provenance import provenance_facts
from equidp.pipelines.reporting.nodes import shown_settings
from equidp.reporting.tables import BASELINE
from equidp.training import augmentation, groups_of, make_model, plan_run, record_loss, units_in


def audit_algorithm(train: Records, test: Records, public: Records, settings: Settings) -> dict[str, Any]:
    """Canaries against the claimed ε, and membership inference per group; audit.json."""
    return audit.run(
        Split(train, test, public),
        _training_setup(train, public, settings),
        settings.audit,
        seed=settings.seed,
        groupings=settings.data.groups,
        progress=True,
    )


def _training_setup(train: Records, public: Records, settings: Settings) -> audit.TrainingSetup:
    """How the audited algorithm trains."""
    wanted, loop, grouping = settings.privacy, settings.training, settings.data.groups[0]
    algorithm, baseline = (settings.algorithm(name).averaged(loop.average) for name in (settings.audited, BASELINE))
    plan = plan_run(
        algorithm,
        units=units_in(train, wanted),
        groups=len(groups_of(algorithm, train, grouping)[1]),
        privacy=wanted,
        training=loop,
    )
    device = choose_device(loop.device)
    return audit.TrainingSetup(
        build_model=lambda schema: make_model(schema, settings.model, algorithm, settings.seed),
        algorithm=algorithm,
        plan=plan,
        loss=record_loss(loop.class_weights, train.schema.classes, device),
        learning_rate=loop.rate(plan.steps),
        optimizer=loop.descent,
        grouping=grouping,
        by_unit=wanted.by_unit,
        physical_batch_size=loop.physical_batch_size,
        precision=loop.precision,
        device=device,
        public=public if len(public) else None,
        augmentation=augmentation(loop, train.schema, settings.seed),
        baseline=baseline,
    )


def draw_exposure(findings: dict[str, Any], data: dict[str, Any]) -> go.Figure:
    """Who is exposed most, before and after privacy."""
    return exposure_by_group(findings, data["groups"][0])


def write_report(
    findings: dict[str, Any],
    provenance: dict[str, Any],
    dataset: str,
    seed: int,
    data: dict[str, Any],
    model: dict[str, Any],
    privacy: dict[str, Any],
    training: dict[str, Any],
    settings: dict[str, Any],
    audited: dict[str, Any],
) -> str:
    """The HTML page of the audit, one self-contained file."""
    name = audited["algorithm"]
    shown = shown_settings(dataset, seed, data, model, privacy, training)
    return audit_report(
        f"Audit of {name} on {dataset}",
        findings,
        shown | {f"{name}.options": audited["options"], "audit": settings},
        provenance_facts(provenance),
    )
