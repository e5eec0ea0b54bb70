"""Several tensors per record: packed and taken apart without loss, and trained on as by a module of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.packing import Packed, Packing, packed
from equidp.training import make_private

pytestmark = pytest.mark.usefixtures("coarse")

N = 200
DRAWN = torch.Generator().manual_seed(5)
IDS = torch.randint(1, 30, (N, 6), generator=DRAWN)
MASK = torch.arange(6) < torch.randint(2, 7, (N, 1), generator=DRAWN)
IMAGES = torch.rand(N, 1, 4, 4, generator=DRAWN)
LABELS = (IDS[:, 0] > 15).long()
PARTS = ((IDS, MASK, IMAGES), LABELS)
LOSS = nn.CrossEntropyLoss(reduction="none")
ASKED: dict[str, Any] = {
    "noise_multiplier": 1.5, "delta": 1e-4, "epochs": 2, "batch_size": 50, "learning_rate": 0.5, "device": "cpu",
    "seed": 3,
}  # fmt: skip


class Reader(nn.Module):
    """Of texts, beside an image."""

    def __init__(self, *, most: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.image, self.out = nn.Embedding(30, 4), nn.Linear(16, 4), nn.Linear(8, 2)
        self.most = most

    def forward(self, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        assert (ids.dtype, mask.dtype, image.dtype) == (torch.int64, torch.bool, torch.float32)
        counts = mask.sum(1, keepdim=True)
        text = (self.words(ids) * mask.unsqueeze(2)).sum(1) / (counts.max() if self.most else counts)
        return self.out(torch.cat([text, self.image(image.flatten(1))], dim=1).tanh())


class Split(nn.Module):
    """As one would write it by hand for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()

    def forward(self, joined: Tensor) -> Tensor:
        ids, image, mask = joined.split([6, 16, 6], dim=1)
        return self.reader(ids.long(), mask.bool(), image.reshape(-1, 1, 4, 4))


class Items(Dataset[Any]):
    """One record at a time, in a dict or a tuple."""

    def __init__(self, *, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        parts = {"mask": MASK[i], "ids": IDS[i], "image": IMAGES[i]}
        return parts if self.named else (IDS[i], MASK[i], IMAGES[i]), int(LABELS[i])


def trained(model: nn.Module, data: Any) -> list[Tensor]:
    trainer = make_private(model, data, LOSS, **ASKED)
    trainer.train(progress=False)
    return [parameter.detach() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize(
    "parts",
    [
        {"ids": torch.tensor([[2**62 + 1, -(2**62)], [3, 4]]), "mask": torch.tensor([True, False])},
        (torch.tensor([[2**24], [-(2**24)]]), torch.rand(2, 3, 2), torch.tensor([[1, 255], [0, 7]], dtype=torch.uint8)),
        (torch.rand(2, 3).half(), torch.rand(2).bfloat16()),
        (torch.tensor([[7, 2**16 - 1], [0, 1]], dtype=torch.uint16), torch.rand(2, 1)),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
    ],
)
def test_what_is_taken_apart_is_what_was_packed(parts: Any) -> None:
    packing = Packing.of(parts)
    apart = packing.parts(packing.pack(parts))
    expected = [parts[name] for name in packing.names] if packing.names else list(parts)
    assert [part.dtype for part in apart] == [part.dtype for part in expected]
    assert all(map(torch.equal, apart, expected))


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({}, "The features have no parts"),
        ({1: IDS}, "parts whose names are no text"),
        ({"ids": IDS, "mask": MASK[1:]}, "Part 'mask' of the features has 199 records, and the first part has 200"),
        ((IDS, [1, 2]), "Part 1 of the features is a list: give a tensor"),
        ({"ids": torch.tensor(3)}, "Part 'ids' of the features is a single number"),
        ({"image": IMAGES.double()}, r"Part 'image' .* is torch\.float64.*\.float\(\)"),
        ({"image": IMAGES.to_sparse()}, r"torch\.sparse_coo: give dense tensors"),
        ({"image": IMAGES, "ids": IDS - 2**25}, r"Part 'ids' of the features has whole numbers beyond 2\^24"),
        ((IMAGES[:2], torch.tensor([0, 2**24 + 1])), "Part 1 of the features has whole numbers beyond"),  # the last
        (
            (IMAGES[:1], torch.tensor([2**64 - 1], dtype=torch.uint64)),
            "Part 1 of the features has whole numbers beyond",
        ),
    ],
)
def test_what_cannot_be_packed_without_loss_is_refused(features: Any, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        packed(features, Reader())


def test_several_tensors_are_trained_on_as_by_a_module_that_splits_them() -> None:
    joined = torch.cat([IDS.float(), IMAGES.flatten(1), MASK.float()], dim=1)
    expected = trained(Split(), (joined, LABELS))
    named, ordered = {"mask": MASK, "ids": IDS, "image": IMAGES}, (IDS, MASK, IMAGES)
    for data in ((named, LABELS), (ordered, LABELS), Items(named=True), Items(named=False)):
        torch.testing.assert_close(trained(Reader(), data), expected)


def test_a_packed_model_takes_the_tensors_as_they_were() -> None:
    parts = {"ids": IDS, "mask": MASK, "image": IMAGES}
    trainer = make_private(Reader(), (parts, LABELS), LOSS, **ASKED)
    trainer.run_steps(1)
    own = trainer.model.model(**parts)
    assert torch.equal(trainer.model(parts), own)
    torch.testing.assert_close(trainer.model(trainer.population.records.features), own)


def test_a_model_may_write_into_a_part() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.words, self.out = nn.Embedding(30, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            words = self.words(ids)
            mask[:, 0] = 0
            return self.out((words * mask.unsqueeze(2)).sum(1))

    class Careful(Writing):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return super().forward(ids, mask.clone())

    mask = MASK.long()
    written = trained(Writing(), ((IDS, mask), LABELS))
    assert torch.equal(mask, MASK.long())
    torch.testing.assert_close(written, trained(Careful(), ((IDS, mask), LABELS)))


def test_of_outputs_with_logits_these_are_taken() -> None:
    class Outputs(dict[str, Tensor]):
        @property
        def logits(self) -> Tensor:
            return self["logits"]

    class Tuned(Reader):
        def forward(self, ids: Tensor, mask: Tensor, image: Tensor) -> Any:
            return Outputs(logits=super().forward(ids, mask, image))

    data = ((IDS, MASK, IMAGES), LABELS)
    assert all(map(torch.equal, trained(Tuned(), data), trained(Reader(), data)))


def test_records_that_meet_by_a_part_alone_are_found() -> None:
    """All masks are alike here: that a record counts by the longest one shows where every second one is shortened."""
    features, model = packed((IDS, torch.ones_like(MASK), IMAGES), Reader(most=True))
    # whole numbers in a packing of floats are whole as the model sees them: only its own part is shortened
    engine = GradientEngine(model, LOSS)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(features, LABELS)


@pytest.mark.parametrize(
    "other",
    [
        torch.full((N,), 5),
        torch.full((N, 1), 5),
        torch.ones(N, dtype=torch.bool),
        torch.ones(N, 6),
        torch.ones(N, 1, 6, 6, dtype=torch.bool),
    ],
)
def test_records_that_meet_by_what_is_alike_in_all_are_found(other: Tensor) -> None:
    """Such as by the largest length, or by whether all are marked."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(30, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, other: Tensor) -> Tensor:
            largest = other.flatten(1).sum(1).max() if other.dim() > 1 else other.max()
            return self.out(self.words(ids).sum(1) * largest)

    features, model = packed((IDS, other), Largest())
    with pytest.raises(EquidpError, match="mixes records"):
        GradientEngine(model, LOSS).norms(features, LABELS)


def test_where_half_a_number_is_none_texts_are_shortened_all_the_same() -> None:
    class Measured(Reader):
        def forward(self, ids: Tensor, mask: Tensor, image: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            if lengths.min() < 1:
                raise ValueError("a text of no words")
            return super().forward(ids, mask, image)

    features, model = packed(
        (IDS, torch.ones_like(MASK), IMAGES, torch.ones(N, dtype=torch.int64)), Measured(most=True)
    )
    with pytest.raises(EquidpError, match="mixes records"):
        GradientEngine(model, LOSS).norms(features, LABELS)


def test_masks_of_four_dimensions_are_tried_like_others() -> None:
    class Marked(Reader):
        def forward(self, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
            return super().forward(ids, mask[:, 0, 0], image)

    squares = MASK[:, None, None].expand(-1, 1, 6, -1)
    torch.testing.assert_close(trained(Marked(), ((IDS, squares, IMAGES), LABELS)), trained(Reader(), PARTS))


def test_the_model_of_a_trainer_is_trained_on_by_another() -> None:
    first = make_private(Reader(), PARTS, LOSS, **ASKED)
    first.run_steps(1)
    for parameter in first.model.parameters():
        parameter.requires_grad_(True)
    second = make_private(first.model, PARTS, LOSS, **ASKED)
    second.run_steps(1)
    assert second.model.model is first.model.model


def test_a_record_that_would_fail_the_run_is_found_in_each_part() -> None:
    ids = IDS.clone()
    ids[70, 1] = 30
    with pytest.raises(EquidpError, match=r"The model fails on record 70 \(from 0\), and not on the first one"):
        make_private(Reader(), ((ids, MASK, 100 * IMAGES), LABELS), LOSS, **ASKED)


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (
            {"ids": IDS, "masks": MASK, "image": IMAGES},
            r"ids int64 \[b, 6\] and image float32 .*arguments of the model's",
        ),
        ((IDS, MASK), r"int64 \[b, 6\] and int64 \[b, 6\]|int64 \[b, 6\] and bool \[b, 6\]: .*missing"),
        (IDS, r"called with the features alone\. Give all that it takes: several tensors by the model's arguments"),
    ],
)
def test_parts_that_a_model_does_not_take_are_told(features: Any, words: str) -> None:
    trainer = make_private(Reader(), (features, LABELS), LOSS, **ASKED)
    with pytest.raises(EquidpError, match=words):
        trainer.run_steps(1)


class Longer(Items):
    """Texts that were not brought to one length."""

    def __getitem__(self, i: int) -> Any:
        return {"ids": IDS[i, : 3 + i % 2]}, 0


class Lacking(Items):
    """With parts that some items do not have."""

    def __init__(self, *, more: bool) -> None:
        super().__init__(named=True)
        self.more = more

    def __getitem__(self, i: int) -> Any:
        parts, label = super().__getitem__(i)
        return {name: part for name, part in parts.items() if name != "mask" or (i == 7) == self.more}, label


class Untouched(Items):
    """As a tokenizer gives texts one by one: lists, of their own lengths or of one."""

    def __init__(self, *, alike: bool) -> None:
        super().__init__(named=True)
        self.alike = alike

    def __getitem__(self, i: int) -> Any:
        return {"mask": MASK[i], "ids": IDS[i, : 6 if self.alike else 3 + i % 2].tolist()}, 0


class Changing(Items):
    """With other types in a later part of the data."""

    def __len__(self) -> int:
        return 1030

    def __getitem__(self, i: int) -> Any:
        return {"ids": IDS[i % N] if i < 1024 else IDS[i % N].float()}, 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            Untouched(alike=False),
            r"The features 'ids' of the dataset's items are no tensors of one shape, such as a list",
        ),
        (
            Untouched(alike=True),
            r"The features 'ids' of the dataset's items are no tensors of one shape, such as a list",
        ),
        (Longer(named=True), r"The features 'ids' of the dataset's items differ in shape, such as \[3\] and \[4\]"),
        (
            Lacking(more=False),
            r"differ in their names, such as \['mask', 'ids', 'image'\] and \['ids', 'image'\]: give",
        ),
        (Lacking(more=True), r"differ in their names, such as \['ids', 'image'\] and \['mask', 'ids', 'image'\]: give"),
        (Changing(named=True), r"features are ids float32 \[b, 6\], and those before are ids int64 \[b, 6\]"),
    ],
)
def test_items_that_are_not_alike_are_refused(data: Any, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        make_private(Reader(), data, LOSS, **ASKED)


def test_public_records_have_the_same_parts() -> None:
    asked = {**ASKED, "algorithm": "sa_dpsgd", "options": {"energy": "public"}}
    parts = (IDS, MASK, IMAGES)
    make_private(Reader(), (parts, LABELS), LOSS, **asked, public=(tuple(part[:20] for part in parts), LABELS[:20]))
    with pytest.raises(EquidpError, match="features of the public records are one tensor: give int64"):
        make_private(Reader(), (parts, LABELS), LOSS, **asked, public=(IDS[:20], LABELS[:20]))


def test_a_transformer_of_hugging_face_is_taken_as_it_is() -> None:
    transformers = pytest.importorskip("transformers", reason="needs equidp[pretrained]")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2,
        max_position_embeddings=6, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    texts = {"input_ids": IDS, "attention_mask": MASK.long()}
    trainer = make_private(model, (texts, LABELS), LOSS, **ASKED)
    assert isinstance(trainer.model, Packed)
    trainer.run_steps(2)
    assert torch.equal(trainer.model(texts), model(**texts).logits)
