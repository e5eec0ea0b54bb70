"""The settings of conf/base/mlflow.yml. Light: every command reads them, and most need no MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.errors import EquidpError
from equidp.options import Declared, refusal_of


class Server(Declared):
    """MLflow's store: its address, and the block of conf/local/credentials.yml with variables that its client reads."""

    mlflow_tracking_uri: str
    credentials: str | None = None


class Disabled(Declared):
    """A command whose pipelines all stand here opens no run."""

    pipelines: tuple[str, ...] = ()


class NewExperiment(Declared):
    """How an experiment is made: URI of a folder for artifacts (null lets the server decide), and its tags."""

    artifact_location: str | None = None
    tags: dict[str, str] | None = None


class ExperimentSettings(Declared):
    """The experiment that runs belong to, and how it is made where it does not exist."""

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
    """The settings with their defaults.

    Raises:
        EquidpError: an unknown setting or a wrong value. Values are not shown: an address may hold a password.
    """
    try:
        return MlflowSettings.model_validate(settings).model_dump()
    except ValidationError as error:
        first, why = refusal_of(error)
        raise EquidpError(f"mlflow.yml: {'.'.join(map(str, first['loc']))} is not valid: {why}.") from None
