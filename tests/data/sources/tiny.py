"""Tiny raw files in every provider's own format, for tests that run a source from end to end.

`write_tiny(name, raw_dir)` writes them and returns the `data.options` to read them with (no checksum, no download).
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from equidp.data.sources.celeba import ATTRIBUTES

OFFLINE = {"verify": False, "download": False}


def write_tiny(name: str, raw_dir: Path) -> dict[str, Any]:
    """Write the raw files of a dataset below `raw_dir`; returns its `data.options`."""
    return WRITERS[name](Path(raw_dir))


def write_idx(path: Path, values: np.ndarray) -> None:
    """One IDX file of unsigned bytes, gzipped when its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    raw = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def _write_idx_pair(folder: Path, part: str, count: int, side: int = 28) -> None:
    rng = np.random.default_rng(count)
    labels = np.arange(count) % 10
    pixels = rng.integers(0, 60, (count, side, side)) + 15 * labels[:, None, None]
    write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels)
    write_idx(folder / f"{part}-labels-idx1-ubyte", labels)


def _mnist(raw_dir: Path, folder: str = "MNIST") -> dict[str, Any]:
    _write_idx_pair(raw_dir / folder / "raw", "train", 120)
    _write_idx_pair(raw_dir / folder / "raw", "t10k", 60)
    return OFFLINE


ADULT_ROW = (
    "{age}, Private, 77516, Bachelors, 13, Never-married, {job}, Not-in-family, {race}, {sex}, 0, 0, 40, "
    "United-States, {income}"
)


def adult_rows(count: int, *, stop: str = "") -> list[str]:
    """Rows of an Adult file; `stop` ends the labels, as the provider's test file does."""
    jobs, races = ("Sales", "Adm-clerical", "Tech-support"), ("White", "Black")
    return [
        ADULT_ROW.format(
            age=18 + i % 60,
            job=jobs[i % 3],
            race=races[i % 5 == 0],
            sex=("Male", "Female")[i % 2],
            income=(">50K" if (i // 2) % 3 == 0 else "<=50K") + stop,
        )
        for i in range(count)
    ]


def _adult(raw_dir: Path) -> dict[str, Any]:
    folder = raw_dir / "adult"
    folder.mkdir(parents=True, exist_ok=True)
    incomplete = ADULT_ROW.format(age=40, job="?", race="White", sex="Male", income="<=50K")
    (folder / "adult.data").write_text("\n".join([*adult_rows(160), incomplete, ""]))
    test = "\n".join(["|1x3 Cross validator", *adult_rows(80, stop="."), ""])
    (folder / "adult.test.gz").write_bytes(gzip.compress(test.encode()))
    return OFFLINE


CENSUS_ROW = "{sex},{age},1110,111,1,1,1,{edu},111,{activity},1,{occupation}"
CENSUS_HEADER = (
    "sex,age,household_position,household_size,prev_residence_place,citizenship,country_birth,edu_level,"
    "economic_status,cur_eco_activity,marital_status,occupation"
)


def _dutch(raw_dir: Path) -> dict[str, Any]:
    rows = [
        CENSUS_ROW.format(
            sex=("male", "female")[i % 2], age=4 + i % 12, edu=i % 6, activity=131 + i % 9, occupation=int(i % 3 == 0)
        )
        for i in range(200)
    ]
    (raw_dir / "dutch").mkdir(parents=True, exist_ok=True)
    (raw_dir / "dutch" / "dutch.csv.gz").write_bytes(gzip.compress("\n".join([CENSUS_HEADER, *rows, ""]).encode()))
    return OFFLINE


def cifar_batch(count: int) -> dict[bytes, Any]:
    """One batch: labels, one row of 3,072 bytes per image, file names."""
    pixels = np.random.default_rng(count).integers(0, 256, (count, 3072), dtype=np.uint8)
    labels = [i % 10 for i in range(count)]
    return {b"batch_label": b"batch 1 of 5", b"labels": labels, b"data": pixels, b"filenames": [b"leaf.png"] * count}


def python_2_pickle(batch: dict[bytes, Any]) -> bytes:
    """A batch as the provider's Python 2 pickled it: strings of bytes, which Python 3 no longer writes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    labels = b"".join(b"K" + bytes([label]) for label in batch[b"labels"])
    raw = batch[b"data"].tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01M"
    array += struct.pack("<H", len(batch[b"labels"])) + b"M\x00\x0c\x86"
    array += b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    array += b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    names = b"".join(text(name) for name in batch[b"filenames"])
    items = text(b"batch_label") + text(batch[b"batch_label"]) + text(b"labels") + b"](" + labels + b"e"
    items += text(b"data") + array + text(b"filenames") + b"](" + names + b"e"
    return b"\x80\x02}(" + items + b"u."


def _cifar10(raw_dir: Path) -> dict[str, Any]:
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        path = raw_dir / "cifar10" / "cifar-10-batches-py" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(python_2_pickle(cifar_batch(30)))
    return OFFLINE


def write_image(path: Path, shade: int, *, size: tuple[int, int] = (40, 30)) -> None:
    """One JPEG or PNG whose brightness is `shade`, with a little texture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(shade).integers(0, 30, (size[1], size[0], 3)) + shade
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path)


DIAGNOSES = ("nv", "nv", "nv", "mel", "bkl", "bcc", "akiec", "vasc", "df")


def ham_rows(lesions: int) -> list[str]:
    """Metadata of two images per lesion; some sexes and ages are missing, as in the real table."""
    rows = []
    for lesion in range(lesions):
        sex = ("male", "female", "unknown")[lesion % 3]
        age = "" if sex == "unknown" else f"{5 * (lesion % 17)}.0"
        facts = f"{DIAGNOSES[lesion % 9]},histo,{age},{sex},{('back', 'face', 'unknown')[lesion % 3]}"
        rows += [f"HAM_{lesion:07},ISIC_{2 * lesion + i:07},{facts}" for i in range(2)]
    return rows


def _ham10000(raw_dir: Path, lesions: int = 90) -> dict[str, Any]:
    folder = raw_dir / "HAM10000"
    folder.mkdir(parents=True, exist_ok=True)
    header = "lesion_id,image_id,dx,dx_type,age,sex,localization"
    (folder / "HAM10000_metadata.csv").write_text("\n".join([header, *ham_rows(lesions), ""]))
    for i in range(2 * lesions):
        part = f"HAM10000_images_part_{1 + i % 2}"
        write_image(folder / part / f"ISIC_{i:07}.jpg", 20 * DIAGNOSES.index(DIAGNOSES[i // 2 % 9]))
    return {**OFFLINE, "size": 16}


def _imdb(raw_dir: Path) -> dict[str, Any]:
    words = {"neg": "a dull<br />and tedious film, don't bother", "pos": "A WARM and witty film; see it"}
    for part in ("train", "test"):
        for sentiment, text in words.items():
            folder = raw_dir / "imdb" / "aclImdb" / part / sentiment
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(40):
                (folder / f"{i}_{1 if sentiment == 'neg' else 10}.txt").write_text(" ".join([text] * (1 + i % 60)))
    return {**OFFLINE, "vocabulary": 200, "length": 12}


def write_celeba(raw_dir: Path, count: int = 60) -> None:
    """torchvision's layout: images and the provider's five text files."""
    folder, names = raw_dir / "celeba", [f"{i + 1:06}.jpg" for i in range(count)]
    for i, name in enumerate(names):
        write_image(folder / "img_align_celeba" / name, 100 if i % 2 else 20, size=(178, 218))

    def attributes(i: int) -> str:
        signs = ["1" if (i >> (j % 3)) % 2 else "-1" for j in range(40)]
        signs[20] = "1" if i % 2 else "-1"
        return " ".join(signs)

    tables = {
        "list_attr_celeba.txt": [
            str(count),
            " ".join(ATTRIBUTES) + " ",
            *(f"{n} {attributes(i)}" for i, n in enumerate(names)),
        ],
        "identity_CelebA.txt": [f"{n} {i // 2}" for i, n in enumerate(names)],
        "list_bbox_celeba.txt": [str(count), "image_id x_1 y_1 width height", *(f"{n} 1 1 9 9" for n in names)],
        "list_landmarks_align_celeba.txt": [str(count), "x y", *(f"{n} 1 1" for n in names)],
        "list_eval_partition.txt": [f"{n} {(0, 0, 0, 1, 2, 2)[i * 6 // count]}" for i, n in enumerate(names)],
    }
    for name, lines in tables.items():
        (folder / name).write_text("\n".join([*lines, ""]))


def _celeba(raw_dir: Path) -> dict[str, Any]:
    write_celeba(raw_dir)
    return {**OFFLINE, "size": 16}


WORDNET_IDS = (
    "n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042", "n03425413", "n03445777",
    "n03888257",
)  # fmt: skip


def _imagenette(raw_dir: Path) -> dict[str, Any]:
    for part, count in (("train", 6), ("val", 3)):
        for label, wordnet_id in enumerate(WORDNET_IDS):
            for i in range(count):
                folder = raw_dir / "imagenette" / "imagenette2-160" / part / wordnet_id
                write_image(folder / f"{wordnet_id}_{i}.JPEG", 20 * label + i, size=(48, 40))
    return {**OFFLINE, "size": 16}


CSV_OPTIONS = {
    "path": "mine/people.csv",
    "label": "outcome",
    "classes": ["ill", "well"],
    "features": {
        "ward": {"kind": "categorical", "categories": ["A", "B"]},
        "weight": {"kind": "numeric", "minimum": 0, "maximum": 200},
    },
    "groups": {
        "sex": {"categories": ["f", "m"], "unknown": True},
        "age_band": {"column": "age", "edges": [40, 60], "maximum": 120},
    },
    "unit": "person",
}


def _csv(raw_dir: Path) -> dict[str, Any]:
    rows = [
        f"{i // 2},{('ill', 'well')[i // 2 % 2]},{'AB'[i % 2]},{60 + i % 40},{('f', 'm', '')[i % 3]},{20 + i % 60}"
        for i in range(160)
    ]
    (raw_dir / "mine").mkdir(parents=True, exist_ok=True)
    (raw_dir / "mine" / "people.csv").write_text("\n".join(["person,outcome,ward,weight,sex,age", *rows, ""]))
    return {**OFFLINE, **CSV_OPTIONS}


def _image_folder(raw_dir: Path) -> dict[str, Any]:
    rows = []
    for label, name in enumerate(("cat", "dog")):
        for i in range(40):
            write_image(raw_dir / "mine" / "pets" / name / f"{name}{i}.png", 90 * label + 10)
            rows.append(f"{name}{i}.png,{('f', 'm')[i % 2]},{label * 20 + i // 2}")
    (raw_dir / "mine" / "pets.csv").write_text("\n".join(["image,sex,owner", *rows, ""]))
    return {
        **OFFLINE,
        "path": "mine/pets",
        "classes": ["cat", "dog"],
        "size": 16,
        "metadata": "mine/pets.csv",
        "groups": {"sex": {"categories": ["f", "m"]}},
        "unit": "owner",
    }


WRITERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "digits": lambda raw_dir: {},
    "diabetes": lambda raw_dir: {},
    "diabetes_bands": lambda raw_dir: {},
    "adult": _adult,
    "mnist": _mnist,
    "mnist_unbalanced": _mnist,
    "fashion_mnist": lambda raw_dir: _mnist(raw_dir, "FashionMNIST"),
    "dutch": _dutch,
    "cifar10": _cifar10,
    "ham10000": _ham10000,
    "imdb": _imdb,
    "celeba": _celeba,
    "imagenette": _imagenette,
    "table": _csv,
    "csv": _csv,
    "image_folder": _image_folder,
}
