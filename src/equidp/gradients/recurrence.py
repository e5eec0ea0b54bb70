"""Recurrence: torch's LSTM, GRU and RNN, made of linear layers that have gradient rules.

A recurrence has two linear maps: one of its inputs, and one of its state before each step. If autograd recorded every
step, a text of 128 words would have 128 calls of the second map, and some twenty small operations around each. Here the
steps are computed without autograd. Then all states are known, and the second map is called once, on the states before
all steps. What follows from both maps is a function with a derivative of its own, which goes back through the steps.
Where something else stands in the place of the second map, such as a linear layer with an adapter, autograd records
every step, and so it does for `torch.jit.trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError

Pair = tuple[Tensor, Tensor]
"""States and cells. Only an LSTM has cells; for the others they are passed on as they are."""

Bend = Callable[[Tensor], Tensor]
"""A nonlinearity."""

Step = Callable[[Tensor, Tensor, Pair], Pair]


class Recurrence(nn.Module):
    """`nn.LSTM`, `nn.GRU` or `nn.RNN` with a layer's weights, for padded batches (no PackedSequence).

    Args:
        layer: whose weights are taken over.
        name: of the layer, for messages.
        linear: makes a linear layer of a weight and a bias.
    """

    def __init__(self, layer: nn.RNNBase, name: str, linear: Callable[[Tensor, Tensor | None], nn.Linear]) -> None:
        super().__init__()
        if layer.proj_size:
            raise EquidpError(f"Layer {name!r} ({type(layer).__name__}): leave proj_size out.")
        self.hidden, self.batch_first, self.dropout = layer.hidden_size, layer.batch_first, layer.dropout
        self.kind = layer.mode
        self.directions = 2 if layer.bidirectional else 1
        ends = [f"l{i}{way}" for i in range(layer.num_layers) for way in ("", "_reverse")[: self.directions]]

        def maps(which: str) -> nn.ModuleList:
            biases = (getattr(layer, f"bias_{which}_{end}") if layer.bias else None for end in ends)
            weights = (getattr(layer, f"weight_{which}_{end}") for end in ends)
            return nn.ModuleList(linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))

        self.from_input, self.from_state = maps("ih"), maps("hh")

    def forward(self, values: Tensor, start: Tensor | Pair | None = None) -> tuple[Tensor, object]:
        """Return the states of all steps `[b, L, directions·h]` (or `[L, b, …]`), and the last ones, as torch's layer.

        Args:
            values: `[b, L, i]`, or `[L, b, i]` if the layer is not `batch_first`.
            start: states `[layers·directions, b, h]`, for an LSTM a pair of states and cells; zeros if None.
        """
        if not isinstance(values, Tensor) or values.dim() != 3:
            raise EquidpError("A recurrence that is trained privately takes batches of sequences, padded, not packed.")
        values = values if self.batch_first else values.transpose(0, 1)
        begin = values.new_zeros(len(self.from_input), values.shape[0], self.hidden)
        states, cells = start if isinstance(start, tuple) else (begin if start is None else start, begin)
        last: list[Pair] = []
        for layer in range(0, len(self.from_input), self.directions):
            if layer:
                values = nn.functional.dropout(values, self.dropout, self.training)
            ways = []
            for way in range(self.directions):
                i = layer + way
                found, cell = self._direction(i, values.flip(1) if way else values, (states[i], cells[i]))
                last.append((found[:, -1], cell))
                ways.append(found.flip(1) if way else found)
            values = torch.cat(ways, 2)
        state, cell = (torch.stack(parts) for parts in zip(*last, strict=True))
        return (values if self.batch_first else values.transpose(0, 1)), (state, cell) if self.kind == "LSTM" else state

    def _direction(self, i: int, values: Tensor, start: Pair) -> Pair:
        """Return states `[b, L, h]` and the last cell `[b, h]` of one direction of one layer."""
        return recur(self.kind, self.from_input[i](values), self.from_state[i], start)


def recur(kind: str, inputs: Tensor, from_state: nn.Module, start: Pair) -> Pair:
    """Return states `[b, L, h]` and the last cell `[b, h]` of a recurrence in one direction.

    Args:
        kind: one of `KINDS`.
        inputs: `[b, L, n·h]`, what the first map gives.
        from_state: the second map, from h to n·h.
        start: state and cell `[b, h]` before the first step.
    """
    steps, function, one_step = KINDS[kind]
    # an adapter, say, stands beside it; or TorchScript, which cannot hold a function with a derivative of its own
    if type(from_state) is not nn.Linear or "forward" in vars(from_state) or torch.jit.is_tracing():
        return _one_by_one(one_step, inputs, from_state, start)
    state, cell = (one.to(inputs.dtype) for one in start)
    weight = from_state.weight.detach().to(inputs.dtype)
    bias = None if from_state.bias is None else from_state.bias.detach().to(inputs.dtype)
    with torch.no_grad():
        states, *kept = steps(inputs.detach(), state.detach(), cell.detach(), weight.t(), bias)
        before = torch.cat([state.detach().unsqueeze(1), states[:, :-1]], 1)
    found: Pair = function.apply(inputs, from_state(before), state, cell, weight, states, *kept)
    return found


Order = tuple[int, int, int, int]
"""Places of the gates write, keep and show, and of the candidate before the last, among the four of an LSTM."""

TORCHS: Order = (0, 1, 2, 3)
KEEP_FIRST: Order = (1, 0, 3, 2)
"""Keep, write, show, candidate."""


def _lstm(
    inputs: Tensor, state: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None, order: Order = TORCHS
) -> list[Tensor]:
    """Return states `[b, L, h]`, gates `[L, b, 4h]`, candidates, cells with the first one, and their tanh, `[L, b, h]`.

    Args:
        inputs: `[b, L, 4h]`, what the first map gives.
        state: `[b, h]`, before the first step.
        cell: `[b, h]`, before the first step.
        weight: `[h, 4h]`, of the second map.
        bias: `[4h]`, of the second map.
        order: of the gates and the candidate.
    """
    kept: list[tuple[Tensor, ...]] = []
    cells = [cell]
    for given in inputs.unbind(1):
        total = _total(given, state, weight, bias)
        gates = total.sigmoid()  # the candidate's is not used
        candidate = total.chunk(4, 1)[order[2]].tanh()
        write, keep, _, show = _sorted(gates.chunk(4, 1), order)
        cell = torch.addcmul(keep * cell, write, candidate)
        shown = cell.tanh()
        state = show * shown
        kept.append((state, gates, candidate, shown))
        cells.append(cell)
    states, *others = zip(*kept, strict=True)
    gates, candidates, shown = map(torch.stack, others)
    return [torch.stack(states, 1), gates, candidates, torch.stack(cells), shown]


class _Lstm(torch.autograd.Function):
    """States `[b, L, h]` and the last cell `[b, h]`, of both maps `[b, L, 4h]` and of the state and cell before."""

    generate_vmap_rule = True
    order = TORCHS

    @staticmethod
    def forward(inputs: Tensor, mapped: Tensor, state: Tensor, cell: Tensor, weight: Tensor, *kept: Tensor) -> Pair:
        return kept[0].clone(), kept[3][-1].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Pair) -> None:
        ctx.save_for_backward(output[1], inputs[4], *inputs[6:])
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx: Any, to_states: Tensor | None, to_cell: Tensor | None) -> tuple[Tensor | None, ...]:
        end, weight, gates, candidates, cells, shown = ctx.saved_tensors
        # What a step multiplies its gradients with is known before the first one, and computed for all steps at once.
        write, keep, _, show = _sorted(gates.chunk(4, 2), cls.order)
        of_show, zeros = _through_gate(shown, show), torch.zeros_like(shown)
        of_gates = _through_gate(candidates, write), _through_gate(cells[:-1], keep), _through_tanh(write, candidates)
        places = sorted(range(4), key=cls.order.__getitem__)
        by_cell = torch.stack([(*of_gates, zeros)[place] for place in places], 2)
        factors = [every.unbind() for every in (_through_tanh(show, shown), by_cell, of_show, keep)]
        to_state, given = _by_step(to_states, zeros[0], len(zeros))
        to_cell, backs = zeros[0] if to_cell is None else to_cell, list[Tensor]()
        for earlier, of_cell, from_cell, from_state, passed in _backwards(given, *factors):
            to_cell = torch.addcmul(to_cell, to_state, of_cell)
            back = to_cell.unsqueeze(1) * from_cell
            back.select(1, cls.order[3]).add_(to_state * from_state)
            backs.append(back.flatten(1))
            to_state, to_cell = torch.addmm(earlier, backs[-1], weight), to_cell * passed
        found = torch.stack(backs[::-1], 1)
        return *_once(end, found, found, to_state, to_cell), None, *[None] * 5


class _KeepFirst(_Lstm):
    """The same with another order of gates."""

    order = KEEP_FIRST


def _sorted(parts: Sequence[Tensor], order: Order) -> tuple[Tensor, ...]:
    return tuple(parts[place] for place in order)


def _gru(inputs: Tensor, state: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Return states `[b, L, h]`, reset and keep `[L, b, 2h]`, candidates, and the second map's part, `[L, b, h]`.

    Arguments as of `_lstm`, with 3h in place of 4h; the cell is not used.
    """
    kept: list[tuple[Tensor, ...]] = []
    gated = 2 * state.shape[1]
    for given in inputs.unbind(1):
        mapped = state @ weight if bias is None else torch.addmm(bias, state, weight)
        gates = (given[:, :gated] + mapped[:, :gated]).sigmoid()
        reset, keep = gates.chunk(2, 1)
        part = mapped[:, gated:]
        candidate = torch.addcmul(given[:, gated:], reset, part).tanh()
        state = torch.lerp(candidate, state, keep)
        kept.append((state, gates, candidate, part))
    states, *others = zip(*kept, strict=True)
    return [torch.stack(states, 1), *map(torch.stack, others)]


class _Gru(torch.autograd.Function):
    """States `[b, L, h]` and the cell as it was, of both maps `[b, L, 3h]` and of the state before."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs: Tensor, mapped: Tensor, state: Tensor, cell: Tensor, weight: Tensor, *kept: Tensor) -> Pair:
        return kept[0].clone(), cell.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Pair) -> None:
        ctx.save_for_backward(output[1], inputs[2], *inputs[4:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, to_states: Tensor | None, to_cell: Tensor | None) -> tuple[Tensor | None, ...]:
        end, state, weight, states, gates, candidates, part = ctx.saved_tensors
        reset, keep = gates.chunk(2, 2)
        before = torch.stack([state, *states.unbind(1)[:-1]])
        of_candidate = _through_tanh(1 - keep, candidates)
        of_keep = _through_gate(before - candidates, keep)
        of_reset = _through_gate(of_candidate * part, reset)
        factors = torch.stack([of_reset, of_keep, of_candidate * reset], 2).unbind()
        to_state, given = _by_step(to_states, torch.zeros_like(state), len(factors))
        to_all, backs = list[Tensor](), list[Tensor]()
        for earlier, factor, passed in _backwards(given, factors, keep.unbind()):
            back = (to_state.unsqueeze(1) * factor).flatten(1)
            to_all.append(to_state)
            to_state = torch.addmm(torch.addcmul(earlier, to_state, passed), back, weight)
            backs.append(back)
        found, of_all = torch.stack(backs[::-1], 1), torch.stack(to_all[::-1])
        inward = torch.cat([found[..., : gates.shape[2]], (of_all * of_candidate).transpose(0, 1)], 2)
        return *_once(end, inward, found, to_state, to_cell), None, *[None] * 4


def _rnn(
    inputs: Tensor, state: Tensor, cell: Tensor, weight: Tensor, bias: Tensor | None, bend: Bend = torch.tanh
) -> list[Tensor]:
    """Return states `[b, L, h]`. Arguments as of `_lstm`, with h in place of 4h; the cell is not used."""
    states = list[Tensor]()
    for given in inputs.unbind(1):
        state = bend(_total(given, state, weight, bias))
        states.append(state)
    return [torch.stack(states, 1)]


class _Rnn(torch.autograd.Function):
    """States `[b, L, h]` and the cell as it was, of both maps `[b, L, h]` and of the state before."""

    generate_vmap_rule = True

    @staticmethod
    def through(back: Tensor, state: Tensor) -> Tensor:
        """Return the gradient before the nonlinearity, from the one behind it and from the state."""
        return _through_tanh(back, state)

    @staticmethod
    def forward(inputs: Tensor, mapped: Tensor, state: Tensor, cell: Tensor, weight: Tensor, states: Tensor) -> Pair:
        return states.clone(), cell.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Pair) -> None:
        ctx.save_for_backward(output[1], *inputs[4:])
        ctx.set_materialize_grads(False)

    @classmethod
    def backward(cls, ctx: Any, to_states: Tensor | None, to_cell: Tensor | None) -> tuple[Tensor | None, ...]:
        end, weight, states = ctx.saved_tensors
        each = states.unbind(1)
        to_state, given = _by_step(to_states, torch.zeros_like(each[0]), len(each))
        backs = list[Tensor]()
        for earlier, state in _backwards(given, each):
            backs.append(cls.through(to_state, state))
            to_state = torch.addmm(earlier, backs[-1], weight)
        found = torch.stack(backs[::-1], 1)
        return *_once(end, found, found, to_state, to_cell), None, None


class _ReluRnn(_Rnn):
    """The same with ReLU in place of tanh."""

    @staticmethod
    def through(back: Tensor, state: Tensor) -> Tensor:
        """As of `_Rnn`."""
        return back * (state > 0)


class _Once(torch.autograd.Function):
    """A gradient as it is, and no gradient of it: how it follows from the steps is not recorded.

    `end` is an output of the function whose backward computed the gradient. So whoever goes on to what the function was
    given comes through here first.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(back: Tensor, end: Tensor) -> Tensor:
        return back.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> NoReturn:
        raise EquidpError(
            "A gradient of a gradient was asked for, through an LSTM, GRU or RNN that was rewritten for private "
            "training, and it has first derivatives alone: leave create_graph=True out, as of a penalty on gradients, "
            "or copy the trained weights into torch's own layer."
        )


def _once(end: Tensor, *backs: Tensor | None) -> Sequence[Tensor | None]:
    """Return the gradients; if autograd records them, none can be taken of these."""
    if not torch.is_grad_enabled():
        return backs
    return [None if back is None else _Once.apply(back, end) for back in backs]


def _total(given: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Add up what both maps give for a step."""
    # not in place: within torch.vmap the state before the first step may be one for all, and what is given is not
    return torch.addmm(given, state, weight) if bias is None else torch.addmm(bias, state, weight) + given


def _backwards(*of_steps: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Return what belongs to each step, from the last step to the first."""
    return zip(*map(reversed, of_steps), strict=True)


def _by_step(to_states: Tensor | None, zero: Tensor, steps: int) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the gradient `[b, h]` that arrives at the last state, and those at the states before each step.

    Where no state is used, `to_states` is None, and all are `zero`. So is the one before the first step, as the state
    that begins is no output.
    """
    given = [zero] * steps if to_states is None else to_states.unbind(1)
    return given[-1], [zero, *given[:-1]]


_through_gate, _through_tanh = torch.ops.aten.sigmoid_backward.default, torch.ops.aten.tanh_backward.default
"""The gradient at the input of σ or tanh, from the one at its output and from the output."""


def _one_by_one(step: Step, inputs: Tensor, from_state: nn.Module, at: Pair) -> Pair:
    """Return states `[b, L, h]` and the last cell `[b, h]`, with autograd along every step."""
    states = list[Tensor]()
    for given in inputs.unbind(1):
        at = step(given, from_state(at[0]), at)
        states.append(at[0])
    return torch.stack(states, 1), at[1]


def _lstm_step(inputs: Tensor, before: Tensor, at: Pair, order: Order = TORCHS) -> Pair:
    write, keep, candidate, show = _sorted((inputs + before).chunk(4, 1), order)
    cell = keep.sigmoid() * at[1] + write.sigmoid() * candidate.tanh()
    return show.sigmoid() * cell.tanh(), cell


def _gru_step(inputs: Tensor, before: Tensor, at: Pair) -> Pair:
    (reset, keep, candidate), (reset_, keep_, candidate_) = inputs.chunk(3, 1), before.chunk(3, 1)
    new = (candidate + (reset + reset_).sigmoid() * candidate_).tanh()
    kept = (keep + keep_).sigmoid()
    return (1 - kept) * new + kept * at[0], at[1]


class Kind(NamedTuple):
    """A kind of recurrence.

    Attributes:
        steps: computes all steps without autograd; the states `[b, L, h]`, and what the derivative needs.
        function: has their derivative.
        one_step: state and cell after a step, from what both maps give and from those before it.
    """

    steps: Callable[..., list[Tensor]]
    function: type[torch.autograd.Function]
    one_step: Step


KINDS: Mapping[str, Kind] = {
    "LSTM": Kind(_lstm, _Lstm, _lstm_step),
    "LSTM, keep first": Kind(partial(_lstm, order=KEEP_FIRST), _KeepFirst, partial(_lstm_step, order=KEEP_FIRST)),
    "GRU": Kind(_gru, _Gru, _gru_step),
    "RNN_TANH": Kind(_rnn, _Rnn, lambda inputs, before, at: ((inputs + before).tanh(), at[1])),
    "RNN_RELU": Kind(
        partial(_rnn, bend=torch.relu), _ReluRnn, lambda inputs, before, at: ((inputs + before).relu(), at[1])
    ),
}
"""By torch's name; "LSTM, keep first" has another order of gates."""
