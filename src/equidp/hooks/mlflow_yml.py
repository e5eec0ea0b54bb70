"""The settings of conf/base/mlflow.yml. Light: every command reads them, and most need no MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from equidp.errors import EquidpError
from equidp.options import Declared, refusal_of


class Server(Declared):
    """Where runs are kept."""

    mlflow_tracking_uri: str
    """Address of MLflow's store."""
    credentials: str | None = None
    """Name of a block in conf/local/credentials.yml: environment variables that MLflow's client reads."""


class Disabled(Declared):
    """What is not tracked."""

    pipelines: tuple[str, ...] = ()
    """A command whose pipelines all stand here opens no run."""


class NewExperiment(Declared):
    """How the experiment is made where it does not exist."""

    artifact_location: str | None = None
    """URI of a folder for artifacts; null lets the server decide."""
    tags: dict[str, str] | None = None
    """Tags of the experiment."""


class ExperimentSettings(Declared):
    """The experiment that runs belong to."""

    name: str = "equidp"
    """Its name."""
    create_experiment_kwargs: NewExperiment = NewExperiment()
    """How it is made."""


class TrackingSettings(Declared):
    """What is tracked, and under which name."""

    disable_tracking: Disabled = Disabled()
    """What is not."""
    experiment: ExperimentSettings = ExperimentSettings()
    """The experiment."""


class MlflowSettings(Declared):
    """All of mlflow.yml."""

    server: Server
    """Where runs are kept."""
    tracking: TrackingSettings = TrackingSettings()
    """What is tracked."""


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
