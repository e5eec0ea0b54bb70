"""Every setting a user can give, validated before anything runs. Unknown names are refused, defaults are filled in.

`resolve` turns the merged configuration into one frozen `Settings`, which goes from the command line to the step.

- `sections`, `privacy`: the blocks of settings, one class each. `TrainingSettings` holds what a release may depend on,
  and `OperationSettings` what it does not.
- `resolved`: `Settings`, and the way there from the configuration.

It imports `algorithms`, `models`, `data` and what stands below them. Begin with `resolved.resolve`.
"""

from __future__ import annotations

from equidp.parameters.privacy import PrivacySettings
from equidp.parameters.resolved import (
    PIPELINE_SECTIONS,
    PLAIN,
    SECTIONS,
    TOP_LEVEL,
    TUNED,
    Settings,
    block,
    check_names,
    concerning,
    resolve,
    varied,
)
from equidp.parameters.sections import (
    AuditSettings,
    DataSettings,
    ModelSettings,
    OperationSettings,
    ReleaseSettings,
    ReportSettings,
    TrainingSettings,
    TuneSettings,
)
