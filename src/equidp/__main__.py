"""The packaged project: `python -m equidp --conf-source=conf-equidp.tar.gz` does what `kedro run` does in a checkout.

`python -m equidp new my-study` does what `equidp new my-study` does, where the folder of scripts is not on the path.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from equidp.new_project import main

    if sys.argv[1:2] and sys.argv[1] in main.commands:
        main(prog_name="equidp")
    else:
        from kedro.framework.project import configure_project

        configure_project("equidp")
        from equidp.cli import run

        run()
