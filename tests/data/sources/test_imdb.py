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
from equidp.data.sources.imdb import GLOVE_PACKED
from equidp.data.words import read_list
from equidp.errors import EquidpError


def read(raw_dir: Path, **options):
    imdb = source("imdb", {"verify": False, "download": False, "vocabulary": 200, "length": 12, **options})
    return imdb.read(imdb.locate(raw_dir))


def pack(raw_dir: Path, rows: list, *, cut: int | None = None) -> None:
    path = raw_dir / "imdb" / "imdb_reviews.jsonl.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress("\n".join(map(str, rows)).encode())[:cut])


@pytest.mark.slow
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
        ("{", r"line 1: JSONDecodeError.*expected split \(train or test\), label \(0 or 1\) and text"),
        ('{"split": "train", "label": 1}', r"line 1: KeyError\('text'\)"),
        ('{"split": "dev", "label": 1, "text": "x"}', "line 1: ValueError"),
        ('{"split": "test", "label": 7, "text": "x"}', "line 1: ValueError"),
        ("[]", "line 1: TypeError"),
        ("", "line 1: JSONDecodeError|holds no reviews"),
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


def write_words(raw_dir: Path, name: str = "lists/words.txt") -> None:
    path = raw_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("what 1\na 2\nfilm 3\nodd 4\n")


def test_words_of_a_public_list_have_ids_of_their_own_whatever_the_reviews_say(tmp_path: Path) -> None:
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": "What a zzz film"})])
    write_words(tmp_path)
    records = read(tmp_path, words="lists/words.txt", vocabulary=3)
    assert records.features.tolist() == [[0] * 8 + [2, 3, 1, 4]]
    assert records.schema.words == ("what", "a", "film")
    assert records.schema.vocabulary == 5
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": "zzz zzz zzz"})])
    assert read(tmp_path, words="lists/words.txt", vocabulary=3).schema == records.schema


def test_another_list_of_words_is_another_state_of_the_raw_files(tmp_path: Path) -> None:
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": "x"})])
    prints = []
    for options in ({}, {"words": "lists/words.txt"}, {"words": "other.txt"}):
        write_words(tmp_path, options.get("words", "lists/words.txt"))
        (tmp_path / "other.txt").write_text("other 1\n")
        prints.append(source("imdb", {"verify": False, **options}).locate(tmp_path).fingerprint)
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("glove/none.txt", r"glove/none\.txt, plain or as \.gz, is missing: .*Or leave data\.options\.words out"),
        ("../words.txt", r"must lead to a file below raw_dir"),
    ],
)
def test_a_list_that_is_asked_for_and_not_there_is_an_error_and_never_hashed(
    tmp_path: Path, words: str, message: str
) -> None:
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": "x"})])
    with pytest.raises(EquidpError, match=message):
        source("imdb", {"verify": False, "words": words}).locate(tmp_path)


def test_a_model_encodes_texts_by_the_words_of_its_schema_where_the_list_is_not(tmp_path: Path) -> None:
    pack(tmp_path, [json.dumps({"split": "train", "label": 1, "text": "what a film"})])
    write_words(tmp_path)
    given = {"words": "lists/words.txt", "vocabulary": 4, "length": 12}
    records = read(tmp_path, **given)
    frame = pd.DataFrame({"text": ["what a film"]})
    assert torch.equal(source("imdb", given).as_in(records.schema).encode(frame), records.features)
    with pytest.raises(EquidpError, match=r"words of lists/words\.txt are not read yet"):
        source("imdb", given).encode(frame)


def test_gloves_file_may_lie_in_a_linked_folder_as_other_raw_files_may(tmp_path: Path) -> None:
    pack(tmp_path / "raw", [json.dumps({"split": "train", "label": 1, "text": "what a film"})])
    write_words(tmp_path, "elsewhere/glove.6B.100d.txt")
    (tmp_path / "raw" / "glove").symlink_to(tmp_path / "elsewhere")
    assert read(tmp_path / "raw", words="glove/glove.6B.100d.txt", vocabulary=3, length=3).features.tolist() == [
        [2, 3, 4]
    ]


def test_the_first_words_of_the_real_glove_file_are_a_vocabulary(raw_dir: Path) -> None:
    imdb = source("imdb", {"words": GLOVE_PACKED.path})
    assert read_list(imdb.locate(raw_dir).paths["words"], 20_000)[:3] == ("the", ",", ".")


def test_an_archive_that_is_not_whole_and_what_a_mac_leaves_are_refused(tmp_path: Path) -> None:
    write_tiny("imdb", tmp_path)
    imdb = source("imdb", {"vocabulary": 200, "length": 12})
    files = imdb.locate(tmp_path)
    with pytest.raises(EquidpError, match=r"records of class 'negative' where 12,500 are published: .*verify=false"):
        imdb.records(files)
    (tmp_path / "imdb" / "aclImdb" / "test" / "pos" / "._0_9.txt").write_bytes(b"Mac OS X")
    with pytest.raises(EquidpError, match=r"\._0_9\.txt is no review by its name"):
        read(tmp_path)
