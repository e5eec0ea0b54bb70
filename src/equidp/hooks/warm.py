"""What every run imports, imported once: a sweep's runs are forked from a process that has this module.

It only imports. Forks share what is there before them, so no random number may be drawn here; a run makes its
generators after the fork, from its seed or the system's. An import that fails here fails again in the run, which then
says why.
"""

import contextlib

with contextlib.suppress(Exception):
    import equidp.hooks.packing
    import equidp.hooks.record
    import equidp.pipeline_registry
    import equidp.settings  # noqa: F401
