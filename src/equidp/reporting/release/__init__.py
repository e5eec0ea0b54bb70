"""The documents that go out with a model: `release/` in the report folder of a run.

- `facts`: the one place that decides what may go out; every document is written from `Facts` alone.
- `card`: the model card. `registry`: the entry for a registry of deployments. `checklist`: NIST SP 800-226.
- `reidentification`: the annex that EDPB Opinion 28/2024 asks for.
- `lines`: a line with question and answer, as JSON and as Markdown. `documents`: all files by name.

It imports what `reporting` imports, and writes no file. Begin with `released_facts`, then `release_files`.
"""

from __future__ import annotations

from equidp.reporting.release.documents import release_files
from equidp.reporting.release.facts import Facts, released_facts, wanted
