"""Kedro's project settings."""

import io
import sys
import warnings

from kedro.framework.session.store import BaseSessionStore

from equidp.config_loader import EquidpConfigLoader
from equidp.hooks import RunHook, TrackingHook

# A remark to callers, which a user of this project can do nothing about.
warnings.filterwarnings("ignore", message="Option '--pipeline' is deprecated")

# A terminal that has no ε or Δ shows a question mark: it is no reason to lose the end of a run.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")

HOOKS = (TrackingHook(), RunHook())
CONFIG_LOADER_CLASS = EquidpConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*"], "sweeps": ["sweeps*"]},
    # without this, any file in conf/local would make --params drop the other keys of a block
    "merge_strategy": {"parameters": "soft"},
}
SESSION_STORE_CLASS = BaseSessionStore
