"""Images: decoding and resizing many files at once into one byte tensor, and packed sheets of small ones."""

from __future__ import annotations

import io
import itertools
import os
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image, ImageOps, features
from torch import Tensor
from tqdm import tqdm

from equidp.data.raw_files import files_below
from equidp.errors import EquidpError
from equidp.system.progress import frames

SUFFIXES = (".jpg", ".jpeg", ".png")
OTHER_SUFFIXES = (
    ".avif", ".bmp", ".dcm", ".gif", ".heic", ".heif", ".jfif", ".jp2", ".jpe", ".mha", ".nii", ".nii.gz", ".nrrd",
    ".pbm", ".pgm", ".ppm", ".svs", ".tga", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Suffixes of images that are not read."""
DEEP_MODES = ("I", "F")
"""Beginnings of Pillow's modes with more than eight bits per channel, such as `I;16`."""
DEEP_SIGN = ";16"
"""Pillow's sign for such images that it opens with eight bits: a colour image of twelve bits would be nearly black."""

FORMATS = ("JPEG", "PNG")
"""The formats that are decoded, whatever the file's name says: Pillow goes by content, and would let Ghostscript run
PostScript."""

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SD = (0.229, 0.224, 0.225)
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)
IN_FLIGHT = 8
"""Images waiting per worker: enough to keep all busy, few enough to keep memory small."""

Encoded = tuple[int, str, Path | bytes]
"""Position in the result, name for messages, file or its bytes."""


def decode_all(
    images: Iterable[Encoded], count: int, *, side: int, channels: int = 3, crop: bool = False, title: str = "images"
) -> Tensor:
    """Decode and resize images in parallel, uint8 `[count, channels, side, side]`.

    Args:
        images: the images to decode; may be a stream, of which only a window is held in memory.
        channels: 3, or 1 for grey.
        crop: keep the aspect ratio and cut off the edges, instead of squeezing the whole image.

    Raises:
        EquidpError: an image is corrupt; the message names it.
    """
    pixels = torch.empty((count, channels, side, side), dtype=torch.uint8)

    def place(item: Encoded) -> None:
        position, name, encoded = item
        pixels[position] = decode(name, encoded, side=side, channels=channels, crop=crop)

    for _ in tqdm(_in_parallel(place, images), total=count, desc=title, unit="image", **frames()):
        pass
    return pixels


def decode(name: str, encoded: Path | bytes, *, side: int, channels: int, crop: bool) -> Tensor:
    """One image, uint8 `[channels, side, side]`.

    Raises:
        EquidpError: it is corrupt, neither JPEG nor PNG, or has more than eight bits per channel.
    """
    try:
        with Image.open(encoded if isinstance(encoded, Path) else io.BytesIO(encoded), formats=FORMATS) as opened:
            if opened.mode.startswith(DEEP_MODES) or any(DEEP_SIGN in str(tile.args) for tile in opened.tile):
                # Pillow would cut values off at 255 and leave a white image; the right scale depends on the device
                raise EquidpError(f"Image {name} has more than 8 bits per channel; scale it to 8 and save it again.")
            image: Image.Image = opened.convert("RGB" if channels == 3 else "L")
    except UNREADABLE as error:
        raise EquidpError(
            f"Image {name} is corrupt, or neither JPEG nor PNG ({error}); replace it or remove its record."
        ) from error
    if image.size != (side, side):
        size = (side, side)
        image = ImageOps.fit(image, size, Image.Resampling.BICUBIC) if crop else image.resize(size, Image.BICUBIC)  # type: ignore[attr-defined]
    return torch.from_numpy(np.array(image).reshape(side, side, channels)).permute(2, 0, 1)


def decoder() -> str:
    """Versions of the libraries that decode and resize. With other versions, pixels may differ in a last bit."""
    libraries = (f"{name} {features.version(name)}" for name in ("libjpeg_turbo", "jpg", "zlib"))
    return ", ".join((f"Pillow {PIL.__version__}", *libraries))


def image_files(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Return all image files with these suffixes below a folder and its linked folders, in a fixed order.

    Raises:
        EquidpError: a file is a broken link, or not a regular file (reading a pipe would wait for ever), or a folder
            cannot be read.
    """
    found = [path for path in files_below(folder) if _is_of(path, suffixes)]
    if lost := next((path for path in found if not path.exists()), None):
        raise EquidpError(f"{lost} is a broken link; repair it, or remove it.")
    if special := next((path for path in found if not path.is_file()), None):
        raise EquidpError(f"{special} is not a file, although its name looks like one; remove it.")
    return found


def _is_of(path: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether a file is of one of these kinds, by its name; a DICOM file without a suffix counts as `.dcm`."""
    if path.name.lower().endswith(suffixes):
        return True
    if path.suffix or ".dcm" not in suffixes or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(132)[128:] == b"DICM"


def load_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Arrays of an npz file; nothing is unpickled. Raises EquidpError if the file is damaged or lacks an array."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        # NumPy's own message would advise to unpickle the file
        why = "no arrays in it" if "pickle" in str(error) else error
        raise EquidpError(f"{path} is damaged or not the packed file ({why}); download it again.") from error


def unpack_sheets(arrays: Mapping[str, np.ndarray], prefix: str, side: int, path: Path) -> Tensor:
    """Images from lossless WebP sheets, columns of images, uint8 `[N, 3, side, side]`.

    Args:
        arrays: holds `{prefix}webp` (all sheets' bytes) and `{prefix}offsets` (where each sheet begins).
        path: for messages.

    Raises:
        EquidpError: a sheet is corrupt.
    """
    packed, offsets = arrays[f"{prefix}webp"], arrays[f"{prefix}offsets"]
    try:
        encoded = (io.BytesIO(packed[start:end].tobytes()) for start, end in itertools.pairwise(offsets))
        opened = (Image.open(one, formats=["WEBP"]).convert("RGB") for one in encoded)
        sheets = [np.asarray(sheet).reshape(-1, side, side, 3) for sheet in opened]
    except UNREADABLE as error:
        raise EquidpError(f"{path}: a sheet of {prefix}webp is corrupt ({error}); download it again.") from error
    return torch.from_numpy(np.concatenate(sheets)).permute(0, 3, 1, 2).contiguous()


def _in_parallel(work: Callable[[Encoded], None], items: Iterable[Encoded]) -> Iterator[None]:
    """Run `work` on a window of items at a time; Pillow releases the interpreter lock while it decodes."""
    workers = os.cpu_count() or 1
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= IN_FLIGHT * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
