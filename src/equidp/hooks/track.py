"""One MLflow run per trained private model, and a parent where there are several: when what is logged.

What is logged stands in `equidp.hooks.record`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

if TYPE_CHECKING:
    from equidp.hooks.record import RunRecorder


class TrackHook:
    """Hands every event of a run to a `RunRecorder`."""

    _recorder: RunRecorder

    def __init__(self) -> None:
        self._of_thread = threading.local()  # of two sessions in two threads each has its own
        self._making = threading.Lock()  # a new store is one thread's to make

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Point MLflow at the project's store; its settings, defaults included, are what is logged."""
        from equidp.hooks.record import RunRecorder  # late: it imports MLflow

        with self._making:
            self._of_thread.recorder = RunRecorder(context.config_loader)

    @hook_impl
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Open the runs, and hand training the function that it calls after every epoch."""
        self._recorder = self._of_thread.recorder  # other threads than this one hand over nodes' results
        self._recorder.open(run_params, pipeline)
        catalog["on_epoch"] = self._recorder.on_epoch

    @hook_impl
    def after_node_run(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Log what is known only while a pipeline runs: the data's fingerprint, the plan, earlier epochs, bounds."""
        self._recorder.node_done(inputs, outputs)

    @hook_impl
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Log metrics, statements and artifacts of every finished algorithm, and end the runs."""
        self._recorder.finish(pipeline, catalog)

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        """A failed run says so in MLflow."""
        self._recorder.fail(error)
