"""Train one model: from a split and settings to weights, history and a privacy statement. No Kedro, no MLflow.

plan = plan_run(algorithm, units=len(split.train), groups=K, privacy=…, training=…)
request = TrainingRequest(algorithm, plan, grouping=…, model=…, privacy=…, training=…, seed=0)
trained = train_model(request, split)
scores = predict(network, split.test.features)      # a `build_model` that has loaded trained.weights

- `planning`: the run's public facts, and a part's promises tried out. `request`: what a training is asked for.
- `networks`: model, loss, predictions.
- `preparation`: everything the loop needs. `running`: one process or several ranks. `conclusion`: what is left.
- `private`: one call from a network and tensors to the loop. `reading`: a user's own tensors or dataset.
- `statement`: the privacy statement. `digests`: what a checkpoint has to agree with.
- `checkpoint`, `journal`: an interrupted run goes on, and its ledger never holds less than was spent.
- `ranks/`: the same training on several processes.

It imports `algorithms`, `models`, `data`, `parameters` and what stands below them. Begin with `running.train_model`.
"""

from __future__ import annotations

from equidp.tasks.classification import record_loss
from equidp.training.conclusion import Trained, conclude, forget
from equidp.training.networks import augmentation, loss_of, make_model, predict
from equidp.training.planning import classes_of, groups_of, partition, plan_run, units_in
from equidp.training.preparation import Prepared, prepare
from equidp.training.private import make_private, spent, statement
from equidp.training.request import TrainingRequest
from equidp.training.running import train_model
from equidp.training.statement import privacy_statement
