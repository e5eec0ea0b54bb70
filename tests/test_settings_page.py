"""The page of settings is what the code says."""

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "make_settings.py"


def test_page_is_up_to_date_and_explains_every_setting():
    made = runpy.run_path(str(SCRIPT))
    page = made["page"]()
    assert made["PAGE"].read_text(encoding="utf-8") == page, "run python docs/make_settings.py"
    unexplained = [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert unexplained == []
