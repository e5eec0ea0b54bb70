"""The notebooks run from top to bottom, come to true results, and write nothing into the checkout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS = 240
"""For one cell; the slowest takes about ten on an idle machine, and tests share theirs."""

pytestmark = [
    pytest.mark.timeout(2 * SECONDS),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client.*"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # sockets that pyzmq closes when it is collected
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a notebook finds around it, as a copy of this test alone; temporary folders lie beside it."""
    folder, scratch = tmp_path / "checkout", tmp_path / "scratch"
    for name in ("conf", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    for name in ("pyproject.toml", ".telemetry"):
        shutil.copy(ROOT / name, folder)
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("EQUIDP_RAW_DIR", str(tmp_path / "nothing here"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # a user's own server: not for examples
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def executed(checkout: Path, name: str, wanted: dict[str, str], *, elsewhere: bool = True) -> dict[str, Any]:
    """Run a notebook in a kernel of this interpreter; then the values of some expressions in it.

    What it writes is elsewhere, unless it was told to work in the checkout.
    """
    notebook = nbformat.read(checkout / "notebooks" / f"{name}.ipynb", as_version=4)
    question = ", ".join(f"{key!r}: {expression}" for key, expression in wanted.items())
    notebook.cells.append(nbformat.v4.new_code_cell(f"import json\nprint(json.dumps({{{question}}}))"))
    before = files_in(checkout)
    place = {"metadata": {"path": str(checkout / "notebooks")}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=place).execute()
    assert (files_in(checkout) == before) is elsewhere
    answer = next(output for output in notebook.cells[-1].outputs if output.get("name") == "stdout")
    return json.loads(answer.text)


@pytest.mark.slow
def test_reading_results(checkout: Path) -> None:
    found = executed(
        checkout,
        "reading_results",
        {
            "epsilons": "epsilons.T.to_dict()",
            "costs": "cost_per_class.to_dict()",
            "epochs": "len(history['dpsgd_f'])",
            "tracked": "sorted(runs_frame(tracked)['algorithm'])",
            "scores": "[scores.shape, scores.sum(axis='columns').tolist()]",
            "recognised": "recognised",
            "eights": "metrics['dpsgd_f']['groups']['class']['8']['accuracy']",
        },
    )
    assert found["tracked"] == ["dpsgd", "dpsgd_f", "sgd"]
    for name in ("dpsgd", "dpsgd_f"):
        assert found["epsilons"][name]["recomputed"] == pytest.approx(found["epsilons"][name]["stated"], rel=1e-6)
        assert set(found["costs"][name]) == set("0123456789")
    assert found["epochs"] == 75
    assert found["costs"]["dpsgd"]["8"] > found["costs"]["dpsgd_f"]["8"] > 0
    shape, sums = found["scores"]
    assert shape == [174, 10]
    assert sums == pytest.approx([1.0] * 174, abs=1e-5)
    # all eights, those never seen in training included: most were cut from the training part
    assert found["recognised"] == pytest.approx(found["eights"], abs=0.2)


@pytest.mark.slow
def test_reading_results_of_a_checkout_with_several_runs(checkout: Path) -> None:
    """What the notebook says of runs that one already has: to copy the checkout onto itself ended in a traceback."""
    path = checkout / "notebooks/reading_results.ipynb"
    notebook = nbformat.read(path, as_version=4)
    told = next(cell for cell in notebook.cells if "project = " in cell.source)
    told.source = told.source.replace("project = Path(scratch.name).resolve()", "project = checkout")
    trained = next(cell for cell in notebook.cells if "session.run(" in cell.source)
    trained.source = "\n".join([trained.source.replace('"evaluate_every": 5', '"epochs": 1'), trained.source])
    nbformat.write(notebook, path)
    (checkout / "src").mkdir()

    found = executed(
        checkout,
        "reading_results",
        {
            "tracked": "sorted(runs_frame(tracked)['algorithm'])",
            "recognised": "recognised",
            "project": "str(project)",
        },
        elsewhere=False,
    )

    assert found["project"] == str(checkout)
    assert found["tracked"] == ["dpsgd", "dpsgd", "dpsgd_f", "dpsgd_f", "sgd", "sgd"]
    assert found["recognised"] > 0.4  # the newest run's, not that of one epoch


@pytest.mark.slow
def test_your_own_data(checkout: Path) -> None:
    found = executed(
        checkout,
        "your_own_data",
        {
            "grouped": "groups[groups.grouping == 'ward'][['train', 'test']].to_numpy().sum().item()",
            "rows": "len(stays)",
            "patients": "int(stays.patient.nunique())",
            "hospital": "hospital.reset_index().to_numpy().tolist()",
            "plain": "plain.loc[('ward', 'cardiology'), ['accuracy', 'cost']].tolist()",
            "statement": "statement",
            "refusal": "refusal",
            "lesions": "lesion_groups.reset_index().to_numpy().tolist()",
        },
    )
    assert found["grouped"] == found["rows"]
    assert found["statement"]["epsilon"] == pytest.approx(1.0, rel=0.01)
    assert found["statement"]["records"] == round(0.8 * found["patients"])  # the guarantee counts patients, not stays
    assert "tables that differ in one unit give training parts" in " ".join(found["statement"]["assumptions"])
    assert found["refusal"].endswith(
        f"hospital.csv, line {found['rows'] + 2}, column 'age': '172' is out of bounds; give a number from 0 to 120. "
        "If it stands for a missing value, name it in data.options.na_values."
    )
    groups = {(grouping, group): figures for grouping, group, *figures in found["hospital"] + found["lesions"]}
    assert {grouping for grouping, _ in groups} == {"ward", "sex", "age_band", "skin", "class"}
    assert {"cardiology", "unknown", "65 and over", "dark", "malignant"} <= {group for _, group in groups}
    for count, accuracy, baseline, cost in groups.values():
        assert count > 0
        assert cost == pytest.approx(baseline - accuracy)
    assert groups["ward", "cardiology"][1] > 0.7
    accuracy, cost = found["plain"]
    assert accuracy < 0.3  # a disparity worth seeing
    assert cost > 0.5
    assert groups["skin", "light"][1] > 0.9


@pytest.mark.slow
def test_your_own_algorithm(checkout: Path) -> None:
    found = executed(
        checkout,
        "your_own_algorithm",
        {
            "ratios": "list(ratios.values())",
            "refusal": "refusal",
            "comparison": "comparison.T.to_dict()",
            "baseline": "baseline['overall']['accuracy']",
            "ledger": "{name: result.privacy['ledger'] for name, result in all_trained.items()}",
        },
    )
    assert found["ratios"] == pytest.approx([1.0] * 3, rel=1e-6)  # true, and tight
    assert "no bound on what one record adds" in found["refusal"]
    assert found["baseline"] > 0.95
    comparison = found["comparison"]
    assert list(comparison) == ["dpsgd", "dpsgd_smooth", "smooth, per group", "dpsgd_sign"]
    for row in comparison.values():
        assert 2.97 < row["ε"] <= 3.0
        assert row["accuracy"] > 0.85
        assert row["gap"] == pytest.approx(abs(row["cost country"] - row["cost city"]))
    assert comparison["smooth, per group"]["noise"] > comparison["dpsgd_smooth"]["noise"]  # the counts are paid for
    assert found["ledger"]["dpsgd"] == found["ledger"]["dpsgd_smooth"]


@pytest.mark.slow
def test_a_model_from_a_hub(checkout: Path) -> None:
    pytest.importorskip("timm", reason="needs equidp[pretrained]")
    found = executed(checkout, "a_model_from_a_hub", {"rows": "found", "width": "features.features.shape"})
    assert found["width"] == [800, 256]
    rows = found["rows"]
    assert rows["sgd"]["ring"] > 0.5
    for name in ("dpsgd", "dpsgd_f_adjusted", "dpsgd, norm"):
        assert 2.97 < rows[name]["ε"] <= 3.0
    assert rows["dpsgd_f_adjusted"]["ring"] > rows["dpsgd"]["ring"]  # the rare class
    assert rows["dpsgd, norm"]["ring"] < rows["dpsgd"]["ring"]  # what the notebook says of few records
    assert rows["dpsgd, norm"]["trained numbers"] > rows["dpsgd"]["trained numbers"] == 2 * 257


@pytest.mark.parametrize("name", ["reading_results", "your_own_data"])
def test_a_notebook_without_its_clone_says_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    first = next(cell.source for cell in notebook.cells if cell.cell_type == "code")
    with pytest.raises(FileNotFoundError, match="open it there, in notebooks/"):
        exec(compile(first, name, "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_every_notebook_is_executed_here() -> None:
    assert {path.stem for path in NOTEBOOKS} == {
        "reading_results",
        "your_own_data",
        "your_own_algorithm",
        "a_model_from_a_hub",
    }
