"""Refusals: models without per-record gradients, and layers that mix records or learn from them unseen."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.precision import refuse_half
from equidp.gradients.used import by_others, used_by

T = TypeVar("T")

SHOWN = 5
"""A message lists at most so many names."""

BATCH_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d),
)

HOOKED = tuple(name for name in vars(nn.Module()) if "hook" in name and "state" not in name)
"""Attributes in which torch keeps what was hooked to a module, except for hooks of its state."""

HOOKS = tuple(name for name in HOOKED if isinstance(vars(nn.Module())[name], OrderedDict))
"""Those of them that hold the hooks themselves."""

OF_ALL = tuple(of for of in vars(nn.modules.module).values() if isinstance(of, OrderedDict))
"""Where torch keeps the hooks that every module has."""

SWITCHES = frozenset({bool, str, FunctionType, MethodType, BuiltinFunctionType})
"""Types of attributes that switch what a layer of others computes. Numbers may follow the steps, and looks see them."""


def refuse_unfit(model: nn.Module) -> None:
    """Refuse, by name, trainable parameters that a flat float32 vector cannot hold."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.UninitializedParameter):
            raise EquidpError(f"Parameter {name!r} has no shape before the first batch; give its layer all its sizes.")
        if parameter.dtype != torch.float32:
            raise EquidpError(
                f"Parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, and gradients are summed and "
                "noised in float32: make every trainable parameter one of that type (model.float() does); for cheaper "
                "passes there is training.precision=bf16."
            )


def refuse_mixing(model: nn.Module) -> None:
    """Refuse, by name, every layer in which one record can reach another's output."""
    for name, layer in model.named_modules():
        if isinstance(layer, BATCH_NORMS):
            refuse_batch_statistics([(name, layer)])
            continue
        if isinstance(layer, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise EquidpError(
                f"Layer {name or 'model'!r} is a {type(layer).__name__}, which exchanges gradients that are not taken "
                "here: every process would train a model of its own, and of one seed with the same noise. Give its "
                "`module`; several devices are for train_model (training.devices)."
            )
        if type(layer).__module__.partition(".")[0] == "opacus":
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) is one of Opacus's, whose hooks take gradients "
                "their way: give the model without GradSampleModule, and torch's own nn.LSTM, nn.GRU, nn.RNN and "
                "nn.MultiheadAttention, which make_private rewrites."
            )
        if isinstance(layer, torch.jit.ScriptModule):
            raise EquidpError(
                f"Layer {name or 'model'!r} is TorchScript, which does not show its layers; give the model before "
                "torch.jit.script, or torch.jit.trace, and script what was trained."
            )
        if getattr(layer, "sparse", False) is True and any(p.requires_grad for p in layer.parameters()):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) has sparse gradients, and noise is added to all "
                "of them; switch sparse off."
            )
        if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm is not None):
            raise EquidpError(
                f"Layer {name!r}: an Embedding with scale_grad_by_freq or max_norm mixes records; switch both off."
            )
        trained = any(p.requires_grad for p in layer.parameters())
        if trained and isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) cannot be trained privately, as torch does not "
                "show what happens inside; give rewritten(model) of equidp.gradients.rewriting, or write it from "
                "Linear layers."
            )
        if trained and getattr(layer, "track_running_stats", False):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) keeps statistics of the records, which would "
                "leave with the model, without noise; switch track_running_stats off."
            )


def refuse_batch_statistics(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse, by name, a BatchNorm that uses the batch's statistics: in training mode, or without any of its own."""
    for name, layer in layers:
        if layer.training or layer.running_mean is None:
            raise EquidpError(
                f"Layer {name!r} is a BatchNorm that takes the batch's statistics, which mixes records; use GroupNorm, "
                "or freeze it, with the running statistics it has, by eval() before training."
            )


class Trained:
    """Remembers the layers and the trained parameters of a model, and refuses a model in which they were replaced.

    A layer that is put in later was never tried: for example, the exact statistics of a BatchNorm would leave with the
    model. A parameter that takes the place of a trained one would not be trained, although the updates are paid for.
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        refuse_unfit(model)  # some parameters have no shape to remember
        self._model, self._layers = model, tuple(model.modules())
        self._called = (*self._layers, *layers_of(loss))
        self._theirs = tuple(filter(by_others, self._called))
        every: list[tuple[str, nn.Module, str, nn.Parameter]] = [
            (f"{path}.{key}" if path else key, layer, key, value)
            for path, layer in model.named_modules()
            for key, value in layer.named_parameters(recurse=False)
        ]
        self._parameters = [(*of, of[3].shape) for of in every if of[3].requires_grad]
        self._frozen = [of[:3] for of in every if not of[3].requires_grad]

    def beside(self) -> tuple[object, ...]:
        """Return what decides, beside tensors and numbers, what the layers and those of the loss compute.

        These are hooks, classes with their `forward`, a `forward` of a layer's own, and switches of layers of others.
        Any of them may mix records, or compute in half precision, as the `forward` that accelerate's `prepare` puts
        there. A switch may be that of mixup, which begins after some steps.
        """
        found: list[object] = [*chain.from_iterable(of.values() for of in OF_ALL)]
        for layer in self._called:
            own, kind = vars(layer), type(layer)
            found += (kind, kind.forward, own.get("forward"))
            for name in HOOKS:  # another dict may take the place of a layer's
                if hooks := own.get(name):
                    found += hooks.values()
        for layer in self._theirs:
            found += (one for one in vars(layer).items() if type(one[1]) in SWITCHES and one[0] != "training")
        return tuple(found)

    def layers(self) -> tuple[nn.Module, ...]:
        """Return the model's layers.

        Raises:
            EquidpError: a layer or a trained parameter was replaced; a trained parameter is not float32, has another
                shape, or requires gradients; a frozen one does, or is in half precision on a CPU. The message names it.
        """
        layers = tuple(self._model.modules())
        if len(layers) != len(self._layers) or not all(map(operator.is_, layers, self._layers)):
            known = set(map(id, self._layers))
            new = [name for name, layer in self._model.named_modules() if id(layer) not in known]
            raise EquidpError(
                f"The model's layers are others than when it was made private ({', '.join(new[:SHOWN]) or 'fewer'}): "
                "nobody has tried whether records meet in them, and they are not trained. Change the model first, or "
                "make another trainer of it; what leaves then has cost the ε of both."
            )
        for name, layer, key, value, shape in self._parameters:
            if getattr(layer, key, None) is not value:
                raise EquidpError(
                    f"Another parameter is in the place of {name!r}, and it would not be trained: copy values into the "
                    "one that is there (load_state_dict without assign=True; `with torch.no_grad(): p.copy_(…)`)."
                )
            if value.dtype is not torch.float32:
                raise EquidpError(
                    f"Parameter {name!r} has become {str(value.dtype).removeprefix('torch.')}, and gradients are "
                    "summed and noised in float32: leave half() and double() until the training is over."
                )
            if value.shape != shape:
                raise EquidpError(
                    f"Parameter {name!r} has become {list(value.shape)} and was {list(shape)} when the model was made "
                    "private: change shapes first (resize_token_embeddings, say), or make another trainer of the "
                    "model; what leaves then has cost the ε of both."
                )
        for name, layer, key in self._frozen:
            now: Tensor | None = getattr(layer, key, None)
            if now is None:
                continue
            refuse_half(name, now)
            if now.requires_grad:
                raise EquidpError(
                    f"Parameter {name!r} was frozen when the model was made private, and asks to be trained by now, "
                    "which it would not be: freeze it again (requires_grad_(False)), or make another trainer of the "
                    "model; what leaves then has cost the ε of both."
                )
        again = next((name for name, _, _, value, _ in self._parameters if value.requires_grad), None)
        if again is not None:
            raise EquidpError(
                f"Parameter {again!r} requires gradients of autograd again, and its private ones are taken another "
                "way: those of a backward() of your own have neither bound nor noise. Switch it off "
                "(requires_grad_(False)), and make the model anew if it has taken steps by these."
            )
        return layers


def refuse_trained_loss(model: nn.Module, loss: object) -> None:
    """Refuse a loss with trainable parameters, because only those of the model are trained."""
    models = set(map(id, model.parameters()))
    layers = layers_of(loss)
    own = [
        name
        for layer in layers
        for name, value in layer.named_parameters()
        if value.requires_grad and id(value) not in models
    ]
    if own:
        raise EquidpError(
            f"The loss has parameters of its own ({', '.join(own[:SHOWN])}), and only the model's are trained: let the "
            "model hold them and give what they make as outputs, or freeze them by requires_grad_(False)."
        )


def layers_of(loss: object) -> list[nn.Module]:
    """Return the modules that a loss uses, and the loss itself if it is one."""
    return [one for one in used_by(loss) if isinstance(one, nn.Module)]


START = torch.zeros((), requires_grad=True)


class Untrained:
    """Watches buffers and frozen parameters of a model and its loss: no pass may change them.

    They are released with the model, so what a pass writes there would be released without noise. What a loss writes
    into its own, such as counts of classes, would reach the gradients of other records. Every pass is watched, because
    a model may begin to write later than any trial.
    """

    def __init__(self, model: nn.Module, loss: object = None) -> None:
        self._held: list[tuple[str, nn.Module, str]] = []
        learn = chain.from_iterable(layer.named_modules(prefix="loss") for layer in layers_of(loss))
        for path, layer in (*model.named_modules(), *learn):
            frozen = [key for key, value in layer.named_parameters(recurse=False) if not value.requires_grad]
            keys = [*frozen, *(key for key, _ in layer.named_buffers(recurse=False))]
            self._held += [(f"{path}.{key}" if path else key, layer, key) for key in keys]
        norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BATCH_NORMS)]
        self._batches = [(name, layer, _batches_of(layer)) for name, layer in norms]
        self._before: list[Tensor | None] = []
        self._kept: Tensor | None = None  # see `_kept_together`; kept from pass to pass, ten times as fast as anew

    def watched(self, passes: Callable[[], T]) -> T:
        """Return what the model's `passes` return.

        Raises:
            EquidpError: the numbers of a watched tensor changed. Another tensor with the same numbers is no change.
                Also if a BatchNorm has counted batches between the passes.
        """
        before = self._now()
        # between passes the owner of the model may change it
        if _changed(self._kept) or list(map(id, before)) != list(map(id, self._before)):
            self._refuse_counted()
            self._before, self._kept = before, _kept_together(before)
            if self._kept is not None:
                _refuse_unwatched()
        found = passes()
        self._refuse_replaced(before)
        if _changed(self._kept):  # autograd does not say which of them, so the passes are made once more
            before = self._now()
            alone = [_kept_together([value]) for value in before]
            passes()
            self._refuse_replaced(before)
            again = [one for one, kept in zip(self._held, alone, strict=True) if _changed(kept)]
            raise changed([name for name, _, _ in again[:1] or self._held])
        return found

    def _refuse_counted(self) -> None:
        for name, layer, batches in self._batches:
            if _batches_of(layer) != batches:
                raise EquidpError(
                    f"BatchNorm {name!r} has counted batches since the model was made private, or a state with another "
                    "count was loaded: a pass of your own in training mode puts the exact statistics of its records "
                    "there. Make the model anew, load public weights before that (also where a run is continued), and "
                    "keep its BatchNorms in eval(): model.eval() before such a pass, and trainer.engine.train() after "
                    "it."
                )

    def _now(self) -> list[Tensor | None]:
        return [getattr(layer, key, None) for _, layer, key in self._held]

    def _refuse_replaced(self, before: list[Tensor | None]) -> None:
        for (name, _, _), old, new in zip(self._held, before, self._now(), strict=True):
            if old is not new and (old is None or new is None or not same(old, new)):
                raise changed([name])


def _batches_of(layer: nn.Module) -> int:
    counted = getattr(layer, "num_batches_tracked", None)
    return 0 if counted is None or counted.is_meta else int(counted)


def _kept_together(values: list[Tensor | None]) -> Tensor | None:
    known = [value.detach() for value in values if value is not None and not value.is_inference()]
    with torch.enable_grad():
        return _Kept.apply(START, *known) if known else None


def _refuse_unwatched() -> None:
    """Refuse hooks by which autograd saves something else than the tensors, so that it does not see them change."""
    tried = torch.zeros(())
    kept = _kept_together([tried])
    tried.add_(1)
    if not _changed(kept):
        raise EquidpError(
            "Inside torch.autograd.graph.save_on_cpu, or saved_tensors_hooks, nobody sees what a model keeps of the "
            "records: leave it out; a smaller physical_batch_size takes less memory."
        )


def _changed(kept: Any) -> bool:
    """Whether one of the tensors given to `_kept_together` was changed in place since."""
    try:
        _ = None if kept is None else kept.grad_fn.saved_tensors
    except RuntimeError:
        return True
    return False


class _Kept(torch.autograd.Function):
    """Saves tensors as for a backward pass: asked for them, autograd raises an error if one was changed in place."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return start.view_as(start)


def same(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors hold the same numbers; NaN equals NaN."""
    # the fast comparison first: most often they are equal, and a frozen table of words is large
    return torch.equal(old, new) or (torch.equal(old.isnan(), new.isnan()) and torch.equal(_plain(old), _plain(new)))


def _plain(values: Tensor) -> Tensor:
    numbers = values.is_floating_point() or values.is_complex()
    return values.nan_to_num(posinf=torch.inf, neginf=-torch.inf) if numbers else values


def changed(names: Sequence[str], *, anew: bool = False) -> EquidpError:
    """Return the error for a forward pass that changes one of these tensors; `anew`: the tensor got another shape."""
    some = ", ".join(map(repr, names[:SHOWN])) + (", …" if len(names) > SHOWN else "")
    what = some if len(names) == 1 else f"one of {some}"
    return EquidpError(
        f"Buffer or parameter {what} of the model or its loss changes in a forward pass: what it learns of the records "
        "would leave with the model, without noise; switch off what changes it (running statistics, max_norm), in a "
        "model and a loss that are made anew, as these have learnt by now."
        + (" What follows from sizes alone is set beforehand: model(torch.zeros(1, …))." if anew else "")
    )
