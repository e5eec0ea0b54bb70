"""Tokens: text as ids of a pretrained network's own tokenizer, which was made from other texts and is public."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from equidp.errors import EquidpError, first_line
from equidp.system.extras import extra
from equidp.system.progress import frames

FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model")
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that change how a tokenizer reads a text (for example, whether capital letters count), but are no tokenizer."""
BATCH = 1000


def tokenizer_digest(folder: Path) -> str:
    """sha256 of a tokenizer's files and of its settings. Raises EquidpError where the folder is missing or has none."""
    if not folder.is_dir():
        raise EquidpError(
            f"Folder {folder} does not exist: give a folder in Hugging Face's format in model.options.network "
            "(hf:<folder>), or in data.options.tokenizer."
        )
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if not found:
        raise EquidpError(
            f"Folder {folder} holds no tokenizer (tokenizer.json or vocab.txt); save the network's own there with "
            "save_pretrained."
        )
    found += [folder / name for name in BESIDE if (folder / name).is_file()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in found)).hexdigest()


class Tokenizer:
    """The tokenizer in a folder.

    Args:
        folder: a folder in Hugging Face's format.
        length: tokens kept of each text, the network's own marks included.
        keep: which end of a longer text is kept.

    Raises:
        EquidpError: the folder holds no tokenizer, or the library is missing.
    """

    def __init__(self, folder: Path, length: int, keep: Literal["first", "last"]) -> None:
        self.digest, self.length = tokenizer_digest(folder), length
        library = extra("transformers", f"data.options.tokenizer={folder}")
        try:
            self._tokenizer: Any = library.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise EquidpError(f"data.options.tokenizer: {folder} cannot be read ({first_line(error)}).") from error
        self._tokenizer.truncation_side = "left" if keep == "last" else "right"

    @property
    def version(self) -> str:
        """Versions of the libraries that cut texts into tokens."""
        return ", ".join(f"{name} {version(name)}" for name in ("transformers", "tokenizers"))

    @property
    def vocabulary(self) -> int:
        """Number of stored ids, the padding included."""
        return len(self._tokenizer) + 1

    def ids(self, texts: Sequence[str]) -> Tensor:
        """Int64 `[N, length]`: 1 + the tokenizer's ids, then 0."""
        found = torch.zeros((len(texts), self.length), dtype=torch.int64)
        for start in tqdm(range(0, len(texts), BATCH), desc="tokens", unit="batch", **frames()):
            batch = self._tokenizer(list(texts[start : start + BATCH]), truncation=True, max_length=self.length)
            for row, ids in enumerate(batch["input_ids"], start=start):
                found[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64) + 1
        return found
