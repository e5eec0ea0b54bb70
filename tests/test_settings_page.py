"""The pages of settings are what the code says."""

import re
import runpy
from pathlib import Path

import yaml

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "make_settings.py"


def test_pages_are_up_to_date_and_explain_every_setting():
    for path, page in runpy.run_path(str(SCRIPT))["pages"]().items():
        assert path.read_text(encoding="utf-8") == page, "run python docs/make_settings.py"
        unexplained = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
        assert unexplained == []


def test_each_papers_preset_says_where_its_values_come_from():
    text = (SCRIPT.parents[1] / "conf/base/parameters/presets.yml").read_text(encoding="utf-8")
    said = runpy.run_path(str(SCRIPT))
    of_papers = [name for row in said["PRESETS"] for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted([*of_papers, *said["NO_PAPERS"]]) == sorted(yaml.safe_load(text)["presets"])
