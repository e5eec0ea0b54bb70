"""A run that is resumed under anything else would take the same noise for other sums: it is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gradients.test_recording import Again
from torch import Tensor

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.algorithms import algorithm_settings
from equidp.data.records import Membership, Records, Schema, Split
from equidp.errors import EquidpError
from equidp.mechanism.parts import Run, StepFacts, Update, Updating
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.system.workplace import JOURNAL_FILE
from equidp.training import (
    Prepared,
    Trained,
    TrainingRequest,
    forget,
    make_model,
    plan_run,
    preparation,
    prepare,
    train_model,
)
from equidp.training.digests import fingerprint, initial_state
from equidp.training.journal import Journal

pytestmark = pytest.mark.usefixtures("coarse")

SCHEMA = Schema("toy", "tabular", (3,), ("a", "b"), {"class": ("a", "b")}, feature_names=tuple("xyz"))
PUBLIC = {"energy_records": 20}


def some(count: int, seed: int) -> Records:
    features = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed))
    labels = (features[:, 0] > 0.5).long()
    return Records(features, labels, {"class": labels}, SCHEMA, unit=torch.arange(count) // 2)


PARTS = Split(some(120, 0), some(20, 1), some(20, 2))


def live(
    folder: Path,
    name: str,
    options: dict[str, Any],
    parts: Split,
    *,
    resume: bool,
    secure: bool = False,
    grouping: str = "class",
    checkpoint_every: int | None = None,
    **changes: Any,
) -> Trained:
    algorithm = algorithm_settings(name, options).build()
    privacy = PrivacySettings(noise_multiplier=1.0, unit="unit", secure=secure)
    training = TrainingSettings(**{"epochs": 3, "batch_size": 10, "device": "cpu"} | changes)
    plan = plan_run(algorithm, units=60, groups=2, privacy=privacy, training=training)
    request = TrainingRequest(
        algorithm, plan, grouping=grouping, model=ModelSettings(name="logistic"), privacy=privacy, training=training,
        seed=0, options=options, workplace=folder, resume=resume, checkpoint_every=checkpoint_every,
    )  # fmt: skip
    return train_model(request, parts, progress=False)


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        ("dpsgd", {"clip_norm": 1.0}, {"clip_norm": 0.1}, "clip_norm was 1.0 and is 0.1"),
        pytest.param("dpsgd_f", {}, {"base_clip_norm": 2.0}, "clip_norm was 1.0 and is 2.0", marks=pytest.mark.slow),
        pytest.param("psasc", {}, {"clip_norm": 0.5}, "clip_norm was 0.1 and is 0.5", marks=pytest.mark.slow),
        ("dpis", {}, {"clip_norm": 2.0}, "clip_norm was 1.0 and is 2.0"),
        ("dpsgd_tanh", {}, {"temperature": 5.0}, "temperature was 2.0 and is 5.0"),
    ],
)
def test_options_that_no_part_holds(
    tmp_path: Path, power_cut: Any, name: str, before: dict, after: dict, told: str
) -> None:
    with power_cut(after=5):
        live(tmp_path, name, before, PARTS, resume=False)
    with pytest.raises(EquidpError, match=told):
        live(tmp_path, name, after, PARTS, resume=True)
    assert live(tmp_path, name, before, PARTS, resume=True).privacy["epsilon"] is not None


@pytest.mark.parametrize(("before", "after"), [(1, 5), (1, None), (None, 1)])
def test_a_resumed_run_may_save_its_checkpoints_at_other_epochs(
    tmp_path: Path, power_cut: Any, before: int | None, after: int | None
) -> None:
    whole = live(tmp_path / "whole", "dpsgd", {}, PARTS, resume=False)
    with power_cut(after=8):
        live(tmp_path / "cut", "dpsgd", {}, PARTS, resume=False, checkpoint_every=before)
    cut = live(tmp_path / "cut", "dpsgd", {}, PARTS, resume=True, checkpoint_every=after)
    assert all(cut.weights[name].equal(weights) for name, weights in whole.weights.items())
    assert cut.privacy == whole.privacy


@pytest.mark.parametrize(
    "changed",
    [
        {"epochs": 4},
        {"batch_size": 12},
        {"learning_rate": 0.2},
        {"optimizer": "adam"},
        {"weight_decay": 0.1},
        {"schedule": "cosine"},
        {"average": 0.9},
        {"augmentations": 2},
        {"device": "auto"},
        {"physical_batch_size": 4},
        {"precision": "bf16"},
        {"diagnostics": True},
        {"class_weights": (1, 2)},
    ],
)
def test_a_resumed_run_may_change_nothing_that_a_digit_of_a_release_depends_on(
    tmp_path: Path, power_cut: Any, changed: dict[str, Any]
) -> None:
    with power_cut(after=5):
        live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    (name,) = changed
    with pytest.raises(EquidpError, match=rf"training\.{name} was"):
        live(tmp_path, "dpsgd", {}, PARTS, resume=True, **changed)


def test_other_declared_sizes_are_other_weights_of_classes(tmp_path: Path, power_cut: Any) -> None:
    """The same settings, records and number of them: the sizes alone weigh the loss."""

    def weighted(*sizes: float, resume: bool) -> Trained:
        train = dataclasses.replace(PARTS.train, membership=Membership("strata", class_sizes=sizes))
        parts = dataclasses.replace(PARTS, train=train)
        return live(tmp_path, "dpsgd", {}, parts, resume=resume, class_weights="balanced")

    with power_cut(after=5):
        weighted(40.0, 80.0, resume=False)
    with pytest.raises(EquidpError, match="class_weights was"):
        weighted(80.0, 40.0, resume=True)
    assert weighted(40.0, 80.0, resume=True).privacy["epsilon"] is not None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"bounds": (0.0, 20.0)}, r"target was \['regression', 0.0, 10.0\]"),
        ({"task": "counts"}, r"target was .* and is .'counts'"),
    ],
)
def test_other_bounds_of_a_number_are_another_loss(
    tmp_path: Path, power_cut: Any, changed: dict[str, Any], told: str
) -> None:
    before = Schema(
        "toy",
        "tabular",
        (3,),
        (),
        {"all": ("one",)},
        tuple("xyz"),
        task="regression",
        targets=("t",),
        bounds=(0.0, 10.0),
    )

    def of(schema: Schema, records: Records) -> Records:
        groups = {"all": torch.zeros_like(records.labels)}
        return Records(records.features, 10 * records.features[:, 0], groups, schema, unit=records.unit)

    def numbers(schema: Schema, *, resume: bool) -> Trained:
        parts = Split(*(of(schema, part) for part in (PARTS.train, PARTS.test, PARTS.public)))
        return live(tmp_path, "dpsgd", {}, parts, resume=resume, grouping="all")

    with power_cut(after=5):
        numbers(before, resume=False)
    with pytest.raises(EquidpError, match=told):
        numbers(dataclasses.replace(before, **changed), resume=True)
    assert numbers(before, resume=True).privacy["epsilon"] is not None


@pytest.mark.slow
def test_smaller_chunks_change_the_last_digits(tmp_path: Path) -> None:
    """This is why a resumed run may not have others: the same noise on both sums would cancel."""
    whole, chunks = (
        live(tmp_path, "dpsgd", {}, PARTS, resume=False, batch_size=50, physical_batch_size=size).weights
        for size in (None, 3)
    )
    differences = torch.cat([(chunks[name] - weights).flatten() for name, weights in whole.items()]).abs()
    assert 0 < differences.max() < 1e-5


def test_a_file_that_the_model_starts_from(tmp_path: Path, power_cut: Any) -> None:
    schema = Schema("toy", "text", (3,), ("a", "b"), {"class": ("a", "b")}, vocabulary=9)
    labels = torch.arange(40) % 2
    words = Records(torch.randint(1, 9, (40, 3)), labels, {"class": labels}, schema)
    vectors = tmp_path / "vectors.txt"
    algorithm = algorithm_settings("dpsgd", {}).build()
    privacy, training = PrivacySettings(noise_multiplier=1.0), TrainingSettings(epochs=1, batch_size=10, device="cpu")
    options = {"embedding": "vectors", "vectors": str(vectors), "dimension": 2, "projection": 2, "hidden": 2, "head": 2}

    def live(scale: float, *, resume: bool) -> Trained:
        vectors.write_text("".join(f"w{i} {scale * i} {scale}\n" for i in range(30)))
        request = TrainingRequest(
            algorithm, plan_run(algorithm, units=40, groups=2, privacy=privacy, training=training), grouping="class",
            model=ModelSettings(name="bilstm", options=options), privacy=privacy, training=training, seed=0,
            workplace=tmp_path / "kept", resume=resume,
        )  # fmt: skip
        return train_model(request, Split(words, words, words.take(torch.arange(0))), progress=False)

    with power_cut(after=2):
        live(0.1, resume=False)
    with pytest.raises(EquidpError, match="initial_model was"):
        live(0.2, resume=True)
    assert live(0.1, resume=True).privacy["ledger"][0]["count"] == 4


def test_a_resumption_of_nothing_is_told(tmp_path: Path, power_cut: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with power_cut(after=2):
        live(tmp_path, "dpsgd", {}, PARTS, resume=True)
    assert "dpsgd: there is nothing to resume" in caplog.text
    caplog.clear()
    live(tmp_path, "dpsgd", {}, PARTS, resume=True)
    assert "nothing to resume" not in caplog.text


def test_charges_that_are_left_behind_are_told(
    tmp_path: Path, power_cut: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with power_cut(after=2):
        live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    assert "anew" not in caplog.text
    live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    (kept,) = tmp_path.rglob("journal-abandoned-1.jsonl")
    assert "dpsgd: this run begins anew" in caplog.text
    assert str(kept) in caplog.text


def test_constants_that_images_are_standardised_by() -> None:
    model = ModelSettings(name="cnn_small")
    plain = Schema("toy", "image", (1, 8, 8), ("a", "b"), {"class": ("a", "b")}, mean=(0.5,), sd=(0.5,))
    other = dataclasses.replace(plain, mean=(0.25,))
    algorithm = algorithm_settings("dpsgd", {}).build()
    one, again, two = (initial_state(make_model(schema, model, algorithm, 0)) for schema in (plain, plain, other))
    assert one == again != two


def test_units_that_were_formed_otherwise(tmp_path: Path, power_cut: Any) -> None:
    with power_cut(after=5):
        live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    train = dataclasses.replace(PARTS.train, unit=torch.arange(120) % 60)
    with pytest.raises(EquidpError, match="records was") as refusal:
        live(tmp_path, "dpsgd", {}, dataclasses.replace(PARTS, train=train), resume=True)
    # a digest of all records tells whoever knows the others, and guesses one, whether it is there
    for parts in (PARTS.train, train):
        assert fingerprint(parts) not in refusal.value.message


@pytest.mark.parametrize("views", [1, 2])
def test_identities_that_views_are_drawn_by(tmp_path: Path, power_cut: Any, views: int) -> None:
    """Another column of ids gives the same records other views."""
    asked: dict[str, Any] = {"augmentations": views, "augmentation_kinds": ("noise",)} if views > 1 else {}
    one, two = (
        dataclasses.replace(PARTS, train=dataclasses.replace(PARTS.train, identity=torch.full((120, 2), number)))
        for number in (1, 2)
    )
    with power_cut(after=5):
        live(tmp_path, "dpsgd", {}, one, resume=False, **asked)
    if views > 1:
        with pytest.raises(EquidpError, match="records was"):
            live(tmp_path, "dpsgd", {}, two, resume=True, **asked)
    assert live(tmp_path, "dpsgd", {}, two if views == 1 else one, resume=True, **asked).privacy["epsilon"] is not None


def test_groups_that_bounds_are_set_for(tmp_path: Path, power_cut: Any) -> None:
    schema = dataclasses.replace(SCHEMA, groupings={**SCHEMA.groupings, "sex": ("f", "m")})

    def with_sexes(records: Records, first: int) -> Records:
        sexes = (torch.arange(len(records)) + first) % 2
        return dataclasses.replace(records, schema=schema, groups={**records.groups, "sex": sexes})

    parts, others = (
        Split(with_sexes(PARTS.train, first), with_sexes(PARTS.test, 0), with_sexes(PARTS.public, 0))
        for first in (0, 1)
    )
    with power_cut(after=5):
        live(tmp_path, "dpsgd_f", {}, parts, resume=False, grouping="sex")
    with pytest.raises(EquidpError, match="grouping was 'sex' and is 'class'"):
        live(tmp_path, "dpsgd_f", {}, parts, resume=True, grouping="class")
    with pytest.raises(EquidpError, match="records was"):
        live(tmp_path, "dpsgd_f", {}, others, resume=True, grouping="sex")


def test_other_public_records(tmp_path: Path, power_cut: Any) -> None:
    """They decide which steps are taken, hence at which parameters the next ones look."""
    with power_cut(after=5):
        live(tmp_path, "sa_dpsgd", PUBLIC, PARTS, resume=False)
    with pytest.raises(EquidpError, match="public was"):
        live(tmp_path, "sa_dpsgd", PUBLIC, dataclasses.replace(PARTS, public=some(20, 3)), resume=True)


@pytest.mark.parametrize("published", [8.0, 5.0])
def test_a_run_that_may_stop_early_pays_for_the_crash_beyond_its_cap(
    tmp_path: Path, power_cut: Any, published: float
) -> None:
    """Both lives' steps were new releases, and the second could have gone on to its cap, wherever it stopped."""
    options = PUBLIC | {"stop_on": "published_epsilon", "published_epsilon": published}
    with power_cut(after=5):
        live(tmp_path / "crashed", "sa_dpsgd", options, PARTS, resume=False, secure=True)
    resumed = live(tmp_path / "crashed", "sa_dpsgd", options, PARTS, resume=True, secure=True).privacy
    whole = live(tmp_path / "whole", "sa_dpsgd", options, PARTS, resume=False, secure=True).privacy
    charged = sum(event["count"] for event in resumed["ledger"])
    (cap,) = algorithm_settings("sa_dpsgd", options).build().events(
        plan_run(
            algorithm_settings("sa_dpsgd", options).build(), units=60, groups=2,
            privacy=PrivacySettings(noise_multiplier=1.0), training=TrainingSettings(epochs=3, batch_size=10),
        )
    )  # fmt: skip
    assert charged > 5
    assert resumed["epsilon"] == epsilon([dataclasses.replace(cap, count=cap.count + charged)], 1e-5).value
    assert resumed["epsilon"] > whole["epsilon"] == epsilon([cap], 1e-5).value
    for told in (resumed, whole):  # what the report tells a reader to do
        assert epsilon([Event.from_dict(event) for event in told["charged"]], 1e-5).value == told["epsilon"]


@pytest.mark.parametrize("steps_done", [1, 5])
def test_a_crash_of_a_short_run_costs_little_of_what_the_run_does(
    tmp_path: Path, power_cut: Any, steps_done: int
) -> None:
    """A block of 64 steps was charged ahead of a run of 18: a crash in its first step cost more than three runs."""
    with power_cut(after=steps_done):
        live(tmp_path, "dpsgd", {}, PARTS, resume=False, secure=True)
    (whole,) = live(tmp_path, "dpsgd", {}, PARTS, resume=True, secure=True).privacy["ledger"]
    taken_again = whole["count"] - 18
    assert steps_done <= taken_again < steps_done + 18 / 8


def test_a_new_life_shares_no_dropout_with_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps done again by the same code draw the same masks; by other code they are new releases, and draw others."""

    def begun(*, resume: bool) -> Prepared:
        algorithm = algorithm_settings("dpsgd", {}).build()
        privacy, training = PrivacySettings(noise_multiplier=1.0), TrainingSettings(epochs=3, batch_size=10)
        plan = plan_run(algorithm, units=120, groups=2, privacy=privacy, training=training)
        request = TrainingRequest(
            algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
            training=training, seed=0, workplace=tmp_path, resume=resume,
        )  # fmt: skip
        found = prepare(request, PARTS)
        if resume:
            found.trainer.load_state_dict(found.keeper.saved.state)
        return found

    def masks(life: Prepared) -> list[float]:
        life.keeper.close()
        return torch.rand(4).tolist()

    first = begun(resume=False)
    fresh = torch.rand(4).tolist()
    first.trainer.run_steps(3)
    first.keeper.save(first.trainer)
    after = masks(first)
    assert masks(begun(resume=True)) == after
    monkeypatch.setattr(preparation, "CODE_DIGEST", "of other code")
    again = masks(begun(resume=True))
    assert again not in (after, fresh)


def test_recorded_passes_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They round by the size of the batch that they were recorded for, which is another after a resumption."""
    monkeypatch.setattr(preparation, "device_of", lambda training: torch.device("cpu"))
    monkeypatch.setattr(preparation, "CudaGraphs", lambda device: Again())

    def lives(folder: Path, *, recorded: bool) -> int:
        algorithm = algorithm_settings("dpsgd", {}).build()
        privacy = PrivacySettings(noise_multiplier=1.0)
        training = TrainingSettings(epochs=3, batch_size=10, cuda_graphs=recorded)
        plan = plan_run(algorithm, units=120, groups=2, privacy=privacy, training=training)
        for resume in (False, True):
            request = TrainingRequest(
                algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
                training=training, seed=0, workplace=folder, resume=resume,
            )  # fmt: skip
            life = prepare(request, PARTS)
            life.trainer.run_steps(3)
            life.keeper.close()
        return life.keeper.renewed

    assert lives(tmp_path / "afresh", recorded=False) == 0
    assert lives(tmp_path / "recorded", recorded=True) == 2


class Forgotten(Updating):
    """Momentum that no checkpoint keeps."""

    memory = 0.0

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        self.memory = noisy_sum + self.memory
        return self.memory


class Forgetful(Update):
    """Another package's update: it does not name its state in `remembered`."""

    def start(self, run: Run) -> Updating:
        return Forgotten()


def test_what_others_code_keeps_unseen_may_not_meet_its_noise_again(tmp_path: Path, power_cut: Any) -> None:
    """Under the noise of the first life, the steps done again told the difference of two sums exactly."""

    def private(*, resume: bool) -> Trained:
        algorithm = dataclasses.replace(algorithm_settings("dpsgd", {}).build(), update=Forgetful())
        training = TrainingSettings(epochs=3, batch_size=10, device="cpu")
        privacy = PrivacySettings(noise_multiplier=1.0)
        plan = plan_run(algorithm, units=120, groups=2, privacy=privacy, training=training)
        request = TrainingRequest(
            algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
            training=training, seed=0, workplace=tmp_path, resume=resume,
        )  # fmt: skip
        return train_model(request, PARTS, progress=False)

    with power_cut(after=5):
        private(resume=False)
    (charged,) = private(resume=True).privacy["ledger"]
    assert charged["count"] > 36  # the five steps are new releases


def test_a_run_that_ends_does_not_forget_for_the_one_that_began_after_it(tmp_path: Path) -> None:
    """Between its training and its results' end another run may take the folder: those charges are not its own."""
    live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    began = Journal(tmp_path / JOURNAL_FILE, {}, fresh=True)
    forget(tmp_path)
    assert (tmp_path / JOURNAL_FILE).exists()
    began.close()
    forget(tmp_path)
    assert not (tmp_path / JOURNAL_FILE).exists()


def test_a_run_that_was_refused_before_its_first_step_lets_go_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook keeps its last error, and with it everything that was alive where it was raised."""
    refused = EquidpError("too large")
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "Trainer", lambda **arguments: (_ for _ in ()).throw(refused))
        with pytest.raises(EquidpError, match="too large") as kept:
            live(tmp_path, "dpsgd", {}, PARTS, resume=False)
    assert live(tmp_path, "dpsgd", {}, PARTS, resume=False).privacy["epsilon"] is not None
    assert kept.value is refused
