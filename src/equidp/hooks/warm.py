"""Warm: imports what every run needs. A sweep forks its runs from a process that has imported this module.

The module only imports. Forks share the state before them, so no random number may be drawn here. A run makes its
generators after the fork, from its seed or the system's. If an import fails here, it fails again in the run, which then
reports it.
"""

import contextlib

with contextlib.suppress(Exception):
    import equidp.hooks.packing
    import equidp.hooks.record
    import equidp.pipeline_registry
    import equidp.settings  # noqa: F401
