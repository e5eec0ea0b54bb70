"""A pretended GPU: its tensors say `cuda:0`, calculate on the CPU, and refuse what a GPU's would refuse.

An operation on tensors of both devices is an error, and so are numpy's look at the device's memory and numbers drawn by
the other device's generator. What there is not: a GPU's kernels, hence neither its speed nor its rounding, autocast,
`torch.func`, and inference mode, in which torch cannot give such tensors views (`no_grad` stands in). Unlike the meta
device (`test_devices.py`) it has numbers: whole runs can be compared with the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from equidp.gradients import fused
from equidp.mechanism.noise import HOST, RandomSource, SeededRandom, derived_seed
from equidp.mechanism.parts import sampler
from equidp.mechanism.poisson import sample_on_host

GPU = torch.device("cuda", 0)
MEMORY = 16 << 30
"""Bytes that it says it has, all of them free."""

COPIES = torch.ops.aten.copy_.default
CONVERSION = torch.ops.aten._to_copy.default
INDEXING = ("index", "index_put", "index_put_")
"""Their indices may lie on the CPU."""

WAITING = (
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
    "equal", "repeat_interleave", "is_nonzero",
)  # fmt: skip
"""What they give has a size, or is a number, that the host has to know."""

MAKING = (
    torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.tensor,
    torch.randint, torch.randperm, torch.scalar_tensor, torch.as_tensor,
)  # fmt: skip
DRAWING = (torch.Tensor.random_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_)


def on_gpu(device: Any) -> bool:
    # "meta" is what C++ takes our tensors for
    return device is not None and torch.device(device).type in ("cuda", "meta")


WATCHED: list[bool] = []
"""Not empty while nothing may wait for the device."""


CAPTURED: list[bool] = []
"""Not empty while a graph is captured."""


class BringsError(RuntimeError):
    """An operation that a CUDA graph cannot hold: torch's, too, is a RuntimeError."""


class WaitsError(AssertionError):
    """An operation would have waited for the device."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Within, what asks the device for a value or a size is an error: `item`, `cpu`, `nonzero`, an index of bools."""
    WATCHED.append(True)
    try:
        yield
    finally:
        WATCHED.pop()


@contextmanager
def captured() -> Iterator[None]:
    """Within, as while a CUDA graph is captured: nothing waits, and nothing is brought from the host's memory."""
    CAPTURED.append(True)
    try:
        with nothing_waits():
            yield
    finally:
        CAPTURED.pop()


def _refuse_bringing(what: Any) -> None:
    if CAPTURED:
        raise BringsError(f"{what} copies from the host: operation not permitted when stream is capturing")


def _refuse_waiting(func: Any, args: Any, kwargs: Any) -> None:
    name = func.overloadpacket.__name__
    there = args and isinstance(args[0], OnGpu)
    leaves = func is CONVERSION and there and not on_gpu(kwargs.get("device", GPU))
    home = func is COPIES and isinstance(args[1], OnGpu) and not there
    mask = name in INDEXING and any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in WAITING or leaves or home or mask:
        raise WaitsError(f"{func} waits for the device")


class OnGpu(Tensor):
    """A tensor on the pretended GPU; its numbers are in `numbers`, on the CPU."""

    numbers: Tensor
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype,
            layout=numbers.layout, device=torch.device("meta"),
        )  # fmt: skip
        made.numbers = numbers
        return made

    def numpy(self, **given: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        if WATCHED:
            raise WaitsError("tolist")
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args[0:1] + args[2:] if func.overloadpacket.__name__ in INDEXING else (args, kwargs)
        device = kwargs.get("device", GPU)
        if WATCHED:
            _refuse_waiting(func, args, kwargs)
        indices = args[1] if func.overloadpacket.__name__ in INDEXING else ()
        if any(isinstance(i, Tensor) and not isinstance(i, OnGpu) for i in indices):
            _refuse_bringing(f"{func}, by an index on the host,")
        if func is COPIES:
            if not isinstance(args[1], OnGpu):
                _refuse_bringing(func)
            numbers(args[0]).copy_(numbers(args[1]))
            return args[0]
        if func is CONVERSION:
            copy = func(numbers(args[0]), **{k: v for k, v in kwargs.items() if k not in ("device", "non_blocking")})
            return OnGpu(copy) if on_gpu(device) else copy
        for tensor in pytree.tree_leaves(given):
            if isinstance(tensor, Tensor) and not isinstance(tensor, OnGpu) and tensor.dim():
                raise RuntimeError(f"Expected all tensors to be on the same device: {func}, {tuple(tensor.shape)}")
        plain = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
        found = func(*pytree.tree_map(numbers, args), **pytree.tree_map(numbers, plain))
        if on_gpu(device):
            found = pytree.tree_map_only(Tensor, OnGpu, found)
        return return_and_correct_aliasing(func, args, kwargs, found)


def numbers(value: Any) -> Any:
    """A tensor's numbers on the CPU; anything else as it is."""
    return value.numbers if isinstance(value, OnGpu) else value


class _Pretending(TorchFunctionMode):
    """What does not reach `OnGpu` by itself: making tensors there, and bringing the CPU's there."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in MAKING and "pin_memory" in kwargs:
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if func in MAKING or func in DRAWING:
            there = isinstance(first, OnGpu) if func in DRAWING else on_gpu(kwargs.get("device"))
            _refuse_generator(kwargs.get("generator"), there)
            if there and func in MAKING:
                if func in (torch.tensor, torch.as_tensor):
                    _refuse_bringing(func)
                return _unwatched(lambda: OnGpu(func(*map(numbers, args), **{**kwargs, "device": "cpu"})))
        if func is Tensor.to and not isinstance(first, OnGpu) and any(map(_names_gpu, (*args[1:], *kwargs.values()))):
            _refuse_bringing(func)
            kinds = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
            assert first is not None
            assert not (first.requires_grad and torch.is_grad_enabled()), "no gradient leads back to the CPU here"
            return _unwatched(lambda: OnGpu(first.detach().to(*kinds, copy=True)).requires_grad_(first.requires_grad))
        if func is Tensor.pin_memory:
            return first
        # torch makes tensors of its own from numbers and lists, and would make them on the meta device
        if func is torch.where and isinstance(args[1], OnGpu) and not isinstance(args[2], Tensor):
            args = (*args[:2], _unwatched(lambda: OnGpu(torch.tensor(args[2], dtype=args[1].dtype))))
        if func is Tensor.__getitem__ and isinstance(first, OnGpu) and isinstance(args[1], list):
            args = (first, torch.tensor(args[1]))
        if func is torch.nn.functional.cosine_similarity and isinstance(first, OnGpu):
            assert isinstance(args[1], OnGpu)
            return _unwatched(lambda: OnGpu(func(*map(numbers, args), **kwargs)))
        return func(*args, **kwargs)


def _unwatched(make: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunction():
        return make()


def _names_gpu(value: Any) -> bool:
    return isinstance(value, OnGpu) or (isinstance(value, str | torch.device) and on_gpu(value))


class _Generator(torch.Generator):
    """Draws on the CPU, for tensors of the device it was made for."""

    there: bool

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, device="cpu")
        made.there = on_gpu(device)
        return made


def _refuse_generator(generator: Any, there: bool) -> None:
    if generator is not None and getattr(generator, "there", False) != there:
        raise RuntimeError("Expected a generator of the tensor's own device")


def _no_grad(mode: bool) -> torch.no_grad:
    assert mode
    return torch.no_grad()


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Within, a run on the CPU has the batches that it would have on a GPU, where the host draws them by counts."""

    begin = SeededRandom.__init__

    def with_host(self: SeededRandom, seed: int, device: torch.device | str) -> None:
        begin(self, seed, device)
        self._generators.setdefault(HOST, torch.Generator().manual_seed(derived_seed(seed, HOST)))

    def sample(random: RandomSource, probability: float, size: int, device: torch.device) -> Tensor:
        return sample_on_host(random, probability, size)

    with mock.patch.object(sampler, "poisson_sample", sample), mock.patch.object(SeededRandom, "__init__", with_host):
        yield


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within, this thread has a GPU."""
    own = torch.Generator()  # what its layers would draw from
    patched = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device=None: "pretended",
        "get_device_properties": lambda device=None: SimpleNamespace(name="pretended", total_memory=MEMORY),
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "get_rng_state": lambda device="cuda": own.get_state(),
        "set_rng_state": lambda state, device="cuda": own.set_state(state),
        "manual_seed": own.manual_seed,
        "_lazy_init": lambda: None,
    }
    with (
        mock.patch.multiple(torch.cuda, **patched),
        mock.patch.object(torch.backends.cudnn, "version", return_value=0),
        mock.patch.object(torch, "Generator", _Generator),
        mock.patch.object(fused, "kernels_for", return_value=None),  # Triton sees through it
        mock.patch.object(torch._C, "_InferenceMode", _no_grad),
        torch.autograd.set_multithreading_enabled(False),
        _Pretending(),
    ):
        yield


class Replaying(TorchDispatchMode):
    """A recorder: the operations of one call, done again on the very same tensors, as a CUDA graph does.

    No code of the recorded function runs again: a number that it took from the host stays what it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def record(self, work: Callable[[], Tensor], generators: Any = ()) -> Callable[[], Tensor]:
        work()  # warm
        kept = Replaying()
        with kept, captured():
            result = work()
        done = self.kept(kept.done)

        @torch.no_grad()
        def again() -> Tensor:
            for func, args, kwargs, found in done:
                for old, new in zip(pytree.tree_leaves(found), pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.view(new.shape).copy_(new)  # torch may have taken a dimension away since
            return result

        return again

    def kept(self, done: list[tuple[Any, Any, Any, Any]]) -> list[tuple[Any, Any, Any, Any]]:
        """What of it is done again: all."""
        return done

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        name = func.overloadpacket.__name__
        if not views and "empty" not in name and name not in ("squeeze_", "unsqueeze_", "detach_"):
            args = pytree.tree_map_only(
                nn.Parameter, lambda one: one.data, args
            )  # where it lies now, as a graph has it
            self.done.append((func, args, kwargs or {}, found))
        return found
