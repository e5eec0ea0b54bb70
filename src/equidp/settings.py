"""Kedro's project settings."""

from kedro.framework.session.store import BaseSessionStore

from equidp.config_loader import EquidpConfigLoader
from equidp.hooks import RunHook, TrackingHook

HOOKS = (TrackingHook(), RunHook())
CONFIG_LOADER_CLASS = EquidpConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    # without this, any file in conf/local would make --params drop the other keys of a block
    "merge_strategy": {"parameters": "soft"},
}
SESSION_STORE_CLASS = BaseSessionStore
