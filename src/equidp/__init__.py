import os

__version__ = "0.1.0"

# MLflow and Kedro would report to their makers how they are used: where the data are sensitive, nothing calls home
# unasked. Here, as MLflow looks when it is imported.
for _name in ("KEDRO_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY"):
    os.environ.setdefault(_name, "true")

# MKL rounds a row of a small product by where in memory it begins, unless told otherwise before it computes anything:
# one record less would then move all after it in its batch (`gradients/shape.py`).
os.environ["MKL_CBWR"] = os.environ.get("MKL_CBWR") or "AUTO"  # empty is as if it were not set


def quiet() -> None:
    """Nothing to do: Kedro calls this as it starts, in any folder, so that this module has been imported."""
