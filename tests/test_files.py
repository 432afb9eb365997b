"""What users name: only files are read, and what is written is there whole or not at all."""

import errno
import os
import socket
import stat
from pathlib import Path

import numpy as np
import pytest

import regard
from regard._base import files
from regard.lm.config import Config, LayerConfig
from regard.recording import Layer, Recording, Writer

STATUS = Path("/proc/self/status")
posix = pytest.mark.skipif(os.name != "posix", reason="modes, links and pipes of POSIX")


def recording():
    return Recording(["a", "b"], [Layer(*np.ones((3, 1, 2, 2), np.float32))])


def config():
    return Config(300, 32, 4, 64, 32, (LayerConfig(),))


SAVERS = {
    "a.safetensors": lambda path: recording().save(path),
    "a.html": lambda path: recording().export(path),
    "a.svg": lambda path: recording().figure(0, 0).save(path),
    "config.json": lambda path: config().save(path),
}
savers = pytest.mark.parametrize(("name", "save"), SAVERS.items(), ids=SAVERS)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@posix
@savers
@pytest.mark.parametrize("kept", [0o600, 0o640, 0o666, 0o755])
def test_saving_over_a_file_keeps_who_may_read_it(tmp_path, name, save, kept):
    path = tmp_path / name
    path.touch()
    path.chmod(kept)
    save(path)
    assert mode(path) == kept
    assert path.stat().st_size > 0


@posix
def test_a_secret_file_is_secret_before_the_first_number_is_written(tmp_path):
    path = tmp_path / "a"
    path.touch()
    path.chmod(0o600)
    with files.replaced_when_complete(path):
        (new,) = [found for found in tmp_path.iterdir() if found != path]
        assert mode(new) == 0o600


@posix
@savers
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_new_file_follows_the_umask(tmp_path, name, save, mask):
    before = os.umask(mask)
    try:
        save(tmp_path / name)
    finally:
        os.umask(before)
    assert mode(tmp_path / name) == 0o666 & ~mask


@savers
def test_a_name_as_long_as_the_system_allows_can_be_saved(tmp_path, name, save):
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") if hasattr(os, "pathconf") else 255
    ending = name[name.index(".") :]
    for length in (longest - 3, longest):
        path = tmp_path / ("n" * (length - len(ending)) + ending)
        save(path)
        assert path.stat().st_size > 0
    with pytest.raises(OSError, match=r"name too long|cannot find|Invalid argument"):
        save(tmp_path / ("n" * (longest + 1 - len(ending)) + ending))


@savers
def test_an_error_names_the_file_that_was_asked_for(tmp_path, monkeypatch, name, save):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "missing" / name
    with pytest.raises(FileNotFoundError) as missing:
        save(path)
    assert missing.value.filename == str(path)
    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / name
    with pytest.raises(OSError, match="No space left on device") as caught:
        save(path)
    assert caught.value.filename == str(path)
    assert ".tmp" not in f"{missing.value} {caught.value}"
    assert list(tmp_path.iterdir()) == []


@savers
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError])
@pytest.mark.parametrize("there", [False, True])
def test_whatever_breaks_it_off_leaves_the_old_file_and_nothing_beside_it(
    tmp_path, monkeypatch, name, save, error, there
):
    def broken_off(handle):
        raise error

    path = tmp_path / name
    if there:
        path.write_bytes(b"the old one")
    monkeypatch.setattr(os, "fsync", broken_off)
    with pytest.raises(error):
        save(path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"the old one"] * there


@pytest.mark.parametrize("links", [True, False])
def test_of_several_that_write_a_new_name_the_first_gets_it(tmp_path, monkeypatch, links):
    def no_links(file, place):  # as on FAT
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "a"

    def write_both():
        with files.replaced_when_complete(path, first=True) as last:
            last.write(b"the last")
            with files.replaced_when_complete(path, first=True) as file:
                file.write(b"the first")

    with pytest.raises(FileExistsError) as caught:
        write_both()
    assert caught.value.filename == str(path)
    assert [x.read_bytes() for x in tmp_path.iterdir()] == [b"the first"]


@posix
@savers
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path, name, save):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / name, tmp_path / f"link-{name}"
    link.symlink_to(target)
    for _ in ("new", "replaced"):
        save(link)
        assert link.is_symlink()
        assert target.stat().st_size > 0
    assert not target.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


@posix
@savers
def test_a_link_that_leads_back_to_itself_is_refused(tmp_path, name, save):
    path, other = tmp_path / name, tmp_path / "other"
    path.symlink_to(other)
    other.symlink_to(path)
    error = regard.RecordingError if name == "a.safetensors" else OSError
    with pytest.raises(error, match=r"leads back to itself|Too many levels of symbolic links"):
        save(path)
    if name == "a.safetensors":
        with pytest.raises(error, match=f"{path} is a link that leads back to itself, so there is"):
            Recording.load(path)
        with (
            pytest.raises(error, match=f"{path} is a link that leads back to itself"),
            Writer(path),
        ):
            pass
    assert sorted(tmp_path.iterdir()) == sorted([path, other])


@savers
def test_a_folder_is_no_place_to_save_under(tmp_path, name, save):
    (tmp_path / name).mkdir()
    with pytest.raises(OSError, match=r" is a folder; saving needs the name of a file\."):
        save(tmp_path / name)


def pipe(path):
    os.mkfifo(path)


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))  # which may be 108 bytes long at most


def device(path):
    path.symlink_to("/dev/zero")


KINDS = {"a pipe": pipe, "a socket": unix_socket, "a device": device, "a folder": os.mkdir}


@posix
@pytest.mark.parametrize(("kind", "make"), KINDS.items(), ids=KINDS)
def test_what_is_no_file_is_told_what_it_is_and_neither_read_nor_written(
    tmp_path, monkeypatch, kind, make
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.safetensors"
    make(path)
    for read in (files.read_file, files.open_file, Recording.load):
        with pytest.raises(ValueError, match=f"{path} is {kind}; the name of a file is needed."):
            read(path)
    with pytest.raises(OSError, match=f"{path} is {kind}; saving needs the name of a file."):
        recording().save(path)
    assert list(tmp_path.iterdir()) == [path]


@posix
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.touch()
    real = files._without_waiting

    def replaced(name, flags):
        path.unlink()
        os.mkfifo(path)
        return real(name, flags)

    monkeypatch.setattr(files, "_without_waiting", replaced)
    with pytest.raises(ValueError, match="is a pipe"):
        files.read_file(path)


def test_a_file_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert files.read_file(path, 5) == b"12345"
    with pytest.raises(ValueError, match=r"a holds more than 4 B, the limit\. Give a part of it\."):
        files.read_file(path, 4)


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc of Linux")
def test_a_file_that_tells_no_size_is_read_and_limited_too():
    assert STATUS.stat().st_size == 0
    assert b"Name:" in files.read_file(STATUS)
    with pytest.raises(ValueError, match="holds more than 9 B"):
        files.read_file(STATUS, 9)


def test_a_large_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(files.LIMIT_BYTES + 1)
    monkeypatch.setattr(files, "read_at_most", None)
    with pytest.raises(ValueError, match=r"holds more than 64\.0 MB, the limit\."):
        files.read_file(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own.npz", "the name ends in .npz; that of a recording ends in .safetensors. Name it"),
        ("own.html", "Name it own.safetensors."),
        ("gpt-3.5.PT", "Name it gpt-3.5.safetensors."),
    ],
)
def test_a_recording_is_not_saved_under_a_name_that_says_another_kind(
    tmp_path, monkeypatch, name, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        recording().save(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert message in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_page_is_not_exported_under_a_name_that_says_another_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        recording().export("own.png")
    assert str(caught.value) == (
        "own.png: the name ends in .png; that of the page ends in .html or .htm. Name it own.html."
        " The picture is recording.figure(layer, head).save('own.png')."
    )
    with pytest.raises(ValueError, match=r"a\.bmp: .*Name it a\.html\.$"):
        recording().export("a.bmp")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_an_ending_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = r"^\.html: the name is an ending alone; a name before it is needed: x\.html$"
    with pytest.raises(ValueError, match=told):
        recording().export(".html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own.html",
            "ends in .html; that of a figure ends in .pdf or .svg or .png. Name it own.pdf.",
        ),
        ("own", "the name has no ending; that of a figure is .pdf, .svg or .png."),
        ("own.5", "the name does not end in .pdf, .svg or .png."),
    ],
)
def test_a_figure_is_not_saved_under_a_name_that_says_another_kind(
    tmp_path, monkeypatch, name, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        recording().figure(0, 0).save(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert str(caught.value).endswith(message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.safetensors", "a.SafeTensors", "a", "gpt-3.5", ".hidden"])
def test_names_that_say_nothing_else_are_taken_as_they_are(tmp_path, name):
    recording().save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert len(Recording.load(tmp_path / name).tokens) == 2


def test_names_of_pages_are_taken_as_they_are(tmp_path):
    for name in ("a.html", "a.HTM", "a"):
        recording().export(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"<!doctype html>")


def test_a_model_is_not_written_over_a_file_or_to_the_name_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"own\.safetensors: .*, and a model is a folder of files"):
        files.check_folder("own.safetensors")
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match=r"notes is a file, and a model is a folder\."):
        files.check_folder("notes")
    (tmp_path / "there.bin").mkdir()
    for name in ("there.bin", "model-1.5", "new/one", "."):
        files.check_folder(name)


@posix
def test_a_folder_that_may_not_be_listed_may_be_written_into(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *mode):  # what the system answers to anybody but root
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    recording().save(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
