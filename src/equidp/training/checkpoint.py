"""Checkpoints: a training run that is killed at any moment can continue, and owes for everything it may have shown.

A checkpoint is one safetensors file: tensors as such, everything else as JSON in its metadata, with a digest over both.
It is written under another name, made durable, and then renamed over the old one, so that at every moment one whole
checkpoint is there. Nothing is ever unpickled. The digest finds damage and careless edits. Whoever can write the folder
can forge a checkpoint, so protect the folder like the data.

The file is as private as the run: it holds the model after *some* step (covered by the ledger), but also the state of
seeded generators, which predicts the noise. Keep it until the run has finished, and do not publish it.

`journal` says what a resumed run is charged.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.errors import EquidpError
from equidp.gradients import fused
from equidp.mechanism.device import driver_version
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.trainer import EpochCallback
from equidp.system.files import unfinished_of, write_private
from equidp.system.interrupts import handling
from equidp.system.threads import alone
from equidp.system.workplace import CHECKPOINT_FILE, JOURNAL_FILE
from equidp.training.journal import BLOCK, Journal, JournaledLedger, refuse_other_settings

FORMAT = "equidp checkpoint 1"

CPUINFO = Path("/proc/cpuinfo")
PROCESSOR_FACTS = {"vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags"} | {
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"
}  # fmt: skip
"""Names that Linux gives, on x86 and on ARM, to facts of a processor that are the same for all cores at all times."""

KERNEL_SETTINGS = ("ATEN_", "BLIS_", "CUBLAS_", "CUDNN_", "DISABLE_ADDMM_", "DNNL_", "GLIBC_TUNABLES", "KMP_", "MKL_",
                   "NPY_", "NVIDIA_TF32", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TORCH_", "VECLIB_")  # fmt: skip
"""Beginnings of the environment variables by which libraries choose their kernels, and the C library its functions."""

Row = dict[str, float]


class Resumable(Protocol):
    """A trainer that can be saved: its state is all that its next step depends on, in tensors and plain values."""

    plan: Plan
    steps_done: int

    def state_dict(self) -> dict[str, Any]:
        """The state; nested dicts, lists and tuples of tensors, numbers, strings, booleans and None."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""

    def train(
        self, on_epoch: EpochCallback | None = None, *, on_step: Callable[[], None] | None = None, progress: bool = True
    ) -> list[Row]:
        """Run the remaining epochs."""


class StoppedError(EquidpError):
    """Training was asked to stop, and left a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum  # type: ignore[misc]


@dataclass(frozen=True)
class Saved:
    """A checkpoint as read from disk.

    Attributes:
        state: the trainer's.
        history: rows of the finished epochs.
        done: events of the steps done.
        ahead: events charged for steps that were still to be repeated.
        journal_lines: how many lines the journal had.
        life: what the random numbers and the rounding of the process depended on (`life_of`).
    """

    state: dict[str, Any]
    history: list[Row]
    done: tuple[Event, ...]
    ahead: tuple[Event, ...]
    journal_lines: int
    life: str


class Checkpointer:
    """Keeps one training run in a folder: its checkpoint and its journal.

        keeper = Checkpointer(folder, settings, resume=True, every_epochs=5)
        trainer = Trainer(…, random=random, ledger=keeper.ledger(random))
        history = keeper.train(trainer, on_epoch)
        keeper.close()

    Args:
        folder: a folder for this run alone.
        settings: everything that the run depends on; a checkpoint of other settings is refused.
        resume: continue what is in the folder; otherwise start a new run, whose ledger starts empty.
        every_epochs: how often to save; None: only when asked to stop by Ctrl-C or SIGTERM.
        block: steps charged ahead, see `journal`.
        code: names the code that trains: steps done again by other code are new releases.
        repeating: whether the same code rounds a step done again as before; if not, it is a new release too.

    Raises:
        EquidpError: for a checkpoint that is damaged or of other settings, or a folder that cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        every_epochs: int | None = None,
        block: int = BLOCK,
        code: str = "",
        repeating: bool = True,
    ) -> None:
        self.path = folder / CHECKPOINT_FILE
        self.settings = json.loads(json.dumps(settings, sort_keys=True, default=str))
        self.every_epochs = every_epochs
        self._code, self._repeating = code, repeating
        # the journal first: it locks the folder against a second run
        self._journal = Journal(folder / JOURNAL_FILE, self.settings, fresh=not resume, block=block, code=code)
        try:
            self.saved = self._open(resume)
        except BaseException:
            self.close()
            raise
        self.found = self.saved is not None or self._journal.lives > 0
        """Whether the folder held a run to go on with."""
        self.abandoned = self._journal.abandoned
        """Where the journal of an older run in the folder was put, if this run does not go on with it; else None."""
        self._ledger: Ledger | None = None
        self._life = ""
        self.renewed = 0
        """The number of this life, if steps done again are charged again and drawn from its own streams; else 0."""
        self._history: list[Row] = [] if self.saved is None else list(self.saved.history)
        self._signal: int | None = None

    def ledger(self, random: RandomSource, others: Sequence[str] = ()) -> JournaledLedger:
        """The ledger to train with: it holds everything owed so far, and writes what comes to the journal.

        Args:
            random: the streams that the run will draw from; they tell whether repeated steps are new releases.
            others: `life_of` of the other processes that train with this one.
        """
        self._life = ", ".join(filter(None, (life_of(random), self._code, *others)))
        line = self.saved.journal_lines if self.saved else 0
        spent = self.saved.done if self.saved else ()
        owed = self._journal.charged_since(line, self.saved.ahead if self.saved else ())
        lives = self._journal.lives_since(line) | ({self.saved.life} if self.saved else set())
        first = not lives  # no step has been done before, so none is done again
        self._journal.begin(self._life)
        if first or (self._repeating and repeats(random) and lives <= {self._life}):
            ledger = JournaledLedger(self._journal, spent, ahead=owed)
        else:
            ledger = JournaledLedger(self._journal, (*spent, *owed))
            self.renewed = self._journal.lives
            random.renew(self.renewed)
        self._ledger = ledger
        return ledger

    def train(self, trainer: Resumable, on_epoch: EpochCallback | None = None, *, progress: bool = True) -> list[Row]:
        """Restore the state, train what remains, and save on the way; returns the rows of all epochs.

        Raises:
            StoppedError: after Ctrl-C or SIGTERM, once the step is finished and a checkpoint written.
        """
        if self.saved is not None:
            trainer.load_state_dict(self.saved.state)
        ends = set(itertools.accumulate(trainer.plan.epoch_lengths()))

        def after_epoch(row: Row, model: nn.Module) -> Mapping[str, float]:
            extra = dict((on_epoch(row, model) if on_epoch is not None else None) or {})
            self._history.append(row | extra)
            self._stop_if_asked(trainer)
            if self.every_epochs is not None and len(self._history) % self.every_epochs == 0:
                self.save(trainer)
            return extra

        def after_step() -> None:
            if trainer.steps_done not in ends:  # at an epoch's end `after_epoch` stops, once its row is there
                self._stop_if_asked(trainer)

        with self._signals():
            trainer.train(after_epoch, on_step=after_step, progress=progress)
            self._stop_if_asked(trainer)  # after the last step this stops what would follow the training
        if isinstance(self._ledger, JournaledLedger):
            self._ledger.finish()
        return self._history

    def save(self, trainer: Resumable) -> None:
        """Write a checkpoint now; between steps only.

        Raises:
            EquidpError: if the disk refuses; the previous checkpoint is then still there.
        """
        self._journal.settle()
        ledger = self._ledger
        content = {
            "state": trainer.state_dict(),
            "history": self._history,
            "done": [e.to_dict() for e in ledger.done] if isinstance(ledger, JournaledLedger) else [],
            "ahead": [e.to_dict() for e in ledger.ahead] if isinstance(ledger, JournaledLedger) else [],
            "journal_lines": self._journal.lines,
            "life": self._life,
        }
        write_checkpoint(self.path, content, self.settings)

    def close(self) -> None:
        """Release the folder, and leave everything in it."""
        self._journal.close()

    def _open(self, resume: bool) -> Saved | None:
        for leftover in self.path.parent.glob(unfinished_of(self.path)):  # what a killed process left half-written
            leftover.unlink(missing_ok=True)
        if not resume:
            self.path.unlink(missing_ok=True)
        return read_checkpoint(self.path, self.settings) if self.path.exists() else None

    def _stop_if_asked(self, trainer: Resumable) -> None:
        if self._signal is None:
            return
        self.save(trainer)
        name = "Ctrl-C" if self._signal == signal.SIGINT else signal.Signals(self._signal).name
        raise StoppedError(
            f"Stopped by {name} after step {trainer.steps_done} of {trainer.plan.steps}; the checkpoint is in "
            f"{self.path.parent}. Go on by the same command with resume=true added to --params.",
            self._signal,
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn Ctrl-C and SIGTERM into a request to stop after the step; a second one stops at once."""

        def ask(signum: int, frame: FrameType | None) -> None:
            if self._signal is not None:
                raise KeyboardInterrupt
            self._signal = signum

        with handling(ask, signal.SIGINT, signal.SIGTERM):
            yield


def repeats(random: RandomSource) -> bool:
    """Whether a step done again gives the very same values: seeded streams, and arithmetic in a fixed order.

    On a GPU sums may be formed in any order unless PyTorch is told otherwise, so the answer is no, to be safe. It is no
    as well where cuDNN chooses its kernels by their measured time, and where several GPUs add up, in an order that NCCL
    takes from how they are connected. And it is no in any thread but the main one: another training in the process
    draws from the same generator of torch's (dropout).
    """
    on_cpu = getattr(random, "device", torch.device("cpu")).type == "cpu"
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    one_order = strict and not torch.backends.cudnn.benchmark
    together = getattr(random, "peers", None) is not None
    return random.repeatable and alone() and (on_cpu or (one_order and not together))


def life_of(random: RandomSource) -> str:
    """Return a line for the journal with all that must be equal for two processes to draw and compute the same."""
    if not random.repeatable:
        return "secure"
    device = getattr(random, "device", torch.device("cpu"))
    # by the processor and by settings, libraries choose their kernels, which round differently
    on_cpu = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, processor {processor()}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu
    facts: dict[str, object] = {name: v for name, v in os.environ.items() if name.startswith(KERNEL_SETTINGS)}
    cuda, mkldnn, cudnn = (cast(Any, getattr(torch.backends, name)) for name in ("cuda", "mkldnn", "cudnn"))
    kinds = (cuda.matmul, mkldnn.matmul, mkldnn.conv)
    facts["products"] = [kind.fp32_precision.replace("none", "ieee") for kind in kinds]  # none means ieee
    facts["deterministic"] = torch.are_deterministic_algorithms_enabled()
    facts["mkldnn"] = torch.backends.mkldnn.enabled
    facts["flushed"] = bool(torch.tensor(1e-40) * 1.0 == 0)  # denormal numbers; torch has no way to ask
    if device.type == "cuda":
        facts["cudnn"] = [cudnn.enabled, cudnn.conv.fp32_precision, cudnn.benchmark, cudnn.version()]
        facts["cuda"] = [torch.version.cuda, driver_version(), fused.version(device)]
    # the C library, whose exponentials and logarithms are used; on macOS and Windows the system's version stands for it
    facts["libc"] = "-".join(filter(None, platform.libc_ver())) or platform.version()
    thread = "" if alone() else ", in a thread"
    return f"seeded, torch {torch.__version__}, {device.type}, {name}, told {_short(facts)}{thread}"


@cache
def processor() -> str:
    """A digest of the processor's make, stepping and instructions; of the machine's name where these are not told."""
    try:
        lines = CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {line for line in lines if line.partition(":")[0].strip() in PROCESSOR_FACTS}
    return _short(sorted(facts) or [platform.machine(), platform.processor(), platform.node()])


def _short(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def write_checkpoint(path: Path, content: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write atomically: the old file or the new one, never something in between.

    Raises:
        EquidpError: if the disk refuses; nothing half-written is left.
        TypeError: for a state that is not made of tensors and plain values.
    """
    tensors: dict[str, Tensor] = {}
    body = json.dumps({"settings": settings, "content": _pack(dict(content), tensors, "")})
    metadata = {"format": FORMAT, "body": body, "digest": _digest(body, tensors)}
    write_private(path, safetensors.torch.save(tensors, metadata))


def charged_until_now(folder: Path) -> tuple[int | None, tuple[Event, ...]]:
    """Return an interrupted run's steps at its checkpoint, None without one; and everything that it was charged.

    Raises:
        EquidpError: if a file is damaged, or the run is still going on.
    """
    path, kept = folder / CHECKPOINT_FILE, folder / JOURNAL_FILE
    if not kept.is_file():
        return None, ()
    journal = Journal(kept, None)
    try:
        if not path.exists():
            return None, journal.charged_since(0)
        saved = read_checkpoint(path, None)
        events = (*saved.done, *journal.charged_since(saved.journal_lines, saved.ahead))
        return int(saved.state["steps_done"]), events
    finally:
        journal.close()


def read_checkpoint(path: Path, settings: Mapping[str, Any] | None) -> Saved:
    """Read and verify a checkpoint; with `settings` None no settings are compared.

    Raises:
        EquidpError: if it is truncated, altered, unreadable, or of other settings (which are named).
    """
    body, tensors = _read_verified(path)
    facts = json.loads(body)
    if settings is not None:
        refuse_other_settings(path, facts["settings"], settings)
    content = _unpack(facts["content"], tensors)
    return Saved(
        state=content["state"],
        history=content["history"],
        done=tuple(Event.from_dict(e) for e in content["done"]),
        ahead=tuple(Event.from_dict(e) for e in content["ahead"]),
        journal_lines=content["journal_lines"],
        life=content["life"],
    )


def _read_verified(path: Path) -> tuple[str, dict[str, Tensor]]:
    remedy = "Delete it and start again with resume=false."
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            # copies: safetensors gives tensors in the mapped file, which Windows does not replace while it is mapped
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise EquidpError(f"{path} is no checkpoint, or is truncated ({error}). {remedy}") from error
    if metadata.get("format") != FORMAT:
        raise EquidpError(f"{path} is not in the format {FORMAT!r}. {remedy}")
    body = metadata.get("body", "")
    if metadata.get("digest") != _digest(body, tensors):
        raise EquidpError(f"{path} is damaged or was edited: its contents do not match its digest. {remedy}")
    return body, tensors


def _digest(body: str, tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(body.encode() + safetensors.torch.save(dict(tensors))).hexdigest()


def _pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return JSON for a nested value; its tensors go into `tensors`, and their names take their place."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, Mapping):
        pairs = [[_pack(k, tensors, where), _pack(v, tensors, f"{where}.{k}")] for k, v in value.items()]
        return {"mapping": pairs}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(v, tensors, f"{where}[{i}]") for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # NumPy's numbers too
        return float(value)
    raise TypeError(f"{where.lstrip('.')}: a {type(value).__name__} cannot be kept in a checkpoint.")


def _unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(packed, dict):
        return packed
    ((kind, inner),) = packed.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "mapping":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in inner}
    values = [_unpack(v, tensors) for v in inner]
    return values if kind == "list" else tuple(values)
