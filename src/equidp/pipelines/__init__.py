"""Kedro wiring only: every node is a thin function around the library."""

import warnings

# Evaluation and reporting read the outputs of several namespaces on purpose: `sgd.scores` beside `dpsgd_f.scores`.
warnings.filterwarnings("ignore", message="One or more dataset names contain '.'", category=UserWarning)
