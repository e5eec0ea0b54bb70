"""model, privacy, metrics, audit, ledger → release/, when a run ends or for a finished run."""

from kedro.pipeline import Pipeline

from equidp.pipelines import wired
from equidp.pipelines.release import nodes

READ = ("model", "privacy", "metrics", "metrics_release", "audit")
SHARED = ("privacy_ledger", "settings")


def create_pipeline(algorithm: str) -> Pipeline:
    """The documents at the end of a run, if it is secure or `release.documents` asks for them."""
    read = [*(f"{algorithm}.{name}" for name in READ), *SHARED]
    return wired([(nodes.write_release, read, f"{algorithm}.release", f"write_release_{algorithm}")], "release")


def create_release() -> Pipeline:
    """The documents of the finished run that the setting `algorithm` names, with its audit if there is one."""
    read = [*(f"finished.{name}" for name in READ), *SHARED]
    return wired([(nodes.write_asked_release, read, "finished.release", "write_release")], "release")
