"""The packaged project: `python -m equidp --conf-source=conf-equidp.tar.gz` is what `kedro run` is in a checkout."""

from __future__ import annotations

from kedro.framework.project import configure_project

if __name__ == "__main__":
    configure_project("equidp")
    from equidp.cli import run

    run()
