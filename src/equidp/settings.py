"""Kedro's project settings."""

import warnings

from kedro.framework.session.store import BaseSessionStore

from equidp.config_loader import EquidpConfigLoader
from equidp.hooks import RunHook, TrackingHook

# A remark to callers, which a user of this project can do nothing about.
warnings.filterwarnings("ignore", message="Option '--pipeline' is deprecated")

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
