"""Kedro's project settings."""

import warnings

from kedro.framework.session.store import BaseSessionStore

from equidp.config_loader import EquidpConfigLoader
from equidp.hooks import RunHook, TrackingHook

# Remarks of libraries to their own callers, which a user of this project can do nothing about.
warnings.filterwarnings("ignore", message="Option '--pipeline' is deprecated")
warnings.filterwarnings("ignore", message=".*Add type hints to the `predict` method", category=UserWarning)

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
