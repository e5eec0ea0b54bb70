"""What may go wrong with a tuning: it is killed, it forgets halfway, its trials are counted by what they score."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from equidp.accounting.dataset_ledger import DatasetLedger
from equidp.data.records import Split
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.mechanism.secure import SecureRandom
from equidp.parameters import Settings, resolve
from equidp.pipelines.tune import nodes
from equidp.system import files
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training import TrainingRequest, conclusion
from equidp.training.charging import CHARGED
from equidp.training.digests import initial_state
from equidp.training.networks import make_model
from equidp.training.tuning import plan_tuning

pytestmark = pytest.mark.usefixtures("coarse")

LAW = {"trials_law": "geometric", "trials_mean": 3}


def settings(*, privacy: dict[str, Any] | None = None, tune: dict[str, Any] | None = None, **more: Any) -> Settings:
    noise = {"noise_multiplier": 2.0, "delta": 1e-5} | (LAW if privacy is None else privacy)
    grid = {"grid": {"training": {"learning_rate": [0.1, 1.0]}}} | (tune or {})
    given = {"dataset": "digits", "algorithm": "dpsgd", "model": {"name": "logistic"}, "privacy": noise, "tune": grid}
    return resolve(given | {"training": {"epochs": 2, "batch_size": 256, "device": "cpu"}} | more)


def records() -> Any:
    kind = source("digits", {})
    return kind.records(kind.locate(Path()))


def stopped(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def tuned(place: Path, of: Settings, data: Any = None) -> Any:
    data = records() if data is None else data
    return nodes.choose_model(data, place / "run", of, {"dpsgd": of.algorithm("dpsgd")}, place / "ledgers", {})


# ------------------------------------------------------------------------------------------------------------- kill −9


def life(place: Path, death: str, resume: bool) -> None:
    """A process that tunes, writes a byte for every step of every trial before its noise is drawn, and dies."""
    torch.set_num_threads(1)
    trial, train, perturb, write = [Path()], nodes.train_model, SecureRandom.perturb, nodes.write_private

    def die(at: str) -> None:
        if at == death:
            os.kill(os.getpid(), signal.SIGKILL)

    def training(request: TrainingRequest, parts: Split, **how: Any) -> Any:
        assert request.workplace is not None
        trial[0] = place / f"{request.workplace.name}.steps"
        found = train(request, parts, **how)
        trial[0] = Path()
        return found

    def noised(self: Any, values: Any, **how: Any) -> Any:
        if trial[0].name:
            with trial[0].open("ab") as witness:
                witness.write(b".")
            die(f"step {trial[0].stat().st_size}")
        return perturb(self, values, **how)

    def written(path: Path, content: Any) -> None:
        die(f"before {path.name}")
        write(path, content)
        die(f"after {path.name}")

    nodes.train_model, SecureRandom.perturb, nodes.write_private = training, noised, written  # type: ignore[assignment]
    tuned(place, settings(privacy=LAW | {"secure": True}, resume=resume))


def most_steps(place: Path) -> int:
    """Of any trial."""
    return max((path.stat().st_size for path in place.glob("*.steps")), default=0)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")
def test_a_secure_tuning_that_is_killed_goes_on_and_no_trial_has_more_steps_than_were_charged(tmp_path: Path) -> None:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["equidp.pipelines.tune.nodes", "sklearn.datasets"])
    deaths = (f"before {nodes.DRAWN}", "step 7", "step 9", f"after {nodes.TRIAL}", "")
    drawn: set[bytes] = set()
    for number, death in enumerate(deaths):
        child = context.Process(target=life, args=(tmp_path, death, number > 0))
        child.start()
        child.join()
        assert child.exitcode == (-signal.SIGKILL if death else 0)
        entered = [one for one in DatasetLedger(tmp_path / "ledgers", "digits").entries() if one.part == "train"]
        assert len({one.run for one in entered}) == 1
        assert most_steps(tmp_path) <= max(sum(event.count for event in one.events) for one in entered)
        kept = tmp_path / "run" / nodes.DRAWN
        assert kept.is_file() == (number > 0)
        drawn |= {kept.read_bytes()} if number else set()
    assert len(drawn) == 1
    assert most_steps(tmp_path) > entered[0].events[0].count  # else nothing was done twice


# ------------------------------------------------------------------------------------------------------- what is kept


def left_after_each_removal(place: Path, monkeypatch: pytest.MonkeyPatch, forget: Any) -> list[set[str]]:
    seen, unlink = [], Path.unlink

    def removing(self: Path, **how: Any) -> None:
        unlink(self, **how)
        seen.append({path.name for path in place.iterdir()})

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", removing)
        forget(place)
    return seen


@pytest.mark.parametrize(("forget", "witness"), [(conclusion.forget, JOURNAL_FILE), (nodes.forget_trials, nodes.DRAWN)])
def test_what_says_that_a_run_is_entered_goes_before_what_says_what_it_was_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: Any, witness: str
) -> None:
    """A death in between would else leave a run that goes on without a charge, and begins anew."""
    for name in (CHARGED, witness):
        (tmp_path / name).write_text("", encoding="utf-8")
    left = left_after_each_removal(tmp_path, monkeypatch, forget)
    assert not left[-1]
    assert all(witness in names or CHARGED not in names for names in left)
    assert any(witness in names and CHARGED not in names for names in left)


@pytest.mark.parametrize(
    ("forget", "witness"), [(conclusion.forget, CHECKPOINT_FILE), (nodes.forget_trials, nodes.DRAWN)]
)
def test_what_a_kill_left_half_written_of_a_run_is_forgotten_with_it(tmp_path: Path, forget: Any, witness: str) -> None:
    """It says how many trials were drawn, or has figures that were drawn and not kept: beside those that were released,
    a second noise on the same counts, which no entry of the ledger is of.
    """
    for name in (witness, CHARGED, conclusion.HISTOGRAM):
        files.unfinished(tmp_path / name).write_text("", encoding="utf-8")
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_trials_of_a_tuning_that_died_while_it_forgot_are_none_of_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = tmp_path / "run" / "nonprivate_trial-0"
    stale.mkdir(parents=True)
    (stale / nodes.TRIAL).write_text('{"score": 1.0, "beyond_plan": []}', encoding="utf-8")
    (tmp_path / "run" / f"{nodes.BEGUN}-7").touch()  # of one whose folder was forgotten
    assert trials_run(tmp_path, 0.5, monkeypatch) >= 1
    assert not (stale / nodes.TRIAL).exists()
    assert not (tmp_path / "run" / f"{nodes.BEGUN}-7").exists()


def test_a_trials_model_is_on_the_disk_before_what_says_that_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut in between left a trial that is not trained again, and no model of it."""
    durable, write, settled, missing = files.durable, nodes.write_private, set[int](), list[Path]()

    def made_durable(descriptor: int) -> None:
        durable(descriptor)
        settled.add(os.fstat(descriptor).st_ino)

    def written(path: Path, content: bytes) -> None:
        if path.name == nodes.TRIAL and path.with_name(nodes.MODEL).stat().st_ino not in settled:
            missing.append(path)
        write(path, content)

    monkeypatch.setattr(files, "durable", made_durable)
    monkeypatch.setattr(nodes, "write_private", written)
    tuned(tmp_path, settings(seed=3))
    assert not missing


def test_a_chosen_model_that_cannot_be_read_does_not_tell_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secure = settings(privacy=LAW | {"secure": True})
    save = nodes.save_weights
    monkeypatch.setattr(nodes, "save_weights", lambda weights, path: (save(weights, path), path.write_bytes(b"")))
    with pytest.raises(EquidpError, match="nonprivate_trial/model"):
        tuned(tmp_path, secure)


def test_an_unfinished_tuning_goes_on_as_itself_alone_and_another_is_charged_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder copied to another label took the ε of a tuning and was refused then. And finished trials were taken as
    trained with whatever noise a newer version would add: the statement told that one's.
    """
    secure = {"privacy": LAW | {"secure": True}}
    plan, release = nodes.plan_tuning, nodes.release_figures

    monkeypatch.setattr(nodes, "release_figures", stopped)
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path, settings(**secure))
    monkeypatch.setattr(nodes, "release_figures", release)

    def entered() -> int:
        return len(DatasetLedger(tmp_path / "ledgers", "digits").entries())

    def newer(*given: Any) -> Any:
        made = plan(*given)
        noisier = [replace(of, plan=replace(of.plan, noise_multiplier=2.5)) for of in made.points]
        return replace(made, points=tuple(noisier))

    before = entered()
    with pytest.raises(EquidpError, match="has another run_label, other settings"):
        tuned(tmp_path, settings(**secure, resume=True, run_label="copy"))
    whole = records()
    changed = replace(whole, features=whole.features.flip(-1))
    with pytest.raises(EquidpError, match="other records"):
        tuned(tmp_path, settings(**secure, resume=True), changed)
    for tune in ({"epsilon": 0.5}, {"score": "accuracy"}):
        with pytest.raises(EquidpError, match="other settings"):
            tuned(tmp_path, settings(**secure, tune=tune, resume=True))
    monkeypatch.setattr(nodes, "plan_tuning", newer)
    with pytest.raises(EquidpError, match="another noise"):
        tuned(tmp_path, settings(**secure, resume=True))
    assert entered() == before
    monkeypatch.setattr(nodes, "plan_tuning", plan)
    drawn = tmp_path / "run" / nodes.DRAWN
    old = json.loads(drawn.read_text(encoding="utf-8"))
    del old["noise"]  # as the version before wrote it
    drawn.write_text(json.dumps(old), encoding="utf-8")
    assert tuned(tmp_path, settings(**secure, resume=True))[1]["noise_multiplier"] == 2.0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_trial_that_another_version_began_otherwise_is_not_said_to_begin_again_elsewhere(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: with its folder moved away, as the refusal said, it began anew, and the statement did not know of it."""
    secure, tune = {"privacy": LAW | {"secure": True}}, {"tune": {"workers": workers}}
    with monkeypatch.context() as older:
        older.setattr(nodes, "_seed", lambda number, _: 100 + number)
        older.setattr(nodes, "save_weights", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path, settings(**secure))

    with pytest.raises(EquidpError, match=r"another version of equidp .*seed was 100 and is 0.* run_label") as refused:
        tuned(tmp_path, settings(**secure, **tune, resume=True))

    assert "moved away" not in refused.value.message
    assert "resume=false" not in refused.value.message
    assert "nonprivate_trial" not in refused.value.message


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trial_whose_folder_is_gone_does_not_begin_again_uncounted(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was: the ledger had what both lives were charged, and the statement the second one's alone."""
    secure, tune = {"privacy": LAW | {"secure": True}}, {"tune": {"workers": workers}}
    with monkeypatch.context() as once:
        once.setattr(nodes, "save_weights", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path, settings(**secure))
    folder, elsewhere = tmp_path / "run" / f"{nodes.FOLDER}-0", tmp_path / "elsewhere"
    folder.rename(elsewhere)
    with pytest.raises(EquidpError, match="has lost the folder of a trial, and ε would not count") as refused:
        tuned(tmp_path, settings(**secure, **tune, resume=True))
    assert "-0" not in refused.value.message.replace(str(tmp_path), "")
    elsewhere.rename(folder)
    _, privacy, *_ = tuned(tmp_path, settings(**secure, **tune, resume=True))
    entered = DatasetLedger(tmp_path / "ledgers", "digits").entries()
    charged = max(sum(event.count for event in one.events) for one in entered if one.part == "train")
    assert sum(event["count"] for event in privacy["charged"]) == charged


def test_a_tuning_warns_of_a_weak_promise_as_a_single_training_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It said nothing of a δ that promises nothing, nor, in secure runs too, of persons with several records."""
    whole, of = records(), settings(privacy=LAW | {"delta": 0.5}, seed=3)
    of_units = replace(whole, unit=torch.arange(len(whole)) // 2)
    monkeypatch.setattr(nodes, "_every_score", stopped)
    with pytest.raises(KeyboardInterrupt):
        nodes.choose_model(of_units, tmp_path / "run", of, {"dpsgd": of.algorithm("dpsgd")}, tmp_path / "ledgers", {})
    assert "dpsgd: δ = 0.5 is not below one over" in caplog.text
    assert "dpsgd: ε will be for one record" in caplog.text


# --------------------------------------------------------------------------------------------------- planted: counting


def trials_run(place: Path, score: float, monkeypatch: pytest.MonkeyPatch, drawn: Any = None) -> int:
    """How many trials there are if each of them scores so."""
    run: list[int] = []

    def trial(number: int, *others: Any) -> dict[str, Any]:
        run.append(number)
        return {"score": score, "beyond_plan": []}

    with monkeypatch.context() as patched:
        patched.setattr(nodes, "_trial", trial)
        if drawn is not None:
            patched.setattr(nodes, "_drawn", lambda *given: list(drawn(score)))
        with pytest.raises(FileNotFoundError):  # no trial left a model
            tuned(place, settings(seed=3))
    return len(run)


def until_good(score: float) -> Iterator[int]:
    """As published tuning does: a trial more while the best is not good enough."""
    yield 0
    while score < 0.8:
        yield 0
        score += 0.2


def number_follows_scores(place: Path, monkeypatch: pytest.MonkeyPatch, drawn: Any = None) -> bool:
    found = {trials_run(place / str(score), score, monkeypatch, drawn) for score in (0.1, 0.9)}
    return len(found) > 1


def test_trials_that_are_counted_afterwards_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not number_follows_scores(tmp_path / "honest", monkeypatch)
    assert number_follows_scores(tmp_path / "fault", monkeypatch, until_good)


@pytest.mark.parametrize("secure", [True, False])
def test_the_chosen_model_of_a_secure_tuning_does_not_tell_its_number_by_the_weights_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """Noise hides no start: of 8,192 weights that took 13 steps the correlation with the right one was 0.97."""
    started: list[str] = []

    def training(request: TrainingRequest, parts: Split, **how: Any) -> Any:
        network = make_model(parts.train.schema, request.model, request.algorithm, request.seed)
        started.append(initial_state(network))
        return train_model(request, parts, **how)

    train_model = nodes.train_model
    monkeypatch.setattr(nodes, "train_model", training)
    monkeypatch.setattr(nodes, "_drawn", lambda *_: [0, 1, 0])
    tuned(tmp_path, settings(privacy=LAW | {"secure": secure}))
    assert len(started) == 3
    assert len(set(started)) == (1 if secure else 3)  # of a seeded one whoever has the seed knows the number anyway


# ------------------------------------------------------------------------------------------------------ without privacy


@pytest.mark.slow
def test_an_exact_choice_trains_every_combination_and_states_them_all(tmp_path: Path) -> None:
    given = settings(privacy={"epsilon": 3.0, "noise_multiplier": None}, tune={"exact": True})
    _, privacy, choice, _, inside = tuned(tmp_path, given)
    (twice,) = privacy["charged"]
    assert twice["count"] == 2 * privacy["ledger"][0]["count"]
    assert privacy["epsilon"] == privacy["epsilon_pld"] > 3.0
    assert privacy["target_epsilon"] is None  # 3 was each training's
    assert "no guarantee" in privacy["notes"][-1]
    scores = [one["score"] for one in inside["trials"]]
    assert [one["settings"]["training.learning_rate"] for one in inside["trials"]] == [0.1, 1.0]
    assert choice["chosen"] == inside["trials"][scores.index(max(scores))]["settings"]
    assert (choice["exact"], choice["histogram"], choice["validation"]) == (True, None, None)
    (entered,) = DatasetLedger(tmp_path / "ledgers", "digits").entries()
    assert (entered.secure, entered.events[0].count) == (False, twice["count"])


@pytest.mark.parametrize("privacy", [{"secure": True}, LAW, {"max_trials": 2}])
def test_an_exact_choice_is_for_research_alone(privacy: dict[str, Any]) -> None:
    with pytest.raises(EquidpError, match=r"tune\.exact=true chooses without privacy"):
        plan_tuning(records(), settings(privacy=privacy, tune={"exact": True}))


@pytest.mark.parametrize("diagnostics", [True, False])
def test_other_trials_leave_only_among_diagnostics(diagnostics: bool) -> None:
    given = resolve({"dataset": "digits", "privacy": {"epsilon": 1.0}, "training": {"diagnostics": diagnostics}})
    points = type("Tuning", (), {"points": [type("Point", (), {"changes": {"a": 1}})]})
    found = nodes._every_trial(points, [0], [0.5], given)  # type: ignore[arg-type]
    assert found == ({"trials": [{"settings": {"a": 1}, "score": 0.5}]} if diagnostics else {})


@pytest.mark.parametrize(
    ("of", "held_out", "told"),
    [
        ({"delta": 0.01}, 0.2, r"the \d+ training records"),
        ({"evaluation": {"epsilon": 0.01, "delta": 0.3}}, 0.2, r"the \d+ training records"),
        # of 1797 digits some 290 train; about 430 are held back to choose by, and 1080 to test
        ({"delta": 0.003}, 0.6, "about 4.. validation records"),
        ({"evaluation": {"epsilon": 1.0, "delta": 0.0015}}, 0.6, "about 1... test records"),
    ],
)
def test_a_secure_tuning_with_a_large_delta_is_refused_before_anything_is_charged(
    tmp_path: Path, of: dict[str, Any], held_out: float, told: str
) -> None:
    """Its trials were trained, and their ε spent, for a model that is not for publication."""
    data = {"test_fraction": held_out, "keep": {}}
    with pytest.raises(EquidpError, match=f"is not below one over {told}"):
        tuned(tmp_path, settings(privacy=LAW | {"secure": True} | of, data=data))
    assert not (tmp_path / "ledgers").exists()


@pytest.mark.parametrize(
    ("of", "told"),
    [
        ({"model": {"name": "bilstm"}}, "choose another model.name"),
        ({"training": {"class_weights": [1, 2, 3], "epochs": 1}}, "has 3 numbers"),
        ({"tune": {"grid": {"training": {"precision": ["float32", "bf16"]}}}}, "half precision"),
    ],
)
def test_a_grid_that_fits_no_record_is_refused_before_anything_is_charged(
    tmp_path: Path, of: dict[str, Any], told: str
) -> None:
    """A trial refused it, when all trials were charged, and the tuning could not even be gone on with."""
    with pytest.raises(EquidpError, match=told):
        tuned(tmp_path, settings(privacy=LAW | {"secure": True}, **of))
    assert not list(tmp_path.iterdir())
