"""Attention and recurrence that are rewritten compute what torch's do, and show each record's gradient."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from typing import Any

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
    "rnn": lambda: nn.RNN(4, 6, batch_first=True, bias=False),
    "rnn of relu both ways, two layers": lambda: nn.RNN(4, 3, num_layers=2, nonlinearity="relu", bidirectional=True),
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


def total(layer: nn.Module, x: Tensor, start: Any) -> Tensor:
    """A number that every state, and each last state and cell, moves."""
    states, last = layer(x, start)
    ends = last if isinstance(last, tuple) else (last,)
    return (states * torch.linspace(0, 1, states.numel(), dtype=states.dtype).view_as(states)).sum() + sum(
        end.square().sum() for end in ends
    )


RECURRENT = {name: make for name, make in LAYERS.items() if name.startswith(("lstm", "gru", "rnn"))}


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_through_all_steps_are_autograds_for_inputs_states_and_weights(name: str) -> None:
    torch.manual_seed(3)
    theirs = RECURRENT[name]().double()
    ours = rewritten(copy.deepcopy(theirs))
    x = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
    shape = (theirs.num_layers * (1 + theirs.bidirectional), x.shape[not theirs.batch_first], theirs.hidden_size)
    begins = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(1 + isinstance(theirs, nn.LSTM))
    ]
    start = tuple(begins) if len(begins) == 2 else begins[0]
    found, expected = (
        torch.autograd.grad(total(layer, x, start), [x, *begins, *layer.parameters()]) for layer in (ours, theirs)
    )
    for one, other in zip(found[: 1 + len(begins)], expected, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    # the weights have another order
    norms = [torch.stack(sorted(g.norm() for g in gs[1 + len(begins) :])) for gs in (found, expected)]
    torch.testing.assert_close(*norms, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn of relu both ways, two layers"])
def test_many_inputs_may_begin_with_one_state_within_vmap(name: str) -> None:
    theirs = LAYERS[name]()
    ours, values = rewritten(copy.deepcopy(theirs)), torch.randn(2, 3, 5, 4)
    begin = torch.randn(theirs.num_layers * (1 + theirs.bidirectional), values.shape[1 + (not theirs.batch_first)], 6)
    begin = begin[..., : theirs.hidden_size]
    start = (begin, begin) if isinstance(theirs, nn.LSTM) else begin
    found = torch.vmap(lambda x: ours(x, start)[0])(values)
    torch.testing.assert_close(found, torch.stack([theirs(x, start)[0] for x in values]))


def test_the_last_cell_alone_has_its_gradient_too() -> None:
    theirs = nn.LSTM(4, 6, batch_first=True)
    ours, x = rewritten(copy.deepcopy(theirs)), torch.randn(3, 5, 4, requires_grad=True)
    found, expected = (torch.autograd.grad(layer(x)[1][1].square().sum(), x)[0] for layer in (ours, theirs))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_gradient_of_a_gradient_is_refused_as_what_follows_from_the_steps_is_not_recorded(
    kind: type[nn.RNNBase],
) -> None:
    """It was another than torch's own layer has, and nothing said so."""
    x = torch.randn(3, 5, 4, requires_grad=True)
    ours = rewritten(kind(4, 6, batch_first=True))
    for output in (ours(x)[0], ours(x)[0][:, -1].sum(0)):
        (once,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        with pytest.raises(EquidpError, match="A gradient of a gradient was asked for, through an LSTM, GRU or RNN"):
            torch.autograd.grad(once.square().sum() + x.square().sum(), x)


def test_a_forward_that_the_map_of_states_was_given_counts_in_every_step() -> None:
    """As those who make layers coarser, or noisy, put it there: it was asked once, and what it gave was not used."""
    theirs = nn.GRU(4, 6, batch_first=True)
    ours, x = rewritten(copy.deepcopy(theirs)), torch.randn(3, 5, 4)
    first = ours.from_state[0].forward
    ours.from_state[0].forward = lambda state: 2 * first(state)
    with torch.no_grad():
        for name in ("weight_hh_l0", "bias_hh_l0"):
            getattr(theirs, name).mul_(2)
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])


class Scaled(nn.Module):
    """Has no gradient rule, and a recurrence within."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1] * self.scale


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_was_rewritten_goes_into_torchscript(kind: type[nn.RNNBase]) -> None:
    """It cannot hold the recurrence's own function: what was traced could not be saved."""
    reader, room = rewritten(Reader(kind(4, 6, batch_first=True))), io.BytesIO()
    torch.jit.save(torch.jit.trace(reader, torch.randn(3, 5, 4)), room)
    room.seek(0)
    scripted, values = torch.jit.load(room), torch.randn(7, 5, 4)
    torch.testing.assert_close(scripted(values), reader(values))


@pytest.mark.filterwarnings("ignore:Layer .* goes through torch.func")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_within_a_layer_without_a_rule_records_are_taken_one_by_one(
    kind: type[nn.RNNBase], materialise: Callable[..., Tensor]
) -> None:
    torch.manual_seed(4)
    model, x, y = rewritten(Scaled(kind(4, 6, batch_first=True))), torch.randn(3, 5, 4), torch.tensor([0, 1, 2])
    gradients = materialise(model, x, y, CrossEntropy())
    engine = GradientEngine(model, CrossEntropy())
    torch.testing.assert_close(engine.norms(x, y), gradients.norm(dim=1), rtol=1e-5, atol=1e-6)
    weights = torch.tensor([1.0, 0.5, 2.0])
    torch.testing.assert_close(engine.weighted_sum(weights), weights @ gradients, rtol=1e-4, atol=1e-6)


class Beside(nn.Module):
    """A linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_adapter_beside_the_map_of_states_counts_in_every_step(
    kind: type[nn.RNNBase], materialise: Callable[..., Tensor]
) -> None:
    torch.manual_seed(5)
    theirs = kind(4, 6, batch_first=True)
    model = Reader(rewritten(copy.deepcopy(theirs)))
    model.layer.from_state[0] = adapted = Beside(model.layer.from_state[0])
    with torch.no_grad():
        theirs.weight_hh_l0 += adapted.up.weight @ adapted.down.weight
    x, y = torch.randn(3, 5, 4), torch.tensor([0, 1, 2])
    torch.testing.assert_close(model.layer(x)[0], theirs(x)[0])
    gradients = materialise(model, x, y, CrossEntropy())
    torch.testing.assert_close(GradientEngine(model, CrossEntropy()).norms(x, y), gradients.norm(dim=1))


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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.MultiheadAttention])
def test_hooks_stay_where_they_are_and_a_forward_of_its_own_is_refused(kind: type[nn.Module]) -> None:
    """They were lost, and the model computed something else."""
    layer, x, seen = kind(4, 4), torch.randn(3, 5, 4, requires_grad=True), list[str]()
    given = (x,) if kind is nn.LSTM else (x, x, x)
    layer.register_forward_pre_hook(lambda layer, given: tuple(2 * one for one in given))
    hook = layer.register_forward_hook(lambda *_: seen.append("forward"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    expected = layer(*given)[0]
    model = rewritten(nn.Sequential(layer))
    found = model[0](*given)[0]
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    hook.remove()
    model[0](*given)
    assert seen == ["forward", "forward", "backward"]
    layer.forward = lambda *some: some
    with pytest.raises(EquidpError, match=r"Layer '0' .* has a forward of its own, which would be lost"):
        rewritten(nn.Sequential(layer))


def _tied_within(model: Any) -> None:
    model[0].weight_hh_l1 = model[0].weight_hh_l0


def _tied_to_another(model: Any) -> None:
    model[1].weight = model[0].weight_hh_l0


@pytest.mark.parametrize("tie", [_tied_within, _tied_to_another])
def test_weights_that_are_tied_are_not_parted_unseen(tie: Callable[[Any], None]) -> None:
    """The model had more parameters than before, and nothing said so."""
    model = nn.Sequential(nn.RNN(4, 4, 2), nn.Linear(4, 4))
    tie(model)
    with pytest.raises(EquidpError, match=r"Layer '0' \(RNN\) shares weight_hh_l0 with another place of the model"):
        rewritten(model)


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
