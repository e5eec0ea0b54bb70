"""The settings of conf/base/mlflow.yml. Every command reads them, and most need no MLflow: it is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.errors import EquidpError
from equidp.options import Declared, refusal_of


class Server(Declared):
    """MLflow's store: its address, and the block of conf/local/credentials.yml that has variables for its client."""

    mlflow_tracking_uri: str
    credentials: str | None = None


class Disabled(Declared):
    """Pipelines that are not tracked: a command with no other pipelines opens no run."""

    pipelines: tuple[str, ...] = ()


class NewExperiment(Declared):
    """How an experiment is made: the URI of its folder for artifacts (null: the server decides), and its tags."""

    artifact_location: str | None = None
    tags: dict[str, str] | None = None


class ExperimentSettings(Declared):
    """The experiment of all runs, and how it is made if it does not exist."""

    name: str = "equidp"
    create_experiment_kwargs: NewExperiment = NewExperiment()


class TrackingSettings(Declared):
    """What is tracked, and under which name."""

    disable_tracking: Disabled = Disabled()
    experiment: ExperimentSettings = ExperimentSettings()


class MlflowSettings(Declared):
    """All of mlflow.yml."""

    server: Server
    tracking: TrackingSettings = TrackingSettings()


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with their defaults.

    Raises:
        EquidpError: a setting is unknown, or a value is wrong. The value is not shown, because an address may hold a
            password.
    """
    try:
        return MlflowSettings.model_validate(settings).model_dump()
    except ValidationError as error:
        first, why = refusal_of(error)
        raise EquidpError(f"mlflow.yml: {'.'.join(map(str, first['loc']))} is not valid: {why}.") from None
