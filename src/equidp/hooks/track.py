"""Track: calls a `RunRecorder` at each event of a run, so that every trained private model has an MLflow run.

Several models have a parent run, too. `equidp.hooks.record` says what is logged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

if TYPE_CHECKING:
    from equidp.hooks.record import RunRecorder


class TrackHook:
    """Passes every event of a run to a `RunRecorder`."""

    _recorder: RunRecorder

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Point MLflow at the project's store. The settings of this context are logged, with their defaults."""
        from equidp.hooks.record import RunRecorder  # late: it imports MLflow

        self._recorder = RunRecorder(context.config_loader)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Open the runs, and give training the function that it calls after every epoch."""
        self._recorder.open(run_params, pipeline)
        catalog["on_epoch"] = self._recorder.on_epoch

    @hook_impl
    def after_node_run(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Log what only nodes know: the data's fingerprint, the plan, earlier epochs, bounds of an audit."""
        self._recorder.node_done(inputs, outputs)

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Log metrics, statements and artifacts of every finished algorithm, and end the runs."""
        self._recorder.finish(pipeline, catalog)

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """Mark the run in MLflow as failed."""
        self._recorder.fail(error)
