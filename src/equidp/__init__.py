import os

__version__ = "0.1.0"

# MLflow and Kedro would report to their makers how they are used: where the data are sensitive, nothing calls home
# unasked. Here, as MLflow looks when it is imported.
for _name in ("KEDRO_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY"):
    os.environ.setdefault(_name, "true")


def quiet() -> None:
    """Nothing to do: Kedro calls this as it starts, in any folder, so that this module has been imported."""
