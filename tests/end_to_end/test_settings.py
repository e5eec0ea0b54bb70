"""How settings reach a run: presets, conf/local, the command line in any order; and how bad ones are refused."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from kedro.config import OmegaConfigLoader
from kedro.framework.project import settings
from kedro.framework.session import KedroSession
from omegaconf import OmegaConf
from tests.end_to_end.kedro_project import (
    QUICK,
    bootstrapped,
    kedro_run,
    mlflow_runs,
    nested,
    report_folder,
    resolved,
)

from equidp.cli import loader_at
from equidp.data.sources import SOURCES
from equidp.errors import EquidpError
from equidp.hooks.entries import written_to
from equidp.parameters import resolve


def test_preset_of_the_dataset_applies_whatever_the_order(project):
    first = resolved(project, **{"dataset": "adult", "privacy.delta": 1e-7})
    second = resolved(project, **{"privacy.delta": 1e-7, "dataset": "adult"})
    assert first == second
    assert first["training"]["learning_rate"] == "1/sqrt(steps)"
    assert first["privacy"] == {**first["privacy"], "noise_multiplier": 1.0, "epsilon": None, "delta": 1e-7}


def test_cuda_graphs_without_such_a_device_are_refused_before_anything_runs(project):
    with pytest.raises(EquidpError, match="would train on the cpu: leave it out"):
        kedro_run(project, "dpsgd", **QUICK, **{"training.cuda_graphs": True})
    assert mlflow_runs(project) == []


def test_every_preset_resolves(project):
    bootstrapped(project)
    loader = settings.CONFIG_LOADER_CLASS(project / "conf", **settings.CONFIG_LOADER_ARGS)
    presets = OmegaConfigLoader.__getitem__(loader, "parameters")["presets"]  # read once: that takes longest
    assert presets.keys() >= SOURCES.keys() - {"csv", "table", "image_folder"}
    for dataset, preset in presets.items():
        assert resolve({**preset, "dataset": dataset}).data.source in SOURCES


def test_a_papers_preset_has_its_values_and_a_misspelt_one_is_refused_with_the_nearest(project):
    psasc = resolved(project, dataset="mnist_psasc")
    assert (psasc["model"]["name"], psasc["dpsgd"]["options"]["clip_norm"]) == ("psasc_cnn", 0.3)
    for name in ("psac", "psasc", "psasc_momentum"):
        assert (psasc[name]["options"]["clip_norm"], psasc[name]["options"]["stability"]) == (0.3, 1e-4)
    assert psasc["psasc_momentum"]["options"]["scale"] == 0.9
    dpis = resolved(project, dataset="fashion_mnist_dpis")
    assert (dpis["training"]["batch_size"], dpis["training"]["learning_rate"]) == (2048, 4.0)
    assert dpis["dpis"]["options"]["first_phase_fraction"] == 1.0
    assert resolved(project, dataset="cifar10_sa_relu")["model"]["options"] == {"activation": "relu"}
    imdb = resolved(project, dataset="imdb_dpis", raw_dir="elsewhere")
    assert imdb["model"]["options"]["vectors"] == "elsewhere/glove/glove.6B.100d.first30000.txt"
    with pytest.raises(EquidpError, match=r"Unknown dataset 'mnist_psac'\. Did you mean 'mnist_psasc'"):
        resolved(project, dataset="mnist_psac")


@pytest.mark.parametrize("given", [{"privacy.epsilon": 3.0}, {"privacy.noise_multiplier": 1.5}])
@pytest.mark.parametrize("dataset", ["adult", "mnist"])
def test_epsilon_and_noise_replace_each_other(project, given, dataset):
    privacy = resolved(project, dataset=dataset, **given)["privacy"]
    ((name, value),) = given.items()
    assert privacy[name.removeprefix("privacy.")] == value
    assert (privacy["epsilon"] is None) != (privacy["noise_multiplier"] is None)


def test_a_file_in_conf_local_overrides_the_preset_and_keeps_its_other_keys(project):
    (project / "conf/local/parameters.yml").write_text("privacy: {delta: 1.0e-5}\ntraining: {epochs: 7}\n")
    params = resolved(project, **{"dataset": "adult", "privacy.epsilon": 2.0})
    assert params["privacy"]["delta"] == 1e-5
    assert params["privacy"]["epsilon"] == 2.0
    assert params["training"]["epochs"] == 7
    assert params["training"]["batch_size"] == 256


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("presets:\n  clinic:\n", "give exactly one of privacy.epsilon and privacy.noise_multiplier"),
        ("presets:\n", "presets: is empty in a file of settings in .*conf, which hides"),
        ("preset: {clinic: {data: {source: csv}}}\n", r"Unknown setting 'preset'\. Did you mean 'presets'\?"),
        ("presets: {clinic: 5}\n", "presets.clinic=5: give settings below it"),
        ("presets: {clinic: {data: csv}}\n", "data='csv': give settings below it"),
        ("presets: {clinic: {model: logistic}}\n", "model='logistic': give settings below it"),
        ("presets:\n  clinic: {data: [}\n", r"local/parameters\.yml, line 2, column 19: .* found '}'; repair it\.$"),
        ("presets:\n\tclinic: {}\n", r"s\.yml, line 2, column 1: found character '\\t' .*; repair it\.$"),
        ("presets:\n  clinic: {}\n  clinic: {}\n", r"s\.yml, line 3, column 3: found duplicate key clinic; "),
        ("presets: {clinic: {model: {name: Größe}}}\n", r"s\.yml is not UTF-8 text \(byte 35\); save it in UTF-8\.$"),
        ("- presets\n", r"local/parameters\.yml holds a list: give names with values"),
        ("42\n", r"local/parameters\.yml cannot be read: Invalid loaded object type: int; repair it\.$"),
    ],
)
def test_a_file_in_conf_local_that_is_written_wrong_ends_in_a_sentence(project, text, words):
    (project / "conf/local/parameters.yml").write_text(text, encoding="latin-1")  # as an old editor saves umlauts
    with pytest.raises(EquidpError, match=words) as refused:
        resolved(project, dataset="clinic")
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "3: {algorithms: [dpsgd]}\n",
            r"local/sweeps\.yml has the name 3, which YAML takes for no text: put it in quotes",
        ),
        ("on: {algorithms: [dpsgd]}\n", r"local/sweeps\.yml has the name True, which"),
        ("a: &a {grids: [*a]}\n", r"local/sweeps\.yml has an anchor that stands below itself"),
    ],
)
def test_a_file_of_sweeps_that_kedro_cannot_merge_ends_in_a_sentence(project, text, words):
    (project / "conf/local/sweeps.yml").write_text(text)
    with pytest.raises(EquidpError, match=words):
        settings.CONFIG_LOADER_CLASS(project / "conf", **settings.CONFIG_LOADER_ARGS)["sweeps"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("servr: {mlflow_tracking_uri: secret}\n", r"^mlflow\.yml: servr is not valid: there is no such setting\.$"),
        (
            "server: {mlflow_tracking_url: secret}\n",
            r"^mlflow\.yml: server\.mlflow_tracking_url is not valid: there is no",
        ),
        (
            "tracking: {experiment: 3}\n",
            r"^mlflow\.yml: tracking\.experiment is not valid: Input should have settings b",
        ),
        ("tracking:\n", r"^mlflow\.yml: tracking is not valid: Input should have settings below it"),
    ],
)
def test_an_mlflow_yml_that_is_written_wrong_ends_in_a_sentence_without_its_passwords(project, text, words):
    (project / "conf/local/mlflow.yml").write_text(text)
    with pytest.raises(EquidpError, match=words):
        resolved(project)


def test_paths_follow_what_a_file_in_conf_local_chooses(project):
    """They would name another run's dataset and seed, and this run would replace that one's results."""
    raw = project / "raw"
    (project / "conf/local/parameters.yml").write_text(
        f"{{dataset: adult, seed: 3, run_label: mine, algorithm: dpsgd, raw_dir: {raw}}}\n"
    )
    bootstrapped(project)
    with KedroSession.create(project_path=project, runtime_params={"seed": 4}) as session:
        catalog = session.load_context().catalog
        places = [
            written_to(catalog, name).relative_to(project).as_posix()
            for name in ("raw_folder", "records_cache", "groups", "dpsgd.metrics", "audit_findings")
        ]
    assert places == [
        "raw",
        "data/03_primary/adult",
        "data/08_reporting/adult/ingestion/seed=4/mine/groups.csv",
        "data/08_reporting/adult/dpsgd/seed=4/mine/metrics.json",
        "data/08_reporting/adult/audit/dpsgd/seed=4/mine/audit.json",
    ]


def test_a_dataset_may_be_called_by_a_number(project):
    (project / "conf/local/parameters.yml").write_text("presets: {2024: {data: {source: digits}}}\n")
    assert resolved(project, **{"dataset": 2024, "privacy.epsilon": 3.0})["dataset"] == "2024"


def test_another_model_does_not_inherit_the_presets_options(project):
    preset = resolved(project, dataset="ham10000")["model"]
    assert preset["name"] == "resnet9"
    assert preset["options"]
    assert resolved(project, **{"dataset": "ham10000", "model.name": "logistic"})["model"]["options"] == {}
    again = resolved(project, **{"dataset": "ham10000", "model.name": "resnet9", "model.options.width": 4})["model"]
    assert again["options"] == {**preset["options"], "width": 4}


def test_a_dataset_of_ones_own_is_a_preset_in_conf_local(project):
    (project / "conf/local/parameters.yml").write_text(
        "presets:\n  rare_three:\n"
        "    data: {source: digits, keep: {'3': 20}}\n"
        "    privacy: {epsilon: 2.0, delta: 1.0e-4}\n"
    )
    params = resolved(project, dataset="rare_three")
    assert params["data"]["source"] == "digits"
    assert params["data"]["keep"] == {"3": 20.0}


def test_a_registered_dataset_without_a_preset_is_told_where_one_belongs(project, monkeypatch):
    monkeypatch.setattr("equidp.config_loader.conf", lambda: project / "conf")  # or the package's has one
    presets = project / "conf/base/parameters/presets.yml"
    presets.write_text(re.sub(r"(?m)^  digits:", "  digits_of_old:", presets.read_text()))
    with pytest.raises(EquidpError, match=r"Dataset 'digits' has a source but no preset: give it a block in"):
        resolved(project, dataset="digits")


def test_units_called_as_records_are_elsewhere_are_told_apart(project):
    (project / "conf/local/parameters.yml").write_text(
        "presets:\n  mine:\n"
        "    data:\n      source: csv\n      split_by: image\n"
        "      options:\n        {path: a, label: y, classes: [a, b], unit: image,\n"
        "        features: {x: {kind: numeric, maximum: 1}}}\n"
        "    privacy: {epsilon: 2.0}\n"
    )
    with pytest.raises(
        EquidpError, match=r"data\.split_by=image means one record elsewhere: write data\.split_by=unit"
    ):
        resolved(project, dataset="mine")
    assert resolved(project, **{"dataset": "mine", "data.split_by": "unit"})["data"]["split_by"] == "unit"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dataset": "adlut"}, r"Unknown dataset 'adlut'. Did you mean 'adult'\?"),
        ({"epsilon": 3}, r"Unknown setting 'epsilon'. Did you mean 'privacy.epsilon' or 'tune.epsilon'\?"),
        ({"data": {"keep": {8: 40}}}, r"data\.keep\.8=8: Input should be a valid string; put it in quotes\.$"),
        ({"trainin.epochs": 3}, r"Unknown setting 'trainin'. Did you mean 'training'\?"),
        ({"dpsgd.options.clip_nrom": 3}, r"Unknown setting of dpsgd.options 'clip_nrom'. Did you mean 'clip_norm'\?"),
        (
            {"privacy.evaluation.bins": 20},
            r"bins is of figures with noise, and there are none: set privacy.evaluation.eps",
        ),
        ({"privacy.evaluation.delta": 1e-6}, r"delta is of figures with noise, and there are none: .* leave delta out"),
        ({"privacy.epsilon": 3, "privacy.noise_multiplier": 1}, r"give exactly one of .*\(both are set"),
        ({"privacy.noise_multiplier": None}, r"give exactly one of .*\(neither is set"),
        ({"dataset": "../adult"}, r"Unknown dataset"),
        ({"run_label": "größe"}, r"run_label='größe': use letters a-z, digits"),
        ({"privacy.secure": True, "seed": 3}, r"privacy.secure=true draws .* that no seed can repeat"),
        ({"data.groups.a": 1}, r"data.groups=\{'a': 1\}: give a list, such as \['class'\]"),
        ({"data.keep": [8]}, r"data.keep=\[8\]: give settings below it, such as \{'8': 40\}"),
        (
            {"dataset": "ham10000", "data.split_by": "image", "privacy.unit": "unit"},
            r"privacy.unit=unit protects .* nothing protects: set data.split_by=unit",
        ),
    ],
)
def test_a_bad_setting_is_one_sentence_before_anything_runs(project, params, message):
    with pytest.raises(EquidpError, match=message) as caught:
        resolved(project, **params)
    assert "\n" not in caught.value.message


@pytest.fixture(scope="module")
def preset():
    """The blocks of the preset of digits: reading them takes longer than to refuse a setting."""
    presets = OmegaConf.load(Path(__file__).parents[2] / "conf/base/parameters/presets.yml")["presets"]
    return OmegaConf.to_container(presets["digits"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"privacy.epsilonn": 3}, r"Unknown setting 'privacy.epsilonn'. Did you mean 'privacy.epsilon'\?"),
        ({"clip_norm": 1}, r"Unknown setting 'clip_norm'\. Did you mean '<algorithm>\.options\.clip_norm'\?$"),
        ({"momentum_length": 1}, r"Did you mean 'psasc_momentum\.options\.momentum_length'\?$"),
        ({"guesses": 1}, r"Unknown setting 'guesses'\. Did you mean 'audit\.guesses'\?$"),
        ({"data.keep.8": 0}, r"data\.keep\.8=0: .*greater than 0"),
        ({"data.keep.8": True}, r"data\.keep\.8=True: true and false are not numbers\.$"),
        ({"training.class_weights": "balancd"}, r"training.class_weights='balancd': .*'balanced'"),
        ({"training.class_weights": "1+a"}, r"training.class_weights='a': .*valid number"),
        ({"training.chekpoint_every": 3}, r"Unknown setting 'training\.chekpoint_every'.*'training\.checkpoint_every'"),
        ({"privacy.trials_shape": 2}, r"^privacy\.trials_shape belongs to privacy\.trials_law"),
        ({"training.checkpoint_every": 0}, r"training\.checkpoint_every=0: .*greater than or equal to 1"),
        ({"checkpoint_every": 1}, r"Unknown setting 'checkpoint_every'\. Did you mean 'training\.checkpoint_every'\?$"),
        ({"dpsgd.clip_norm": 3}, r"Unknown setting 'dpsgd\.clip_norm'\. Did you mean 'dpsgd\.options\.clip_norm'\?"),
        ({"dpsgd.options.clip_norm": -1}, r"dpsgd.options.clip_norm=-1 is not valid"),
        ({"model.options.widht": 3}, r"Unknown option of model 'logistic': 'widht'"),
        ({"data.options.verfy": False}, r"Unknown data option of dataset 'digits': 'verfy'. Did you mean 'verify'\?"),
        ({"model.name": "logistc"}, r"Unknown model 'logistc'. Did you mean 'logistic'\?"),
        ({"training.optimizer": "adm"}, r"Unknown training.optimizer 'adm'. Did you mean 'adam'\?"),
        ({"training.averag": 0.9}, r"Unknown setting 'training\.averag'\. Did you mean 'training\.average'\?"),
        ({"training.average": 1}, r"training\.average=1: .*less than 1"),
        ({"training.schedule": "cosin"}, r"training\.schedule='cosin': .*'constant', 'cosine' or 'step'"),
        ({"training.schedule_factor": 0.5}, r"training\.schedule_factor is no setting of training\.schedule=constant"),
        ({"training.momentum": 0.5}, r"training\.momentum is no setting of training\.optimizer=sgd"),
        (
            {"training.augmentations": 2, "training.augmentation_kinds": "crops"},
            r"Unknown training\.augmentation_kinds 'crops'. Did you mean 'crop'\?",
        ),
        ({"training.augmentation_padding": 2}, r"augmentation_padding has no effect while augmentations is 0: give m"),
        (
            {"training.augmentations": 2, "training.augmentation_kinds": "flip", "training.augmentation_padding": 2},
            r"augmentation_padding has no effect without crop in augmentation_kinds",
        ),
        ({"training.epochs": 0}, r"training.epochs=0: .*greater than or equal to 1"),
        ({"privacy.epsilon": True}, r"privacy\.epsilon=True: true and false are not numbers"),
        ({"training.class_weights": [True, 1]}, r"training\.class_weights.*: true and false are not numbers"),
        ({"run_label": "../../x"}, r"run_label='../../x': use letters"),
        ({"data.groups": "class+ class"}, r"data.groups=.*'class' stands there twice"),
        ({"seed": "one"}, r"seed='one': give a whole number"),
        ({"training.learning_rate": 1e300}, r"training.learning_rate=1e\+300: .*less than or equal to"),
        ({"dpsgd.options.clip_norm": 1e38}, r"clip_norm=1e\+38 is not valid: .*less than or equal to"),
        ({"dpsgd_f.options.max_clip_norm": 1e12}, r"max_clip_norm must not be more than 1e12 times base_clip_norm"),
        ({"privacy.max_trials": 10**30}, r"privacy.max_trials=10+: .*less than or equal to 1000000"),
        ({"training.class_weights": [1e300]}, r"training.class_weights=1e\+300: .*less than or equal to"),
        ({"audit.gradient_canaries": 10**12}, r"audit.gradient_canaries=10+: .*less than or equal to 10000000"),
        ({"audit.input_canaries": 1}, r"audit: one canary tells nothing: give 0 to leave it out"),
        ({"raw_dir": 2024}, r"raw_dir=2024: give a folder"),
        ({"resume": "perhaps"}, r"resume='perhaps': give true or false"),
        (
            {"privacy.unit": "unit"},
            r"Unknown value of privacy.unit for source 'digits': 'unit'\. Valid: image, record\.",
        ),
        (
            {"privacy.unit": "recrod"},
            r"Unknown value of privacy.unit for source 'digits': 'recrod'. Did you mean 'record'",
        ),
        (
            {"privacy.secure": True, "data.membership": "strata"},
            r"data\.membership=strata: one record more .* take data\.membership=hash, or .* data\.accept_strata=true",
        ),
        ({"data.id": "number"}, r"data\.id=number: every record of source 'digits' has an identity already"),
        ({"data.split_by": "lesion"}, r"Unknown value of data.split_by for source 'digits': 'lesion'\."),
    ],
)
def test_a_bad_value_is_one_sentence(preset, params, message):
    with pytest.raises(EquidpError, match=message) as caught:
        resolve(OmegaConf.to_container(OmegaConf.merge(preset, {"dataset": "digits"}, nested(params))))
    assert "\n" not in caught.value.message


def test_a_run_with_a_bad_setting_leaves_nothing(project):
    with pytest.raises(EquidpError, match=r"Unknown setting 'privacy.epsilonn'. Did you mean 'privacy.epsilon'\?"):
        kedro_run(project, "dpsgd", **{"privacy.epsilonn": 3})
    assert mlflow_runs(project) == []
    assert not (project / "data" / "08_reporting").exists()


@pytest.mark.parametrize(
    ("pipeline", "params", "message"),
    [
        ("dpsgd_g", {}, r"Unknown pipeline 'dpsgd_g'. Did you mean 'dpsgd_f'\?"),
        ("dpsgd", {"data.groups": "sex"}, r"Unknown grouping of dataset 'digits': 'sex'"),
        pytest.param(
            "dpsgd",
            {"training.batch_size": 5000},
            r"training.batch_size=5000 exceeds the 13\d\d training records",
            marks=pytest.mark.slow,
        ),
        ("dpsgd", {"training.epochs": 10**30}, r"epochs of 13\d\d records .* which would not end: lower training"),
        ("dpsgd", {"dataset": "adult"}, r"adult\.data"),
        (
            "dpsgd_f",
            {"privacy.epsilon": 0.5, "dpsgd_f.options.count_noise_multiplier": 1.0},
            r"dpsgd_f: privacy.epsilon=0.5 cannot be reached: the side releases .* cost ε = ",
        ),
        ("asc", {"privacy.epsilon": 0.05}, r"^asc: privacy.epsilon=0.05 cannot be reached: what is released besides"),
        (
            "dpsgd",
            {**QUICK, "privacy.secure": True, "privacy.delta": 0.001},
            r"δ = 0\.001 is not below one over the 1338 training records: .* Set privacy\.delta to 7e-05 or less",
        ),
        (
            "dpsgd",
            {**QUICK, "privacy.secure": True, "privacy.evaluation.epsilon": 0.01, "privacy.evaluation.delta": 0.3},
            r"δ = 0\.3 is not below one over the 1338 training records: .* Set privacy\.evaluation\.delta to 7e-05",
        ),
        (
            "dpsgd",
            {
                **QUICK,
                "privacy.secure": True,
                "privacy.evaluation.epsilon": 1.0,
                "privacy.evaluation.delta": 0.00125,
                "data.test_fraction": 0.6,
            },
            r"δ = 0\.00125 is not below one over about 1\d\d\d test records: .*evaluation\.delta",
        ),
    ],
)
def test_what_only_the_data_can_tell_is_one_sentence_too(project, pipeline, params, message):
    with pytest.raises(EquidpError, match=message):
        kedro_run(project, pipeline, **params)
    assert mlflow_runs(project) == []  # what is refused before its first epoch is not listed
    assert not list((project / "data").rglob("metrics.json"))


VISITS = """
presets:
  visits:
    data:
      source: csv
      split_by: person
      options:
        path: visits.csv
        label: y
        classes: [a, b]
        features: {x: {kind: numeric, maximum: 1}}
        unit: person
    model: {name: logistic}
    privacy: {noise_multiplier: 1, delta: 0.5, unit: person}
    training: {epochs: 1, batch_size: 8}
"""


def test_two_files_of_one_environment_that_set_the_same_are_named(project) -> None:
    """Kedro says so in a traceback of 84 lines."""
    for name in ("mine", "census"):
        (project / f"conf/base/parameters/{name}.yml").write_text(VISITS)
    with pytest.raises(EquidpError, match=r"Two files .* set presets\.visits: .*(mine|census)\.yml and .*\.yml\. Keep"):
        resolved(project, dataset="visits")


@pytest.fixture
def clinic(project):
    """A project with a table of 30 persons with two rows each, whose warnings are heard."""
    rows = "".join(f"{i // 2},0.{i % 10},{'ab'[i % 4 // 2]}\n" for i in range(60))
    (project / "data/01_raw/visits.csv").write_text(f"person,x,y\n{rows}")
    (project / "conf/local/parameters.yml").write_text(VISITS)
    logging.getLogger("equidp").propagate = True
    return project


@pytest.mark.slow
def test_where_units_are_protected_a_delta_is_measured_by_their_number(clinic, caplog):
    """Of the 30 persons 24 train."""
    with caplog.at_level(logging.WARNING, "equidp"):
        kedro_run(clinic, "dpsgd", dataset="visits")
    assert any("one over the 24 training units:" in record.message for record in caplog.records)
    assert "belong together" not in caplog.text


@pytest.mark.slow
def test_units_that_are_neither_protected_nor_kept_whole_are_said(clinic, caplog):
    with caplog.at_level(logging.WARNING, "equidp"):
        kedro_run(clinic, "dpsgd", dataset="visits", **{"data.split_by": "record", "privacy.unit": "record"})
    assert [r.message.partition(": ")[0] for r in caplog.records if "belong together" in r.message] == [
        "data.split_by=record",
        "dpsgd",  # and nothing of the baseline's
    ]


def test_resume_may_be_told_no_as_any_other_setting(project):
    assert resolved(project, resume="no")["resume"] is False


def test_an_empty_folder_of_raw_files_is_the_projects_own(project):
    """As EQUIDP_RAW_DIR= makes it."""
    assert resolved(project, raw_dir="")["raw_dir"] == str(Path("data") / "01_raw")


@pytest.mark.parametrize(
    ("option", "folder"), [("--pipeline", "."), pytest.param("--pipelines", "conf", marks=pytest.mark.slow)]
)
def test_the_command_line_ends_with_one_line_and_a_status(project, option, folder):
    command = [sys.executable, "-m", "kedro", "run", f"{option}=dpsgd", "--params=dataset=adlut"]
    done = subprocess.run(command, cwd=project / folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Unknown dataset 'adlut'. Did you mean 'adult'?")
    assert done.stderr.count("\n") == 1
    assert bool(done.stdout) == (folder != ".")  # elsewhere Kedro says that it is there, before it knows the project
    assert "DEBUG" not in done.stdout


def test_an_empty_pipeline_is_not_the_demonstration(project):
    command = [sys.executable, "-m", "kedro", "run", "--pipeline="]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("Error: --pipeline= names no pipeline")
    assert not (project / "data" / "08_reporting").exists()


@pytest.mark.slow
def test_a_terminal_without_greek_letters_loses_no_run(project):
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "kedro", "run", "--pipeline=dpsgd", "--params=training.epochs=1"]
    done = subprocess.run(command, cwd=project, capture_output=True, timeout=120, env=ascii_only)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ε" in (report_folder(project, "dpsgd") / "report.html").read_text(encoding="utf-8")
    assert [run.info.status for run in mlflow_runs(project)] == ["FINISHED"]


def test_runs_are_tracked_in_the_project_wherever_its_settings_lie(project, tmp_path):
    """Their data lie there too, and `kedro run --pipeline=report` looks there."""
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(project / "conf", tmp_path / "elsewhere")
    bootstrapped(project)
    with KedroSession.create(project_path=project, conf_source=moved) as session:
        session.load_context()
    assert mlflow.get_tracking_uri() == f"sqlite:///{project / 'mlflow.db'}"
    assert sorted(tmp_path.joinpath("elsewhere").iterdir()) == [Path(moved)]


def test_settings_of_ones_own_are_read_where_there_are_any(project):
    """Kedro merges a folder without any, too, which takes as long as reading the rest."""
    local = project / "conf/local"
    (local / ".gitkeep").touch()
    bootstrapped(project)
    assert loader_at(project, None).default_run_env == "base"
    assert resolved(project)["seed"] == 0
    (project / "shared.yml").write_text("seed: 3\n")
    (local / "parameters.yml").symlink_to(project / "shared.yml")
    assert resolved(project)["seed"] == 3


def test_an_environment_that_is_not_there_is_refused(project):
    bootstrapped(project)
    with (
        KedroSession.create(project_path=project, env="prod") as session,
        pytest.raises(EquidpError, match=r"Unknown environment .*'prod'\. Valid: base, local\."),
    ):
        session.load_context()
