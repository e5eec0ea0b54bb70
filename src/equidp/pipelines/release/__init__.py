"""Release: the documents that go out with a model."""

from equidp.pipelines.release.pipeline import create_pipeline, create_release
