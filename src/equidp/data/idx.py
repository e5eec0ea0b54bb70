"""IDX: the array format of MNIST and its relatives (magic number, sizes, bytes; all big-endian)."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from equidp.data.raw_files import content
from equidp.errors import EquidpError

UNSIGNED_BYTE = 8


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or gzipped, as uint8 `[N, *shape]`.

    Raises:
        EquidpError: wrong magic number, wrong sizes, or fewer or more bytes than the header says.
    """
    raw = content(path)
    sizes = _sizes(raw, path)
    if sizes[1:] != shape:
        raise EquidpError(f"{path} holds records of shape {sizes[1:]}, expected {shape}; it is another dataset's file.")
    start = 4 + 4 * len(sizes)
    if len(raw) - start != math.prod(sizes):
        raise EquidpError(
            f"{path} holds {len(raw) - start} bytes of data where its header says {math.prod(sizes)}; "
            "download it again."
        )
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(sizes).copy())


def _sizes(raw: bytes, path: Path) -> tuple[int, ...]:
    if len(raw) < 8 or raw[:3] != bytes((0, 0, UNSIGNED_BYTE)) or len(raw) < 4 + 4 * raw[3]:
        raise EquidpError(f"{path} is not an IDX file of unsigned bytes; download it again.")
    return struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
