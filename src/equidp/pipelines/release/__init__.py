"""Release: the documents that go out with a model."""

from equidp.pipelines.release.pipeline import create_pipeline as create_pipeline
from equidp.pipelines.release.pipeline import create_release as create_release
