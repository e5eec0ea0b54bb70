"""Hooks, datasets and nodes of a user's own beside ours: what a run states is of what it did, or it is refused."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kedro.framework.hooks import hook_impl
from kedro.framework.project import settings
from kedro.io import MemoryDataset
from kedro.pipeline import Pipeline, node, pipeline
from tests.end_to_end.kedro_project import QUICK, bootstrapped, kedro_run, mlflow_runs, report_folder

from equidp import pipeline_registry
from equidp.errors import EquidpError

Beside = Callable[..., None]


@pytest.fixture
def beside(project: Path) -> Iterator[Beside]:
    """Registers a hook of the user's own, before ours with `first=True`."""
    bootstrapped(project)
    ours = tuple(settings.HOOKS)

    def register(hook: object, *, first: bool = False) -> None:
        settings.set("HOOKS", (hook, *ours) if first else (*ours, hook))

    yield register
    settings.set("HOOKS", ours)


def threefold(records):
    """Every record three times, as oversampling has it."""
    return dataclasses.replace(records.take(torch.arange(len(records)).repeat(3)), membership=records.membership)


def halved_noise(plan: dict) -> dict:
    return {**plan, "noise_multiplier": plan["noise_multiplier"] / 2}


def refused(project: Path, words: str, name: str = "dpsgd") -> None:
    """A run of DP-SGD, in the pipeline of that name, ends in these words, before anything is charged or kept."""
    with pytest.raises(EquidpError, match=words):
        kedro_run(project, name, **QUICK)
    assert not (project / "data/privacy_ledger/ledger.jsonl").exists()
    assert not list(project.glob("data/06_models/**/model.safetensors"))
    assert mlflow_runs(project) == []


@pytest.mark.parametrize(
    ("name", "change", "first"),
    [
        ("train", threefold, False),
        ("dpsgd.plan", halved_noise, True),
        ("settings", lambda settings: dataclasses.replace(settings, seed=1), True),
        ("privacy_ledger", lambda folder: folder / "elsewhere", False),
    ],
)
def test_other_inputs_of_a_node_by_a_hook_are_refused(project, beside, name, change, first):
    class Hook:
        @hook_impl
        def before_node_run(self, node, inputs) -> dict[str, Any] | None:
            return {name: change(inputs[name])} if node.name == "dpsgd.train_model" else None

    beside(Hook(), first=first)
    refused(project, f"dpsgd.train_model would not work on the '{name}'.*before_node_run")


@pytest.mark.parametrize("name", ["records", "train"])
def test_other_outputs_of_a_node_by_a_hook_are_refused(project, beside, name):
    class Hook:
        @hook_impl
        def after_node_run(self, outputs) -> None:
            if name in outputs:
                outputs[name] = threefold(outputs[name])

    beside(Hook())
    refused(project, f"'{name}' that this run tells of: these records are not those")


class Threefold(MemoryDataset):
    """Loads more records than were saved."""

    def load(self):
        return threefold(super().load())


@pytest.mark.parametrize(
    ("name", "dataset", "words"),
    [
        ("train", lambda catalog: Threefold(copy_mode="assign"), "these records are not those"),
        ("privacy_ledger", lambda catalog: MemoryDataset(Path("elsewhere")), "not the folder that the catalog's"),
        ("dpsgd.model", lambda catalog: MemoryDataset(), "its file was replaced by memory"),
        (
            "settings",
            lambda catalog: MemoryDataset(dataclasses.replace(catalog.load("settings"), seed=1), copy_mode="assign"),
            "not what was validated",
        ),
    ],
)
def test_another_dataset_put_into_the_catalog_by_a_hook_is_refused(project, beside, name, dataset, words):
    class Hook:
        @hook_impl
        def before_pipeline_run(self, catalog) -> None:
            catalog[name] = dataset(catalog)

    beside(Hook())
    refused(project, f"'{name}' that this run tells of: .*{words}")


def test_a_node_of_ones_own_between_ours_that_changes_records_is_refused(project, monkeypatch):
    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        (split,) = (one for one in found["dpsgd"].nodes if "train" in one.outputs)
        at = split.outputs.index("train")

        def oversample(*given):
            parts = list(split.func(*given))
            parts[at] = threefold(parts[at])
            return tuple(parts)

        own = node(oversample, split.inputs, split.outputs, name="oversample", namespace="ingestion")
        found["mine"] = Pipeline([own, *(one for one in found["dpsgd"].nodes if one != split)])
        return found

    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    refused(project, "'train' that this run tells of: these records are not those", "mine")


def test_a_node_of_ours_in_a_function_of_ones_own_is_refused(project, monkeypatch):
    """Under the name of ours, as a decorator gives it, its records passed for ours."""

    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        (split,) = (one for one in found["dpsgd"].nodes if "train" in one.outputs)

        @functools.wraps(split.func)
        def oversample(*given):
            parts = split.func(*given)
            named = zip(split.outputs, parts, strict=True)
            return tuple(threefold(part) if name == "train" else part for name, part in named)

        own = node(oversample, split.inputs, split.outputs, name="split_records", namespace="ingestion")
        found["mine"] = Pipeline([own, *(one for one in found["dpsgd"].nodes if one != split)])
        return found

    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    refused(project, "'train' that this run tells of: these records are not those", "mine")


@pytest.mark.parametrize("name", ["records", "train"])
def test_records_that_a_hook_changes_in_place_are_refused(project, beside, name):
    """Centred by their own mean, each would depend on all others."""

    class Hook:
        @hook_impl
        def before_node_run(self, inputs) -> None:
            if name in inputs:
                features = inputs[name].features
                features -= features.float().mean(0).byte()

    beside(Hook())
    refused(project, f"'{name}' that this run tells of: these records are not those")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inputs": {"train": "test"}}, "is given 'test' in the place of 'train'"),
        ({"outputs": {"dpsgd.model": "mine"}}, "is given 'mine' in the place of 'dpsgd.model'"),
    ],
)
def test_our_nodes_with_other_entries_are_refused(project, monkeypatch, given, words):
    """A model trained on the test part was entered as one of the training part, and one by another name was lost."""

    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        trained = pipeline(found["dpsgd"].filter(node_namespaces=["dpsgd"]), **given)
        found[f"other_{next(iter(given))}"] = found["ingestion"] + trained
        return found

    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    refused(project, words, f"other_{next(iter(given))}")


def test_a_pipeline_of_ours_in_a_namespace_of_ones_own_is_refused(project, monkeypatch):
    """It left an earlier run's figures beside its model, and was in no MLflow run."""

    def with_own(ours=pipeline_registry.register_pipelines):
        found = ours()
        shared = {name for name in found["dpsgd"].inputs() if not name.endswith(".workplace")}
        found["within"] = pipeline(found["dpsgd"], namespace="outer", inputs=shared)
        return found

    monkeypatch.setattr(pipeline_registry, "register_pipelines", with_own)
    refused(project, "is in the namespace 'outer'.*run_label", "within")


def of_training(context) -> None:
    context.params["training"]["epochs"] = 1


def of_command_line(context) -> None:
    context.config_loader.runtime_params = {"training": {"epochs": 1}}


@pytest.mark.parametrize(("change", "first"), [(of_training, False), (of_command_line, True)])
def test_settings_that_a_hook_changes_are_refused_as_the_run_would_not_follow_them(project, beside, change, first):
    class Hook:
        @hook_impl
        def after_context_created(self, context) -> None:
            change(context)

    beside(Hook(), first=first)
    refused(project, "A hook has changed the settings after they were validated")


@pytest.mark.slow
def test_hooks_that_change_nothing_of_ours_may_do_as_they_like(project, beside):
    """Nor does an entry that copies its records change them."""
    seen = list[str]()

    class Hook:
        @hook_impl
        def after_context_created(self, context) -> None:
            context.params["mine"] = 1

        @hook_impl
        def after_catalog_created(self, catalog) -> None:
            catalog["test"] = MemoryDataset(copy_mode="assign")

        @hook_impl
        def before_node_run(self, node, inputs) -> dict[str, Any]:
            seen.append(node.name)
            return dict(inputs)

    beside(Hook())
    (project / "conf/local").mkdir(exist_ok=True)
    (project / "conf/local/catalog.yml").write_text("train: {type: MemoryDataset, copy_mode: deepcopy}\n")
    kedro_run(project, "dpsgd", **QUICK)
    assert "dpsgd.train_model" in seen
    assert (report_folder(project, "dpsgd") / "report.html").is_file()


@pytest.mark.slow
def test_folders_may_be_written_with_a_slash_at_their_end(project):
    """In the catalog too: an absolute path is left there as it was written."""
    (project / "conf/local").mkdir(exist_ok=True)
    ledger = f"privacy_ledger: {{type: equidp.pipelines.datasets.FolderDataset, filepath: {project}/data/of_all//}}\n"
    (project / "conf/local/catalog.yml").write_text(ledger)
    kedro_run(project, "dpsgd", raw_dir=f"{project}/data/01_raw/", options={"to_nodes": ["dpsgd.train_model"]}, **QUICK)
    assert (project / "data/of_all/ledger.jsonl").is_file()
