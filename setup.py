"""Takes `conf/`, the one source of the settings, and the contract's tests into the package; else see pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CONTRACT = (
    "conftest.py", "tried.py",
    "algorithms/conftest.py", "algorithms/test_contract.py", "algorithms/test_replayed.py",
)  # fmt: skip
"""What `equidp check` runs; MANIFEST.in names the same."""


class BuildWithSettings(build_py):
    """An editable install reads the checkout's own files, so that nothing is copied for it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "equidp", "conf")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("conf", target, ignore=shutil.ignore_patterns("local"))
            for name in CONTRACT:
                copy = Path(self.build_lib, "equidp", "contract", "tests", name)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path("tests", name), copy)
            Path(self.build_lib, "equidp", "contract", "tests", "__init__.py").touch()  # before any other `tests`


setup(cmdclass={"build_py": BuildWithSettings})
