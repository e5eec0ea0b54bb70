"""model, privacy, metrics, audit → release/, of a run as it ends or of a finished one."""

from kedro.pipeline import Node, Pipeline

from equidp.pipelines.release import nodes

GROUP = "release"
READ = ("model", "privacy", "metrics", "metrics_release", "audit")


def create_pipeline(algorithm: str) -> Pipeline:
    """The documents of a run as it ends: of a secure run, or where `release.documents` asks for them."""
    return Pipeline(
        [
            Node(
                nodes.write_release,
                inputs=[*(f"{algorithm}.{name}" for name in READ), "settings"],
                outputs=f"{algorithm}.release",
                name=f"write_release_{algorithm}",
                namespace=GROUP,
            )
        ]
    )


def create_release() -> Pipeline:
    """The documents of the finished run that the setting `algorithm` names, with its audit if there is one by now."""
    return Pipeline(
        [
            Node(
                nodes.write_asked_release,
                inputs=[*(f"finished.{name}" for name in READ), "settings"],
                outputs="finished.release",
                name="write_release",
                namespace=GROUP,
            )
        ]
    )
