"""Attention and recurrence that are rewritten compute what torch's do, and show each record's gradient."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import CrossEntropy
from equidp.gradients.rewriting import rewritten


class Reader(nn.Module):
    """One of torch's layers on sequences, and a last layer on its last place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = not getattr(self.layer, "batch_first", True)
        x = x.transpose(0, 1) if turned else x
        if isinstance(self.layer, nn.TransformerEncoder):
            mask = torch.zeros(x.shape[:2], dtype=torch.bool)
            mask[:, 3:] = x[:, 3:, 0] > 0
            return self.head(self.layer(x, src_key_padding_mask=mask)[:, 0])
        recurrent = isinstance(getattr(self.layer, "dropout", None), float) and not hasattr(self.layer, "num_heads")
        found = self.layer(x) if recurrent else self.layer(x, x, x, attn_mask=torch.ones(5, 5).triu(1).bool())
        states = found[0].transpose(0, 1) if turned else found[0]
        return self.head(states[:, -1])


LAYERS = {
    "lstm": lambda: nn.LSTM(4, 6, batch_first=True),
    "lstm both ways, two layers": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(4, 6, batch_first=True, bias=False),
    "gru both ways, two layers": lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    "attention, sequences first": lambda: nn.MultiheadAttention(6, 3, bias=False),
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), 1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_a_rewritten_layer_computes_the_same_and_has_the_norms_of_autograd(name: str, training: bool, caplog) -> None:
    torch.manual_seed(2)
    theirs = Reader(LAYERS[name]()).train(training)
    with caplog.at_level(logging.INFO):
        ours = rewritten(copy.deepcopy(theirs))
    assert "is rewritten from Linear layers" in caplog.text
    features = torch.randn(4, 5, 6 if "attention" in name or name == "transformer" else 4)
    labels = torch.tensor([0, 1, 2, 0])
    torch.testing.assert_close(ours(features), theirs(features), rtol=1e-5, atol=1e-6)
    each = []
    for x, y in zip(features, labels, strict=True):
        theirs.zero_grad()
        nn.functional.cross_entropy(theirs(x[None]), y[None]).backward()
        each.append(torch.cat([p.grad.flatten() for p in theirs.parameters()]).norm())
    engine = GradientEngine(ours, CrossEntropy())
    torch.testing.assert_close(engine.norms(features, labels), torch.stack(each), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda layer: layer], ids=["inside", "alone"])
def test_a_rewritten_layer_has_the_mode_of_the_one_it_replaces(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, x = wrap(nn.LSTM(4, 4, num_layers=2, dropout=0.9)).eval(), torch.randn(5, 3, 4)
    expected = model(x)
    torch.testing.assert_close(rewritten(model)(x), expected)


def test_the_weights_and_states_that_torch_gives_beside_the_outputs_are_given_too() -> None:
    attention, lstm = nn.MultiheadAttention(6, 2, batch_first=True), nn.LSTM(6, 4, num_layers=2, batch_first=True)
    x, mask = torch.randn(3, 5, 6), torch.tensor([[False] * 3 + [True] * 2] * 3)
    expected, found = attention(x, x, x, key_padding_mask=mask), rewritten(attention)(x, x, x, key_padding_mask=mask)
    torch.testing.assert_close(found, expected)
    start = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    torch.testing.assert_close(rewritten(lstm)(x, start), lstm(x, start))


def test_what_a_rewritten_layer_cannot_do_is_refused_by_name_and_a_frozen_one_stays() -> None:
    with pytest.raises(EquidpError, match=r"Layer '0' \(LSTM\): leave proj_size out"):
        rewritten(nn.Sequential(nn.LSTM(4, 6, proj_size=2)))
    frozen = nn.Sequential(nn.LSTM(4, 6).requires_grad_(False))
    assert type(rewritten(frozen)[0]) is nn.LSTM
    with pytest.raises(EquidpError, match=r"Layer '0' \(GRU\) has other parameters .*: take off what"):
        rewritten(nn.Sequential(prune.l1_unstructured(nn.GRU(4, 6), "weight_hh_l0", 2)))
    attention = nn.MultiheadAttention(4, 2)
    prune.l1_unstructured(attention, "in_proj_weight", 2)
    with pytest.raises(EquidpError, match=r"has other parameters than torch's own"):
        rewritten(attention)
    prune.remove(attention, "in_proj_weight")
    rewritten(attention)
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4)])
    with pytest.raises(EquidpError, match=r"padded, not packed"):
        rewritten(nn.LSTM(4, 6))(packed)


class Twice(nn.Module):
    """One recurrence under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.GRU(4, 4, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)[0])[0][:, -1])


def test_a_layer_under_two_names_is_one_layer_under_both_once_rewritten() -> None:
    model, x, y = Twice(), torch.randn(3, 5, 4), torch.tensor([0, 1, 2])
    expected = model(x)
    assert rewritten(model).first is model.second
    torch.testing.assert_close(model(x), expected)
    GradientEngine(model, CrossEntropy()).norms(x, y)
