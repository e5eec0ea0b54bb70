"""Weights as files. Only safetensors are read; weights that do not fit the network are refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from equidp.errors import EquidpError

PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
COUNTED = "num_batches_tracked"
"""A BatchNorm's counter. It is ignored: the layer's statistics stay as they are, and not every file has it."""


def weight_files(path: Path, setting: str) -> list[Path]:
    """Return the safetensors files of a path, which is a file or a folder.

    Raises:
        EquidpError: there is none, or there are pickles in their place.
    """
    if path.is_dir():
        if found := sorted(path.glob("*.safetensors")):
            return found
        if pickles := sorted(file for file in path.iterdir() if file.suffix in PICKLES):
            raise _pickle(pickles[0], setting)
        raise EquidpError(f"{setting}: folder {path} holds no .safetensors file; put the network's weights there.")
    if path.suffix in PICKLES:
        raise _pickle(path, setting)
    if not path.is_file():
        where = "" if path.is_absolute() else f" in {Path.cwd()}"  # not below raw_dir, where data are
        raise EquidpError(
            f"{setting}: {path} does not exist{where}; give the path of a .safetensors file or its folder."
        )
    return [path]


def _pickle(path: Path, setting: str) -> EquidpError:
    old, new = path.as_posix(), path.with_suffix(".safetensors").as_posix()
    return EquidpError(
        f"{setting}: {path} is a pickle, and reading one may run what somebody hid in it: convert it once, by "
        'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in '
        f"torch.load('{old}', weights_only=True).items()}}, '{new}')\", and give the new file."
    )


def read_weights(path: Path, setting: str) -> dict[str, Tensor]:
    """Read weights by name, in float32. Raises EquidpError where a file is missing, damaged or a pickle."""
    state: dict[str, Tensor] = {}
    for file in weight_files(path, setting):
        try:
            state |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise EquidpError(f"{setting}: {file} is damaged ({error}); get it again.") from error
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def digest(paths: Iterable[Path]) -> str:
    """sha256 of files' names and content."""
    whole = hashlib.sha256()
    for path in paths:
        with path.open("rb") as stream:
            whole.update(f"{path.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def load_fitting(body: nn.Module, state: Mapping[str, Tensor], left_out: tuple[str, ...], what: str) -> None:
    """Put weights into a network whose last layers were removed.

    Args:
        body: the network.
        state: weights by name.
        left_out: names of the removed layers. `state` may have weights for them.
        what: file and network, for messages.

    Raises:
        EquidpError: the weights are another network's; the message names those that differ.
    """
    wanted = {name: value for name, value in body.state_dict().items() if not name.endswith(COUNTED)}
    extra = [
        name
        for name in state
        if name not in wanted and not name.endswith(COUNTED) and not name.startswith(tuple(f"{x}." for x in left_out))
    ]
    shapes = {name: (state[name].shape, value.shape) for name, value in wanted.items() if name in state}
    refuse_unfitting(
        what,
        lacking=[name for name in wanted if name not in state],
        other=[
            f"{name} ({tuple(there)} there, {tuple(here)} in the network)"
            for name, (there, here) in shapes.items()
            if there != here
        ],
        extra=extra,
    )
    with torch.no_grad():
        body.load_state_dict({name: state[name] for name in wanted}, strict=False)


def refuse_unfitting(what: str, *, lacking: list[str], other: list[str], extra: list[str]) -> None:
    """Raise an error that names what differs between weights and network, if anything does."""
    kinds = ((lacking, "lack"), (other, "have another shape of"), (extra, "have in addition"))
    found = [f"they {verb} {names[0]}{_more(names)}" for names, verb in kinds if names]
    if found:
        raise EquidpError(f"The weights of {what} are another network's: {'; '.join(found)}.")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
