"""From raw files to training, test and public records, with the groups they fall into."""

from equidp.pipelines.ingestion.pipeline import create_pipeline
