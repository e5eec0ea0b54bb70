"""IMDb: the provider's folder and the packed file, hashed words, length bands, and clear errors."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pandas as pd
import pytest
import torch
from tests.data.sources.tiny import write_tiny

from equidp.data.sources import source
from equidp.errors import EquidpError


def read(raw_dir: Path, **options):
    imdb = source("imdb", {"verify": False, "download": False, "vocabulary": 200, "length": 12, **options})
    return imdb.read(imdb.locate(raw_dir))


def pack(raw_dir: Path, rows: list, *, cut: int | None = None) -> None:
    path = raw_dir / "imdb" / "imdb_reviews.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("\n".join(map(str, rows)).encode())[:cut])


def test_the_real_packed_file_gives_the_providers_counts(raw_dir: Path) -> None:
    imdb = source("imdb")
    records = imdb.read(imdb.locate(raw_dir))
    assert records.features.shape == (50_000, 80)
    for part in (0, 1):
        assert torch.bincount(records.labels[records.part == part]).tolist() == [12_500, 12_500]
    assert torch.bincount(records.groups["length_band"]).min() > 5_000


def test_folder_and_packed_file_give_equal_reviews(tmp_path: Path) -> None:
    write_tiny("imdb", tmp_path / "folder")
    rows = []
    for part in ("train", "test"):
        for label, sentiment in enumerate(("neg", "pos")):
            for path in sorted((tmp_path / "folder" / "imdb" / "aclImdb" / part / sentiment).iterdir()):
                rows.append(json.dumps({"split": part, "label": label, "text": path.read_text()}))
    pack(tmp_path / "packed", rows)
    folder, packed = read(tmp_path / "folder"), read(tmp_path / "packed")
    assert torch.equal(folder.features, packed.features)
    assert torch.equal(folder.part, packed.part)
    assert torch.equal(folder.groups["length_band"], packed.groups["length_band"])


def test_length_bands_count_words(tmp_path: Path) -> None:
    pack(
        tmp_path,
        [json.dumps({"split": "train", "label": 1, "text": "word " * n}) for n in (0, 99, 100, 199, 200, 399, 400)],
    )
    records = read(tmp_path)
    assert records.schema.groupings["length_band"] == ("under 100", "100-199", "200-399", "400 and over")
    assert records.groups["length_band"].tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_encode_takes_a_column_of_texts(tmp_path: Path) -> None:
    text = "what a film"
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": text})])
    imdb = source("imdb", {"vocabulary": 200, "length": 12})
    assert torch.equal(imdb.encode(pd.DataFrame({"text": [text]})), read(tmp_path).features)
    with pytest.raises(EquidpError, match="No column 'text' in the given table"):
        imdb.encode(pd.DataFrame({"txt": [text]}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"row 1: JSONDecodeError.*expected split \(train or test\), label \(0 or 1\) and text"),
        ('{"split": "train", "label": 1}', r"row 1: KeyError\('text'\)"),
        ('{"split": "dev", "label": 1, "text": "x"}', "row 1: ValueError"),
        ('{"split": "test", "label": 7, "text": "x"}', "row 1: ValueError"),
        ("[]", "row 1: TypeError"),
        ("", "row 1: JSONDecodeError|holds no reviews"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, message: str) -> None:
    pack(tmp_path, [row])
    with pytest.raises(EquidpError, match=message):
        read(tmp_path)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": f"x{i}"}) for i in range(500)], cut=200)
    with pytest.raises(EquidpError, match=r"jsonl\.xz is truncated or corrupt"):
        read(tmp_path)


def test_an_unfinished_or_unreadable_folder_is_named(tmp_path: Path) -> None:
    write_tiny("imdb", tmp_path)
    reviews = tmp_path / "imdb" / "aclImdb" / "test" / "pos"
    (reviews / "3_10.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(EquidpError, match=r"3_10\.txt is not readable UTF-8 text"):
        read(tmp_path)
    for path in reviews.iterdir():
        path.unlink()
    with pytest.raises(EquidpError, match=r"test/pos holds no \.txt file"):
        read(tmp_path)


def test_nothing_is_downloaded_by_itself(tmp_path: Path) -> None:
    with pytest.raises(EquidpError, match=r"imdb/aclImdb, a folder with .* is missing: .*ai\.stanford\.edu"):
        source("imdb").locate(tmp_path)
