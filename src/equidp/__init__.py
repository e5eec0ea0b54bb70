import os

__version__ = "0.1.0"

# MLflow and Kedro would report to their makers how they are used. Where data are sensitive, nothing calls home unasked.
# It is set here because MLflow reads it when it is imported.
for _name in ("KEDRO_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY"):
    os.environ.setdefault(_name, "true")

# Unless told otherwise before it computes anything, MKL rounds a row of a small product by where it begins in memory.
# One record less would then change all records after it in the batch (`gradients/shape.py`).
os.environ["MKL_CBWR"] = os.environ.get("MKL_CBWR") or "AUTO"  # an empty value counts as not set


def quiet() -> None:
    """Do nothing. Kedro calls this as it starts, in any folder, and so imports this module."""
