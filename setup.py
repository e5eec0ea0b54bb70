"""Takes `conf/`, the one source of the settings, into the built package; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithSettings(build_py):
    """An editable install reads the checkout's own `conf/`, so that nothing is copied for it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "equidp", "conf")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("conf", target, ignore=shutil.ignore_patterns("local"))


setup(cmdclass={"build_py": BuildWithSettings})
