"""What a model is trained on."""

import re
from pathlib import Path

import numpy as np
import pytest

from regard.lm.corpus import Batches, encode_texts, is_held_out, read_texts, standard_library

IDS = np.arange(1000, dtype=np.uint16)


def batches(**options):
    return Batches(IDS, 5000, **({"size": 4, "length": 50, "seed": 1} | options))


def test_texts_are_read_as_they_are(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x\r\ny \xc3\xa9")
    (tmp_path / "b.txt").write_bytes(b"")
    texts = read_texts([tmp_path / "b.txt", str(tmp_path / "a.txt")])
    assert texts == {str(tmp_path / "b.txt"): "", str(tmp_path / "a.txt"): "x\r\ny é"}


def test_a_byte_order_mark_is_no_text_and_bytes_are_counted_with_it(tmp_path):
    path, mark = tmp_path / "a.txt", "\ufeff".encode()
    path.write_bytes(mark + b"x " + mark)
    assert read_texts([path]) == {str(path): "x \ufeff"}
    path.write_bytes(mark)
    with pytest.raises(ValueError, match="No text to train on"):
        read_texts([path])
    path.write_bytes(mark + b"x\xff")
    with pytest.raises(ValueError, match="byte 4 is no UTF-8"):
        read_texts([path])


def test_a_file_that_is_no_text_is_an_error(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"ok\xff\xd8")
    with pytest.raises(ValueError, match=r"picture.png: not a text; byte 2 is no UTF-8. Leave"):
        read_texts([tmp_path / "picture.png"])


def test_a_file_with_a_zero_byte_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("import os".encode("utf-16-le"))
    with pytest.raises(ValueError, match=r"a.txt: not a text; byte 1 is zero. Leave"):
        read_texts([tmp_path / "a.txt"])


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing.txt"):
        read_texts([tmp_path / "nothing.txt"])


def test_no_files_and_empty_files_are_errors(tmp_path):
    (tmp_path / "empty").touch()
    for files in ([], [tmp_path / "empty"]):
        with pytest.raises(ValueError, match="No text to train on: name at least one file"):
            read_texts(files)


@pytest.mark.parametrize("name", ["a.txt", b"a.txt", Path("a.txt")])
def test_one_name_instead_of_a_list_is_an_error(name):
    message = re.escape(f"files is {name!r}, one name; a list is needed: [{name!r}].")
    with pytest.raises(TypeError, match=message):
        read_texts(name)


def test_the_standard_library_comes_without_tests_and_with_documentation():
    texts = standard_library()
    assert {"argparse.py", "json/decoder.py", "pydoc_data/topics.py/lambda"} <= set(texts)
    assert "pydoc_data/topics.py" not in texts
    assert not [name for name in texts if "/test" in name or "site-packages" in name]
    assert texts["pydoc_data/topics.py/lambda"].startswith("Lambdas")


def test_about_one_text_in_twenty_is_held_out_always_the_same():
    held = [n for n in range(10_000) if is_held_out(f"file{n}.py")]
    assert 400 < len(held) < 600
    assert is_held_out("traceback.py")
    assert not is_held_out("argparse.py")


def test_each_text_begins_with_bos(tiny):
    ids = encode_texts({"a": "import", "b": "", "c": "os"}, tiny.tokenizer)
    one, two = (tiny.tokenizer.encode(text) for text in ("import", "os"))
    bos = tiny.tokenizer.bos
    assert ids.tolist() == [bos, *one, bos, bos, *two]


def test_a_batch_depends_on_seed_and_step_alone():
    drawn = [batches()[step] for step in range(12)]
    again = batches()
    for step in (11, 3, 7, 0):
        np.testing.assert_array_equal(again[step], drawn[step])
    assert not np.array_equal(batches(seed=2)[3], drawn[3])


def test_an_epoch_reads_every_piece_once():
    pieces = batches().pieces
    rows = np.concatenate([batches(size=1)[n] for n in range(pieces)])
    assert (rows[:, 0] == 5000).all()
    starts = np.sort(rows[:, 1])
    assert (np.diff(starts) == 50).all()
    np.testing.assert_array_equal(rows[:, 1:], rows[:, 1:2] + np.arange(50))


def test_repeats_say_their_beginning_over_and_over():
    plain, repeated = batches()[3], batches(repeats=2)[3]
    np.testing.assert_array_equal(repeated[:2], plain[:2])
    for row, source in zip(repeated[2:, 1:], plain[2:, 1:]):
        period = next(p for p in range(1, 51) if row[p] == row[0])
        assert 16 <= period <= 25
        np.testing.assert_array_equal(row, np.resize(source[:period], 50))


def test_a_corpus_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="too short: 99 tokens, and pieces of 50 need 100"):
        Batches(IDS[:99], 5000, size=1, length=50)
    assert Batches(IDS[:100], 5000, size=1, length=50)[0].shape == (1, 51)
