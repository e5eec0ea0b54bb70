"""`make_private`: the loop that one would put together by hand, of an algorithm of any needs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ChainDataset, ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan, Segment
from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.gradients.packing import packed
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.parts import PoissonSampler, Run, Sampling
from equidp.mechanism.parts.sampler import PoissonSampling
from equidp.mechanism.sampling import Examples, Population
from equidp.mechanism.secure import SecureRandom
from equidp.mechanism.trainer import Trainer
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.reporting.privacy_report import privacy_report
from equidp.training import make_private, plan_run, spent, statement
from equidp.training.reading import examples_of

pytestmark = pytest.mark.usefixtures("coarse")

FEATURES = torch.rand(300, 4, generator=torch.Generator().manual_seed(1))
LABELS = (FEATURES[:, 0] > 0.7).long()
GROUPS = (FEATURES[:, 1] > 0.5).long()
LOSS = nn.CrossEntropyLoss(reduction="none")
ASKED: dict[str, Any] = {
    "noise_multiplier": 1.5, "delta": 1e-4, "epochs": 2, "batch_size": 60, "learning_rate": 0.5, "device": "cpu",
}  # fmt: skip


class Items(Dataset[tuple[Tensor, int]]):
    """One record at a time, as torchvision's data sets give them."""

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return FEATURES[i], int(LABELS[i])


EVERY = Items()


class Turned(Items):
    """With a random transform, as for training with batches of a DataLoader."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return FEATURES[i].flip(0) if torch.rand(()) < 0.5 else FEATURES[i], int(LABELS[i])


class Blended(Items):
    """Blends a few records, the last ones, with others: as mixup that is only for a rare class."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        other = FEATURES[int(torch.randint(300, ()))] if i > 250 else FEATURES[i]
        return FEATURES[i] + other, int(LABELS[i])


class Centred(Items):
    """Few items, each less the mean of those that are read with it: all are read together, at first."""

    def __len__(self) -> int:
        return 30

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [(FEATURES[i] - FEATURES[places].mean(0), LABELS[i]) for i in places]


class Filled(Items):
    """Items that are filled up to the longest of those that are read with them."""

    def __len__(self) -> int:
        return 30

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [(FEATURES[i, : max(places) % 4 + 1], LABELS[i]) for i in places]


class Stream(IterableDataset[tuple[Tensor, int]]):
    """One record after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return zip(FEATURES, LABELS.tolist(), strict=True)


STREAM = Stream()


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def weights(trainer: Trainer) -> Tensor:
    trainer.train(progress=False)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.released_model().parameters()])


def by_hand(name: str, options: dict[str, Any], groups: Tensor, number: int, classes: int = 0) -> Tensor:
    algorithm = algorithm_settings(name, options).build().averaged(0.9)
    plan = plan_run(
        algorithm, units=300, groups=number, classes=classes,
        privacy=PrivacySettings(noise_multiplier=1.5, delta=1e-4),
        training=TrainingSettings(epochs=2, batch_size=60, learning_rate=0.5),
    )  # fmt: skip
    return weights(
        Trainer(
            model=network(), loss=LOSS, algorithm=algorithm, plan=plan, ledger=Ledger(), random=SeededRandom(7, "cpu"),
            population=Population(Examples(FEATURES, LABELS), groups), learning_rate=0.5, optimizer="adam",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "given", "ids", "number", "classes"),
    [
        ("dpsgd", {"clip_norm": 0.5}, {}, torch.zeros(300, dtype=torch.int64), 1, 0),
        ("dpsgd_f", {}, {"groups": (GROUPS, 2)}, GROUPS, 2, 0),
        ("dpsgd_f", {}, {"classes": 2}, LABELS, 2, 0),
        ("dpsgd_level", {}, {"groups": (GROUPS, 2), "classes": 2}, LABELS, 2, 0),
        ("dpsgd_minimax", {}, {"classes": 2}, LABELS, 2, 2),
        ("dpsgd_minimax", {}, {"groups": (GROUPS, 2), "classes": 2}, 2 * GROUPS + LABELS, 4, 2),
    ],
)
def test_it_is_the_loop_that_one_would_put_together(
    name: str, options: dict[str, Any], given: dict[str, Any], ids: Tensor, number: int, classes: int
) -> None:
    expected = by_hand(name, options, ids, number, classes)
    asked = {**ASKED, **given, "algorithm": name, "options": options, "optimizer": "adam", "average": 0.9, "seed": 7}
    for data in ((FEATURES, LABELS), TensorDataset(FEATURES, LABELS), Items(), Stream()):
        assert torch.equal(weights(make_private(network(), data, LOSS, **asked)), expected)


def test_without_a_seed_nobody_can_repeat_it_and_epsilon_is_met() -> None:
    asked = {**ASKED, "noise_multiplier": None, "epsilon": 2.0}
    trainers = [make_private(network(), (FEATURES, LABELS), LOSS, **asked) for _ in range(2)]
    assert all(isinstance(trainer.random, SecureRandom) for trainer in trainers)
    assert not torch.equal(*map(weights, trainers))
    for trainer in trainers:
        assert sum(event.count for event in trainer.ledger.events) == trainer.plan.steps
        assert 1.9 < trainer.algorithm.epsilon(trainer.plan).value <= 2.0


def test_units_of_the_examples_are_protected_and_recurrence_is_rewritten() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, features: Tensor) -> Tensor:
            return self.out(self.words(features.unsqueeze(2))[0][:, -1])

    examples = Examples(FEATURES, LABELS, unit=torch.arange(300) // 3)
    trainer = make_private(Reader(), examples, LOSS, **{**ASKED, "batch_size": 20}, seed=0)
    assert (trainer.plan.records, trainer.population.size) == (100, 100)
    before = weights(make_private(Reader(), examples, LOSS, **{**ASKED, "batch_size": 20, "epochs": 1}, seed=0))
    assert bool(weights(trainer).isfinite().all())
    assert len(before) == sum(parameter.numel() for parameter in trainer.model.parameters())


class Both(nn.Module):
    """Of a record's numbers and a code."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.out = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, numbers: Tensor, code: Tensor) -> Tensor:
        return self.out(numbers + self.code(code))


def test_several_tensors_may_be_of_units() -> None:
    """`Examples` took one tensor alone, and only they have units."""
    several, unit = {"numbers": FEATURES, "code": torch.arange(300) % 3}, torch.arange(300) // 3
    torch.manual_seed(0)
    model = Both()
    packed_features, packed_model = packed(several, copy.deepcopy(model))
    found = [
        make_private(of, examples, LOSS, **{**ASKED, "batch_size": 20}, seed=0)
        for of, examples in (
            (model, Examples(several, LABELS, unit)),
            (copy.deepcopy(model), Examples(tuple(several.values()), LABELS, unit)),
            (packed_model, Examples(packed_features, LABELS, unit)),
        )
    ]
    for trainer in found:
        trainer.run_steps(3)
        assert trainer.population.size == 100
        torch.testing.assert_close(weights(trainer), weights(found[0]))
    assert repr(Examples(several, LABELS, unit)) == "<Examples: features [300, 5], labels [300], unit [300]>"
    with pytest.raises(EquidpError, match=r"no list\. Features may be several tensors by the model's arguments"):
        Examples([FEATURES, unit], LABELS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"algorithm": "dpsgd_minimax"}, "dpsgd_minimax looks at the classes: give their number, `classes`"),
        ({"algorithm": "dpsgd_f"}, "dpsgd_f looks at groups: give `groups`"),
        ({"algorithm": "asc"}, "asc looks at groups: give `groups`"),
        ({"algorithm": "dpsgd_f", "groups": (GROUPS, 1)}, "groups are from 0 to 1: 1 are from 0 to 0"),
        ({"algorithm": "dpsgd_f", "groups": (GROUPS - 1, 2)}, "groups are from -1 to 0: 2 are from 0 to 1"),
        ({"algorithm": "dpsgd_minimax", "classes": 1}, "labels are from 0 to 1: 1 are from 0 to 0"),
        ({"groups": (GROUPS[1:], 2)}, r"groups are torch.int64 \[299\]: give \[300\] int64"),
        ({"algorithm": "dpsgd_fair"}, "Unknown algorithm 'dpsgd_fair'"),
        ({"options": {"clip": 1}}, "'clip'. Did you mean 'clip_norm'"),
        ({"epsilon": 1.0}, "exactly one of privacy.epsilon and privacy.noise_multiplier"),
        ({"algorithm": "sa_dpsgd"}, "needs public records: give some as `public`"),
        ({"algorithm": "sgd"}, "sgd is not private"),  # its ε would be 0
        ({"algorithm": "dpsgd_tanh"}, "dpsgd_tanh is for models of the registry"),
        ({"algorithm": "sa_dpsgd", "options": {"energy": "test"}}, "energy=test asks for test records"),
        ({"algorithm": "dpsgd_scatter"}, "dpsgd_scatter is for models of the registry"),
        (
            {"algorithm": algorithm_settings("dpsgd", {}).build(), "options": {"clip_norm": 9.0}},
            "is built already",
        ),
        ({"algorithm": algorithm_settings("dpsgd", {})}, r"is no algorithm: give its name .*, or build one"),
        ({"optimizer": torch.optim.Adam}, "optimizer is a name, or a Descent"),
        ({"options": ["clip_norm"]}, "given as options is a list: give a dict"),
        ({"ledger": []}, r"given as ledger is a list: give a Ledger, such as Ledger\(events\)"),
        ({"delta": 0.01}, "delta=0.01 is not below one over the 300 training records"),
        (
            {"algorithm": "dpis", "options": {"declared_records": 900}, "delta": 0.002},
            "delta=0.002 is not below one over the 900 training records",
        ),
        ({"optimizer": torch.optim.SGD(network().parameters())}, "set trainer.optimizer to one of torch's"),
        ({"algorithm": "dpsgd_f", "groups": GROUPS}, "The groups are a pair"),
        (
            {"algorithm": "dpsgd_f", "groups": (GROUPS, GROUPS.max() + 1)},
            "kinds of groups there are is an int, not a Tensor",
        ),
        ({"algorithm": "dpsgd_f", "classes": 2.0}, "kinds of labels there are is an int, not a float"),
        ({"algorithm": "dpsgd_f", "groups": (GROUPS.tolist(), 2)}, "groups are a list: give a tensor"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises((EquidpError, ValueError), match=words):
        make_private(network(), (FEATURES, LABELS), LOSS, **{**ASKED, **given}, seed=0)


def test_a_delta_that_promises_nothing_is_told_before_the_noise_is_solved_for(monkeypatch) -> None:
    monkeypatch.setattr("equidp.training.private.plan_run", lambda *_, **__: pytest.fail("the noise was solved for"))
    with pytest.raises(EquidpError, match=r"delta=0\.01 is not below one over the 300"):
        make_private(network(), (FEATURES, LABELS), LOSS, **{**ASKED, "delta": 0.01}, seed=0)


def test_a_delta_of_just_one_over_the_number_of_records_is_refused() -> None:
    assert 1 / 49 * 49 < 1  # by rounding
    with pytest.raises(EquidpError, match="is not below one over the 49"):
        make_private(network(), (FEATURES[:49], LABELS[:49]), LOSS, **{**ASKED, "delta": 1 / 49}, seed=0)


def test_a_loss_that_averages_is_told_before_the_first_step() -> None:
    with pytest.raises(EquidpError, match=r"The loss has shape \(\) for 1 record; .*reduction='none'.*squeeze\(1\)"):
        make_private(network(), (FEATURES, LABELS), nn.CrossEntropyLoss(), **ASKED, seed=0)


class Leaning(nn.Sequential):
    """Moves a record's last digits by the others of its batch, and no gradient by a part that a seeded run looks at."""

    def forward(self, features: Tensor) -> Tensor:
        outputs = super().forward(features)
        return outputs + 1e-6 * outputs.mean()


@pytest.mark.parametrize("seed", [0, None])
def test_last_digits_count_where_nobody_can_repeat_the_noise(seed: int | None) -> None:
    refused = contextlib.nullcontext() if seed == 0 else pytest.raises(EquidpError, match="last digits change")
    trainer = make_private(Leaning(*network()), (FEATURES, LABELS), LOSS, **ASKED, seed=seed)
    with refused:
        trainer.run_steps(1)


def test_a_trainer_says_how_far_it_is() -> None:
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0)
    trainer.run_steps(3)
    assert repr(trainer) == "<Trainer of dpsgd: 3 of 10 steps, 60 of 300 in a batch, σ=1.5, δ=0.0001>"
    assert repr(trainer.ledger) == "<Ledger of 3 events: 3 at q=0.2, σ=1.5>"
    assert repr(trainer.population) == "<Population of 300 records on cpu>"
    assert repr(trainer.engine) == "<GradientEngine of Sequential: 23 trained parameters, float32>"


def test_what_a_notebook_shows_of_examples_has_no_values_of_theirs() -> None:
    units = torch.arange(300) // 3
    assert repr(Examples(FEATURES, LABELS)) == "<Examples: features [300, 4], labels [300]>"
    assert repr(Examples(FEATURES, LABELS, units)) == "<Examples: features [300, 4], labels [300], unit [300]>"


def test_a_cell_that_is_run_again_does_not_train_on_by_a_second_epsilon() -> None:
    model = network()
    make_private(model, (FEATURES, LABELS), LOSS, **ASKED).run_steps(1)
    with pytest.raises(EquidpError, match=r"an earlier trainer .* create the model anew: .* not in a new trainer's ε"):
        make_private(model, (FEATURES, LABELS), LOSS, **ASKED)


def viewed(sd: float, seed: int = 0) -> Tensor:
    views = Augmentation(3, ("noise",), key=1, shape=(4,), sd=sd)
    return weights(make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, augmentation=views, seed=seed))


def test_a_records_gradient_is_the_mean_over_its_views() -> None:
    alone = weights(make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0))
    assert torch.allclose(viewed(0.0), alone, atol=1e-6)  # views that are the record itself
    assert not torch.allclose(viewed(0.5), alone, atol=1e-3)


@pytest.mark.parametrize(
    ("views", "features", "words"),
    [
        (
            Augmentation(2, ("flip",), key=1, shape=(3, 8, 8)),
            FEATURES,
            r"of records \[3, 8, 8\], and the features are \[4\]",
        ),
        (Augmentation(2, ("noise",), key=1, shape=(4,)), FEATURES.long(), r"noise to features of torch\.int64"),
    ],
)
def test_views_of_other_records_are_refused(views: Augmentation, features: Tensor, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        make_private(network(), (features, LABELS), LOSS, **ASKED, augmentation=views, seed=0)


@pytest.mark.parametrize(
    ("data", "classes", "words"),
    [
        ((FEATURES, FEATURES[:, 2]), 2, r"labels are torch.float32 \[300\]: give \[300\] int64"),
        (TensorDataset(FEATURES), 0, r"The data have 1 tensors: give \(features, labels\)\.$"),
        ((FEATURES, FEATURES > 0, LABELS), 0, r"have 3 tensors: give \(features, labels\)\. Features may be several"),
        ([{"x": FEATURES[0]}], 0, "Each item of the dataset must be features and a label; one is a dict of 1"),
        ([FEATURES, LABELS], 0, "and a label; one is a Tensor of 300"),
        ([(FEATURES[0], None)], 0, "and a label; one has a NoneType as its label"),
        (
            [(FEATURES[0], 0), (FEATURES[0, :3], 1)],
            0,
            r"features of the dataset's items differ in shape, such as \[4\] and \[3\]",
        ),
        ([([1, 2, 3], 0), ([4, 5], 1)], 0, "and a label; one has a list as its features"),
        ([(FEATURES[0], 0) for _ in range(1024)] + [(FEATURES[0, :3], 1)], 0, r"such as \[4\] and \[3\]"),
        (zip(FEATURES, LABELS, strict=True), 0, r"data are a zip, which gives no item .*: give \(features, labels\)"),
        (pd.DataFrame(FEATURES.numpy()), 0, r"data are a DataFrame, which gives no item .*: give \(features, labels\)"),
        ((FEATURES.to_sparse(), LABELS), 0, r"features are sparse.*features\.to_dense\(\)"),
        ({"x": FEATURES, "y": LABELS}, 0, r"data are a dict, which gives no item .*: give \(features, labels\)"),
        ([], 0, "The dataset has no items"),
        ((FEATURES.numpy(), LABELS), 0, r"features: give a tensor \(torch.as_tensor\(features\)\), no ndarray"),
        ((pd.DataFrame(FEATURES.numpy()), LABELS), 0, r"torch.as_tensor\(features.to_numpy\(\)\)\), no DataFrame"),
        (Subset(Subset(EVERY, [0, 1, 1]), [2, 1]), 0, r"Subset has items more than once.*unit="),
        (Subset(EVERY, [299, -1]), 0, "Subset has items more than once"),
        (ConcatDataset([EVERY, Subset(EVERY, [7])]), 0, "ConcatDataset has items more than once"),
        ([*zip(FEATURES, LABELS, strict=True)] + 10 * [(FEATURES[0], 0)], 0, "The list has items more than once"),
        (DataLoader(Items()), 0, "give the dataset of the DataLoader, `loader.dataset`"),
        (Turned(), 0, "The dataset draws at random"),
        (Blended(), 0, "The dataset draws at random"),
        ([1, 2, 1], 0, "must be features and a label; one is a int"),
        (Filled(), 0, "The dataset draws at random, or makes an item from others: read twice"),
        (Centred(), 0, "The dataset draws at random, or makes an item from others: read twice"),
        (ChainDataset([STREAM, STREAM]), 0, "ChainDataset has items more than once"),
        (ChainDataset([STREAM, ChainDataset([STREAM])]), 0, "ChainDataset has items more than once"),
    ],
)
def test_data_without_labels_are_refused(data: Any, classes: int, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        make_private(network(), data, LOSS, **ASKED, classes=classes, seed=0)


class ByLists(Dataset[Any]):
    """Gives several items at once, and no single one."""

    def __len__(self) -> int:
        return 300

    def __getitems__(self, places: list[int]) -> list[Any]:
        return [(FEATURES[place], LABELS[place]) for place in places]


def test_items_that_are_given_several_at_once_are_read_again_in_this_way() -> None:
    assert examples_of(ByLists()).features.equal(FEATURES)


def test_a_chain_of_an_iterators_streams_is_read_whole() -> None:
    """The look for repeated streams had used the iterator up."""
    found = examples_of(ChainDataset(Stream() for _ in range(2)))
    assert found.features.equal(torch.cat([FEATURES, FEATURES]))


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (nn.Linear, LOSS, r"The model is the class Linear: make one of it, Linear\(…\)"),
        (nn.Linear(4, 2), nn.CrossEntropyLoss, "The loss is the class CrossEntropyLoss"),
    ],
)
def test_classes_in_the_place_of_what_is_made_of_them_are_refused(model: Any, loss: Any, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        make_private(model, (FEATURES, LABELS), loss, **ASKED, seed=0)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (torch.relu, LOSS, r"given as model is a builtin.*: give a module of torch's, torch\.nn\.Module"),
        (network(), None, "given as loss is a NoneType: give a module or a function of outputs and labels"),
    ],
)
def test_other_kinds_in_the_place_of_model_and_loss_are_refused(model: Any, loss: Any, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        make_private(model, (FEATURES, LABELS), loss, **ASKED, seed=0)


def test_numbers_may_come_as_text() -> None:
    asked = {**ASKED, "learning_rate": "0.25", "delta": "1e-4"}
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **asked, seed=0)
    assert (trainer.learning_rate, trainer.plan.delta) == (0.25, 1e-4)


def test_parts_of_a_dataset_are_taken_that_have_each_item_once() -> None:
    halves = ConcatDataset([Subset(EVERY, range(150, 300)), Subset(ConcatDataset([EVERY, EVERY]), range(150))])
    assert make_private(network(), halves, LOSS, **ASKED, seed=0).plan.records == 300


def test_items_are_what_a_dataset_gives() -> None:
    class Halved(TensorDataset):
        def __getitem__(self, i: int) -> tuple[Tensor, ...]:
            return FEATURES[i] / 2, LABELS[i]

    given = make_private(network(), Halved(FEATURES, LABELS), LOSS, **ASKED, seed=0).population.records
    assert torch.equal(given.features, FEATURES / 2)


def test_amounts_that_a_dataset_gives_as_numbers_are_what_losses_take() -> None:
    data = [(features, float(features[2])) for features in FEATURES]
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    trainer = make_private(model, data, nn.MSELoss(reduction="none"), **ASKED, seed=0)  # type: ignore[arg-type]
    trainer.run_steps(1)
    assert trainer.population.records.labels.dtype == torch.float32


def test_records_of_a_file_stay_in_it(tmp_path: Path) -> None:
    """So a file may be larger than memory: rows are read as batches are drawn."""
    FEATURES.numpy().tofile(tmp_path / "features")
    mapped = torch.from_file(str(tmp_path / "features"), size=FEATURES.numel()).view(FEATURES.shape)
    trainer = make_private(network(), (mapped, LABELS), LOSS, **ASKED, seed=7)
    assert trainer.population.records.features.data_ptr() == mapped.data_ptr()
    assert torch.equal(weights(trainer), weights(make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=7)))


def test_nobody_can_foretell_dropout_but_of_a_seeded_run_anybody() -> None:
    """Masks go to records by their places: were they known, one record more would shift those of all after it."""

    def drawn(seed: int | None) -> Tensor:
        torch.manual_seed(0)  # as every script begins
        model = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.5), nn.Linear(20, 2))
        make_private(model, (FEATURES, LABELS), LOSS, **ASKED, seed=seed)
        return torch.rand(5)

    assert not torch.equal(drawn(None), drawn(None))
    assert torch.equal(drawn(7), drawn(7))
    assert not torch.equal(drawn(7), drawn(8))


def telling_trainer(secure: bool) -> tuple[Trainer, list[int]]:
    """Of a model with dropout, and the seeds at which torch's generator was in its passes."""
    within: list[int] = []

    class Telling(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            within.append(torch.initial_seed())
            return super().forward(input)

    model = nn.Sequential(nn.Linear(4, 20), Telling(0.5), nn.Linear(20, 2))
    return make_private(model, (FEATURES, LABELS), LOSS, **ASKED, seed=None if secure else 3), within


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("taken", [lambda trainer: trainer.run_steps(1), lambda trainer: trainer.train(progress=False)])
def test_whoever_seeds_torch_later_cannot_foretell_what_a_secure_run_drops(taken: Any, secure: bool) -> None:
    """Another trainer of the same process does, and so may a loop."""
    trainer, within = telling_trainer(secure)
    make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0)
    known = torch.initial_seed()
    within.clear()
    taken(trainer)
    assert {seed != known for seed in (within[-1], torch.initial_seed())} == {secure}


def test_no_seed_that_could_be_tried_gives_what_a_secure_run_draws() -> None:
    """A generator on the CPU takes 32 bits of a seed: whoever sees every step finds it, and with it all masks."""
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED)
    trainer.run_steps(0)
    kept = torch.initial_seed()  # all that a seed left
    assert not torch.equal(torch.rand(5), torch.rand(5, generator=torch.Generator().manual_seed(kept)))


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("taken", [lambda trainer: trainer.run_steps(1), lambda trainer: trainer.train(progress=False)])
def test_what_is_drawn_after_a_secure_run_does_not_tell_what_it_dropped(taken: Any, secure: bool) -> None:
    """The next model's initial weights may be shown: a state that they tell leads back to the masks."""
    trainer, within = telling_trainer(secure)
    within.clear()
    taken(trainer)
    assert (torch.initial_seed() != within[-1]) == secure


def test_what_is_called_after_an_epoch_need_not_return_columns() -> None:
    seen: list[float] = []
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0)
    rows = trainer.train(lambda row, _: seen.append(row["epoch"]), progress=False)
    assert [row["epoch"] for row in rows] == seen == [1.0, 2.0]


def test_a_ledger_that_is_handed_on_is_gone_on_with() -> None:
    """As by a loop that begins again after an interruption: what was charged before would be forgotten."""
    before = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0)
    before.run_steps(3)
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=1, ledger=before.ledger)
    trainer.train(progress=False)
    assert sum(event.count for event in trainer.ledger.events) == 3 + trainer.plan.steps
    assert spent(trainer) == epsilon([Event(0.2, 1.5, 13)], 1e-4).value


def test_what_an_algorithm_learns_by_and_how_much_is_in_memory_are_those_that_were_given() -> None:
    options = {"learning_rate": 0.01}
    trainer = make_private(
        network(), (FEATURES, LABELS), LOSS, **ASKED, algorithm="dp_adambc", options=options, seed=0,
        physical_batch_size=7,
    )  # fmt: skip
    assert [group["lr"] for group in trainer.optimizer.param_groups] == [0.01]
    assert trainer.physical_batch_size == 7


def test_half_precision_on_a_cpu_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"training\.precision=bf16.*leave it out, or train on a GPU"):
        make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, seed=0, precision="bf16")


def interrupted(name: str, steps: int, **asked: Any) -> Trainer:
    """A trainer of which three steps were left behind their charge."""
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, algorithm=name, seed=0, **asked)
    taken, descend = 0, trainer.optimizer.step

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    while not trainer.finished and trainer.steps_done < steps:
        trainer.optimizer.step = stop if taken in (1, 2, 4) else descend  # type: ignore[method-assign]
        with contextlib.suppress(KeyboardInterrupt):
            trainer.run_steps(1)
        taken += 1
    return trainer


def test_epsilon_is_of_interrupted_steps_too() -> None:
    for name in ("dpsgd", "dpsgd_quantile"):
        trainer = interrupted(name, 10)
        plan, charged = trainer.algorithm.epsilon(trainer.plan).value, trainer.ledger.events
        assert sum(event.count for event in charged) == trainer.plan.steps + 3
        assert spent(trainer) == epsilon(charged, trainer.plan.delta).value > plan
        # it has seven charges, three for steps taken again, and could have gone on to thirteen
        assert spent(interrupted(name, 4)) == spent(trainer)


@pytest.mark.parametrize("name", ["asc", "dpis"])
def test_where_noise_follows_from_releases_epsilon_is_the_budget_and_not_of_what_was_charged(name: str) -> None:
    trainer = interrupted(name, 10, classes=2)
    budget = trainer.algorithm.budget(trainer.plan)
    assert budget is not None
    assert spent(trainer) == budget.epsilon > epsilon(trainer.ledger.events, trainer.plan.delta).value
    trainer.ledger.append(Event(1.0, 0.5))
    with pytest.raises(EquidpError, match="more than the budget"):
        spent(trainer)


def test_where_the_length_follows_from_releases_the_plan_and_what_was_charged_count() -> None:
    public = (torch.rand(40, 4), torch.arange(40) % 2)
    options = {"stop_on": "published_epsilon", "published_epsilon": 2.0}
    trainer = interrupted("sa_dpsgd", 10, public=public, options=options)
    both = (*trainer.algorithm.events(trainer.plan), *trainer.ledger.events)
    assert spent(trainer) == epsilon(both, trainer.plan.delta).value


def test_the_statement_of_a_loop_is_that_of_a_run() -> None:
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, algorithm="dpsgd_f", classes=2, seed=7)
    trainer.train(progress=False)
    found = statement(trainer)
    assert (found["epsilon"], found["seed"], found["unit"], found["private"]) == (spent(trainer), 7, "record", True)
    assert (found["records"], found["steps"], found["secure"], found["target_epsilon"]) == (300, 10, False, None)
    assert epsilon(map(Event.from_dict, found["ledger"]), 1e-4).value == found["epsilon"]
    assert "charged" not in found
    text = privacy_report(found)
    assert "ε is of what the trainer released. What else the loop computed from the records" in text
    assert "fixed seed 7" in text


def test_the_statement_of_a_loop_that_was_left_is_of_all_that_it_would_have_done() -> None:
    examples = Examples(FEATURES, LABELS, unit=torch.arange(300) // 3)
    asked = {**ASKED, "noise_multiplier": None, "epsilon": 2.0, "batch_size": 20}
    trainer = make_private(network(), examples, LOSS, **asked)
    trainer.run_steps(4)
    found = statement(trainer, unit="patient")
    assert sum(event["count"] for event in found["ledger"]) == 4
    assert [event["count"] for event in found["charged"]] == [10]
    assert (found["epsilon"], found["target_epsilon"], found["accepted_steps"]) == (spent(trainer), 2.0, 4)
    assert (found["secure"], found["seed"], found["records"]) == (True, None, 100)
    text = privacy_report(found)
    assert "Each single patient of the training data (100 of them)" in text
    assert "The events of the whole plan are there as charged" in text
    assert "Rényi accountant over the whole plan" in text


def test_the_statement_of_an_interrupted_loop_says_so() -> None:
    trainer = interrupted("dpsgd", 10)
    found = statement(trainer)
    assert found["epsilon"] == spent(trainer) > trainer.algorithm.epsilon(trainer.plan).value
    assert found["steps_repeated"]
    assert len(found["notes"]) == 2
    assert "The loop was interrupted within a step, or went back to an earlier state" in found["notes"][0]


def test_of_noise_that_does_not_follow_from_the_plan_nothing_is_stated() -> None:
    """Such as of a sampler of one's own: what it goes by may be what the loop had shown."""

    class Turning(PoissonSampling):
        def noise(self, segment: Segment) -> float:
            return super().noise(segment) * (0.5 if self.run.ledger.count == 3 else 1.0)

    class Tuned(PoissonSampler):
        def start(self, run: Run) -> Sampling:
            return Turning(self, run)

    built = replace(algorithm_settings("dpsgd").build(), sampler=Tuned())
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, algorithm=built, seed=1)
    trainer.run_steps(3)
    assert spent(trainer) == built.epsilon(trainer.plan).value
    trainer.run_steps(2)
    for told in (spent, statement):
        with pytest.raises(EquidpError, match=r"The ledger differs from the plan.*follow from what it drew"):
            told(trainer)


def test_a_trainer_without_privacy_has_no_finite_epsilon() -> None:
    plan = Plan(300, 60, 2, 1, 1e-4, 1.0)
    trainer = Trainer(
        model=network(), loss=LOSS, algorithm=algorithm_settings("sgd").build(), plan=plan,
        population=Population(Examples(FEATURES, LABELS), torch.zeros_like(LABELS)), random=SeededRandom(0, "cpu"),
        ledger=Ledger(), learning_rate=0.1,
    )  # fmt: skip
    trainer.run_steps(2)
    assert spent(trainer) == torch.inf
    assert statement(trainer)["epsilon"] is None
    assert statement(trainer)["notes"] == ["Non-private baseline: nothing computed from it carries a guarantee."]


def test_of_a_ledger_that_lacks_steps_nothing_is_stated() -> None:
    trainer = make_private(network(), (FEATURES, LABELS), LOSS, **ASKED, algorithm="dpsgd_decay", seed=1)
    trainer.run_steps(4)
    trainer.ledger = Ledger(trainer.ledger.events[1:])
    with pytest.raises(EquidpError, match=r"if you gave a ledger, it must be of this run alone"):
        spent(trainer)


@pytest.mark.parametrize(
    ("unit", "name", "words"),
    [
        (torch.arange(300) // 3, "record", "unit='record': the examples' units are protected"),
        (None, "patient", "unit='patient': each record is protected alone"),
    ],
)
def test_units_are_not_called_what_they_are_not(unit: Tensor | None, name: str, words: str) -> None:
    trainer = make_private(network(), Examples(FEATURES, LABELS, unit=unit), LOSS, **ASKED, seed=1)
    with pytest.raises(EquidpError, match=words):
        statement(trainer, unit=name)


def test_planning_another_run_seeds_no_generator_that_a_run_of_this_process_draws_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever knows the seed would foretell what a secure run drops; the generators of GPUs, too, are all alike."""
    seeded, before = list[int](), torch.get_rng_state()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    privacy = PrivacySettings(noise_multiplier=1.5, delta=1e-4, secure=True)
    training = TrainingSettings(epochs=2, batch_size=60, learning_rate=0.5)
    plan_run(algorithm_settings("dpsgd_f").build(), units=300, groups=2, privacy=privacy, training=training)
    assert not seeded
    assert torch.equal(torch.get_rng_state(), before)


class Fed(nn.Module):
    """Refuses a record of zeros, as a text without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        assert bool(features.any(1).all()), "a record of zeros"
        outputs: Tensor = self.line(features)
        return outputs


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", ["dpsgd", "dpsgd_f", "dpsgd_minimax"])
def test_an_empty_batch_fails_in_no_model_as_the_failure_would_tell_of_it(name: str, seed: int | None) -> None:
    trainer = make_private(Fed(), (FEATURES, LABELS), LOSS, algorithm=name, classes=2, seed=seed, **ASKED)
    trainer.random.bernoulli = lambda probability, size: torch.zeros(size, dtype=torch.bool)  # type: ignore[method-assign]
    trainer.run_steps(2)
    assert sum(event.count for event in trainer.ledger.events) == 2
