"""Files: checksums over content, paths that cannot leave the raw folder, fingerprints that notice a change."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest

from equidp.data.raw_files import (
    PublishedFile,
    digest,
    files_below,
    find,
    find_own,
    folder_fingerprint,
    inside,
    missing,
    verified,
)
from equidp.errors import EquidpError

TEXT = b"some content\n" * 1000
SHA256 = hashlib.sha256(TEXT).hexdigest()
MD5 = hashlib.md5(TEXT, usedforsecurity=False).hexdigest()


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    plain.write_bytes(TEXT)
    packed.write_bytes(gzip.compress(TEXT))
    return plain, packed


def test_a_file_and_its_gzipped_copy_have_one_checksum(both) -> None:
    assert {digest(path) for path in both} == {SHA256}
    assert {digest(path, "md5") for path in both} == {MD5}


def test_the_plain_file_is_found_first(tmp_path: Path, both) -> None:
    assert find(tmp_path, PublishedFile("a.txt", "")) == both[0]
    assert find(tmp_path, PublishedFile("b.txt", "")) == both[1]
    assert find(tmp_path, PublishedFile("c.txt", "")) is None


def test_a_users_own_file_is_the_one_that_is_named(tmp_path: Path, both) -> None:
    """An old unpacked copy may lie beside it."""
    assert find_own(tmp_path, "b.txt.gz") == find_own(tmp_path, "b.txt") == both[1]
    stale = tmp_path / "b.txt"
    stale.touch()
    assert find_own(tmp_path, "b.txt.gz") == both[1]
    assert find_own(tmp_path, "b.txt") == stale
    assert find_own(tmp_path, "a.txt.gz") == both[0]


@pytest.mark.parametrize("checksum", [{"sha256": "0" * 64}, {"md5": "0" * 32}], ids=["sha256", "md5"])
def test_a_wrong_checksum_is_refused_unless_verification_is_off(both, checksum: dict[str, str]) -> None:
    published = PublishedFile("a", "page", **checksum)
    with pytest.raises(EquidpError, match=r"a\.txt is not the provider's file.*download it again from page"):
        verified(both[0], published, verify=True)
    assert verified(both[0], published, verify=False) == SHA256


def test_a_right_checksum_passes(both) -> None:
    for published in (PublishedFile("a", "", sha256=SHA256), PublishedFile("a", "", md5=MD5), PublishedFile("a", "")):
        assert verified(both[0], published, verify=True) == SHA256


@pytest.mark.parametrize("path", ["../secret.csv", "/etc/passwd", "a/../../b", ""])
def test_a_path_of_the_users_cannot_leave_the_raw_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(EquidpError, match="must lead to a file below raw_dir"):
        inside(tmp_path, path)


def test_a_link_out_of_the_raw_folder_is_refused(tmp_path: Path) -> None:
    raw_dir = tmp_path / "raw"
    raw_dir.mkdir()
    (raw_dir / "link").symlink_to(tmp_path)
    with pytest.raises(EquidpError, match="must lead to a file below raw_dir"):
        inside(raw_dir, "link/a.csv")


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EquidpError, match=r"nothing\.txt cannot be read \(No such file"):
        digest(tmp_path / "nothing.txt")


def test_a_file_in_a_folder_that_may_not_be_entered_is_named(both, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    for search in (lambda: find(both[0].parent, PublishedFile("a.txt", "")), lambda: find_own(both[0].parent, "a.txt")):
        with pytest.raises(EquidpError, match=r"a\.txt cannot be read \(Permission denied\)"):
            search()


@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[:40] + bytes(20), lambda raw: b"no gzip"])
def test_a_damaged_gzip_is_named(both, damage) -> None:
    both[1].write_bytes(damage(both[1].read_bytes()))
    with pytest.raises(EquidpError, match=r"b\.txt\.gz is truncated or corrupt"):
        digest(both[1])


def test_missing_folders_are_described(tmp_path: Path) -> None:
    message = missing(tmp_path, PublishedFile("x", "page", contains="pictures"), download="it rained").message
    assert "x, a folder with pictures, is missing: download it from page" in message
    assert message.endswith("(it rained).")


def test_a_folders_fingerprint_notices_new_and_grown_files(tmp_path: Path, both) -> None:
    before = folder_fingerprint(tmp_path, both)
    assert before == folder_fingerprint(tmp_path, reversed(both))
    assert before != folder_fingerprint(tmp_path, both[:1])
    both[0].write_bytes(TEXT + b"x")
    assert before != folder_fingerprint(tmp_path, both)


def test_files_of_linked_folders_are_found_and_a_ring_is_refused(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "x.txt").touch()
    folder.mkdir()
    (folder / "link").symlink_to(outside)
    assert files_below(folder) == [folder / "link" / "deep" / "x.txt"]
    (outside / "deep" / "back").symlink_to(outside)
    with pytest.raises(EquidpError, match="deep/back is a link to a folder that contains it; remove it"):
        files_below(folder)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Its files would be left out without a word."""
    with pytest.raises(EquidpError, match=r"nothing cannot be read \(No such file"):
        files_below(tmp_path / "nothing")
