"""Files that are no recordings, damaged or hostile: each is refused by what is wrong with it."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import regard
from recordings import assert_same, sample
from regard.recording import Layer, Recording, _loading


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


@pytest.fixture
def saved(path):
    sample().save(path)
    return path.read_bytes()


def refusal(path, content):
    path.write_bytes(content)
    with pytest.raises(regard.RecordingError) as caught:
        Recording.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_a_missing_file_is_said_to_be_missing(path):
    with pytest.raises(FileNotFoundError, match=r"r\.safetensors: no such file; Recording\.save"):
        Recording.load(path)


def test_a_folder_is_no_recording(tmp_path):
    with pytest.raises(regard.RecordingError, match=" is a folder; the name of a file is needed"):
        Recording.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"short", "5 bytes, no safetensors file or a truncated one"),
        (b"Your journey starts with one step.", "no safetensors file"),
        (pickle.dumps({"tokens": ["a"]}), "a pickle, which regard never reads"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "a PNG picture"),
        (b"PK\x03\x04" + b"\xff" * 100, "a zip archive"),
        (b"\x93NUMPY\x01\x00v\x00" + bytes(100), "a NumPy array"),
        (b"\xff" * 64, "no safetensors file"),
        ((100).to_bytes(8, "little") + b"{" * 100, "is no JSON"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "is no JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "is no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "is no JSON object"),
        ((2).to_bytes(8, "little") + b"{}", "its format is None, not 'regard-recording'"),
    ],
)
def test_what_is_no_recording_is_told_what_it_is(path, content, message):
    assert message in refusal(path, content)


def test_another_safetensors_file_is_no_recording(path):
    save_file({"x": np.ones(3)}, path, {"format": "pt"})
    with pytest.raises(regard.RecordingError, match="its format is 'pt', not 'regard-recording'"):
        Recording.load(path)


def test_a_file_cut_anywhere_is_no_recording(path, saved):
    header = 8 + int.from_bytes(saved[:8], "little")
    cuts = {*range(0, 32), *range(32, header, 97), *range(header, len(saved), 61), len(saved) - 1}
    for cut in sorted(cuts):
        refusal(path, saved[:cut])
    assert "truncated" in refusal(path, saved[:-1])
    assert "damaged" in refusal(path, saved + b"\0")


def parts(content):
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def packed(header, data):
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


@pytest.mark.parametrize("version", ["5", "999999999999999999999", "1.0", "", None, 1, "x" * 9999])
def test_another_version_is_refused_by_its_name(path, saved, version):
    header, data = parts(saved)
    header["__metadata__"]["version"] = version
    said = refusal(path, packed(header, data))
    assert "this regard reads 1" in said
    assert ("upgrade" in said) == (version in ("5", "999999999999999999999"))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4, 4, 6], "data_offsets": [0, 10**30]},
        {"dtype": "F32", "shape": [2**40, 2**40, 2**40], "data_offsets": [0, 384]},
        {"dtype": "F32", "shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0] * 100, "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [4, 4, -6], "data_offsets": [0, 384]},
        {"dtype": "F32", "shape": [4, 4, 6.0], "data_offsets": [0, 384]},
        {"dtype": "F32", "shape": [True, True, True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "446", "data_offsets": [0, 384]},
        {"dtype": "F32", "shape": [4, 4, 6], "data_offsets": [384, 0]},
        {"dtype": "F32", "shape": [4, 4, 6], "data_offsets": [0]},
        {"dtype": "F32", "shape": [4, 4, 6], "data_offsets": {}},
        {"dtype": "F8_E4M3", "shape": [4, 4, 6], "data_offsets": [0, 96]},
        {"dtype": ["F32"], "shape": [4, 4, 6], "data_offsets": [0, 384]},
        {"dtype": "F32", "shape": [4, 4, 6]},
        [],
        None,
    ],
)
def test_a_tensor_that_lies_about_itself_is_damage(path, saved, entry):
    header, data = parts(saved)
    header["layers.0.query"] = entry
    assert "damaged" in refusal(path, packed(header, data))


def test_true_is_no_size(path):
    q = np.ones((1, 1, 1), np.float32)
    Recording(["a"], [Layer(q, q)]).save(path)
    header, data = parts(path.read_bytes())
    header["layers.0.query"]["shape"] = [1, 1, True]
    assert "damaged" in refusal(path, packed(header, data))


@pytest.mark.parametrize("shift", [-4, 4])
def test_tensors_neither_overlap_nor_leave_gaps(path, saved, shift):
    header, data = parts(saved)
    header["layers.0.key"]["data_offsets"][0] += shift
    header["layers.0.key"]["data_offsets"][1] += shift
    assert "must start at" in refusal(path, packed(header, data))


@pytest.mark.parametrize("first", [0, 1, -1], ids=["before all", "between two", "before the last"])
@pytest.mark.parametrize("hole", [1, 64])
def test_no_byte_lies_between_tensors(path, saved, first, hole):
    """Each tensor is whole and none overlap: bytes that no tensor owns may still say anything."""
    header, data = parts(saved)
    spans = [x["data_offsets"] for name, x in header.items() if name != "__metadata__"]
    begin = sorted(spans)[first][0]
    for span in spans:
        span[:] = [n + hole if span[0] >= begin else n for n in span]
    said = refusal(path, packed(header, data[:begin] + b"?" * hole + data[begin:]))
    assert f"it must start at {begin}" in said


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", "", "tokens is no JSON"),
        ("tokens", "[" * 100_000, "tokens is no JSON"),
        ("tokens", "9" * 5000, "tokens is no JSON"),
        ("tokens", '"abcd"', "tokens is str; list is needed"),
        ("tokens", '["a", "b", "c", 7]', r"tokens[3] is int"),
        ("tokens", '["a", "b", "c", ["d"]]', r"tokens[3] is list"),
        ("tokens", '["a"]', "1 token, but layer 0 has 4 keys"),
        ("tokens", "[]", "no tokens"),
        ("tokens", ["a"], "its header has no tokens"),
        ("query_tokens", '["a"]', "1 query_tokens, but 4 queries"),
        ("query_tokens", "{}", "query_tokens is dict"),
        ("query_tokens", 4, "its header has no query_tokens"),
        ("boundary", 4, "its header has no boundary"),
        ("boundary", '"a"', "boundary is str; int is needed"),
        ("boundary", "true", "boundary is bool; an int is needed"),
        ("boundary", "4", "boundary is 4; there are 4 tokens, 0 to 3"),
        ("boundary", "-1", "boundary is -1"),
        ("model", "3", "model is int"),
        ("options", "{}", "options is dict"),
        ("options", "[]", "belongs to no layer"),
        ("options", "[{}]", "tensor 'layers.1.bias' belongs to no layer"),
        ("options", "[{}, {}, {}, {}]", "layer 3 has no query"),
        ("options", "[[], {}, {}]", "layer 0 has options []"),
        ("options", '[{"temperature": 1}, {}, {}]', "are known"),
        ("options", '[{"bias": [1.0]}, {}, {}]', "are known"),
        ("options", '[{"causal": "yes"}, {}, {}]', "layer 0: attention: causal is 'yes'"),
        ("options", '[{"window": [1, 2, 3]}, {}, {}]', "window"),
        ("options", '[{"window": 1}, {}, {}]', "window"),
        ("options", '[{"window": [-1, 2]}, {}, {}]', "window"),
        ("options", '[{"window": [1, 1e3]}, {}, {}]', "window"),
        ("options", '[{"scale": NaN}, {}, {}]', "scale"),
        ("options", '[{"scale": 1e999}, {}, {}]', "scale"),
        ("options", '[{"scale": 1' + "0" * 400 + "}, {}, {}]", "scale is inf; it must be finite"),
        ("options", '[{"scale": true}, {}, {}]', "scale"),
        ("options", '[{"softcap": 0}, {}, {}]', "softcap"),
        ("options", '[{"query_start": 1' + "0" * 30 + "}, {}, {}]", "beyond 2**53"),
        ("options", '[{"key_lengths": 5}, {}, {}]', "key_lengths"),
        ("options", '[{"key_lengths": [4]}, {}, {}]', "key_lengths"),
    ],
)
def test_a_hostile_header_is_refused_by_what_is_wrong(path, saved, field, value, message):
    header, data = parts(saved)
    header["__metadata__"][field] = value
    assert message in refusal(path, packed(header, data))


def renamed(old, new):
    def change(header):
        header[new] = header.pop(old)

    return change


def retyped(name, dtype, shape):
    def change(header):
        header[name] |= {"dtype": dtype, "shape": shape}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (retyped("layers.0.query", "I32", [4, 4, 6]), "query is int32; floating numbers"),
        (retyped("layers.0.query", "U8", [4, 4, 24]), "query is uint8"),
        (retyped("layers.0.query", "F32", [8, 2, 6]), "layer 0 has 2;"),
        (retyped("layers.0.query", "F32", [4, 6, 4]), "one size D"),
        (retyped("layers.0.query", "F32", [96]), "1 axis"),
        (retyped("layers.0.value", "F32", [1, 8, 3]), "each key needs its own value"),
        (retyped("layers.1.segments", "F64", [4]), "segments is float64; integers"),
        (retyped("layers.1.mask", "U8", [4, 4]), "a mask is bool"),
        (renamed("layers.0.query", "layers.0.q"), "layer 0 has no query"),
        (renamed("layers.0.value", "../../etc/passwd"), "'../../etc/passwd' belongs to no layer"),
        (renamed("layers.1.segments", "layers.1.key_segments"), "segments"),
    ],
)
def test_tensors_that_do_not_fit_together_are_damage(path, saved, change, message):
    header, data = parts(saved)
    change(header)
    assert message in refusal(path, packed(header, data))


def test_a_byte_that_is_no_bool_still_becomes_one(path, saved):
    header, data = parts(saved)
    begin, end = header["layers.1.mask"]["data_offsets"]
    path.write_bytes(packed(header, data[:begin] + b"\x02" * (end - begin) + data[end:]))
    mask = Recording.load(path).layers[1].options["mask"]
    assert mask.view(np.uint8).max() == 1


def test_arrays_at_odd_places_are_still_read(path, saved):
    header, data = parts(saved)
    encoded = json.dumps(header).encode()
    encoded += b" " * (1 + -(8 + len(encoded)) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    assert_same(Recording.load(path), sample())
    assert Recording.load(path).layers[0].query.flags.aligned


def bytes_of_sample():
    with tempfile.TemporaryDirectory() as folder:
        sample().save(Path(folder, "r"))
        return Path(folder, "r").read_bytes()


VALID = bytes_of_sample()


def loads_or_refuses(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r")
        path.write_bytes(content)
        try:
            found = Recording.load(path)
        except regard.RecordingError:
            return
        assert len(found.tokens) == found.layers[0].key.shape[1]
        for one, weights in zip(found.layers, found.weights):
            assert weights.shape == (one.heads, len(found.query_tokens), len(found.tokens))
            weights[0, 0]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, 2200) | st.integers(0, len(VALID) - 1), st.integers(0, 255)),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 40),
)
def test_changed_bytes_are_refused_or_read_and_nothing_else(changes, cut):
    content = bytearray(VALID)
    for place, byte in changes:
        content[place] = byte
    loads_or_refuses(bytes(content[: len(content) - cut] if cut > 20 else content))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_header_is_refused_or_read_and_nothing_else(data):
    header, numbers_ = parts(VALID)
    metadata = header["__metadata__"]
    metadata["options"] = json.loads(metadata["options"])
    metadata["tokens"] = json.loads(metadata["tokens"])
    place = header
    while isinstance(place, (dict, list)) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            place[key] = data.draw(ANY_JSON)
            break
        place = place[key]
    if isinstance(header["__metadata__"], dict):
        for name in ("options", "tokens"):
            if not isinstance(metadata[name], str):
                metadata[name] = json.dumps(metadata[name])
    loads_or_refuses(packed(header, numbers_))


# Reading what is no longer there would end this process by a signal, so each question has its own.
CUT = """
import os, sys, tracemalloc
import regard
from regard.recording import Recording
from regard.viewer._maps import Where
from regard.viewer.answer import Answers

path, question = sys.argv[1:]
found = Recording.load(path)
answers = Answers([found])
row = "layer=0&head=0&query=3"
assert answers.answer("row", row).status == 200
os.truncate(path, 4096)
questions = {
    "layers": lambda: found.layers[0].query.sum(),
    "weights": lambda: found.weights[0][0, 3],
    "steps": lambda: found.steps(0, 0),
    "save": lambda: found.save(path + ".other.safetensors"),
    "export": lambda: found.export(path + ".html"),
    "scores": lambda: __import__("regard.heads").heads.head_scores(found),
}
if question == "viewer":
    answer = answers.answer("row", row)
    print(answer.status, answer.body.decode())
elif question == "map":
    print(repr(found))
    try:
        answers._maps[Where(0, 0, 0)].row(3)
    except regard.RecordingError as error:
        print(error)
else:
    try:
        questions[question]()
    except regard.RecordingError as error:
        print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cuts no file that is mapped")
@pytest.mark.parametrize(
    "question", ["layers", "weights", "steps", "save", "export", "scores", "viewer", "map"]
)
def test_a_file_that_is_cut_while_it_is_open_is_an_error_and_not_the_end_of_python(path, question):
    q = np.ones((1, 600, 16), np.float32)
    Recording(["a"] * 600, [Layer(q, q, q, causal=True)]).save(path)
    size = path.stat().st_size
    line = [sys.executable, "-W", "error", "-c", CUT, str(path), question]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    said = f"{path} was cut to 4096 bytes while it was open; {size} are needed. Write it anew and"
    assert said in ended.stdout
    assert "Recording.load(path, mapped=False) keeps the numbers" in ended.stdout
    assert ended.stdout.startswith("410 ") == (question == "viewer")


def test_a_file_that_is_replaced_while_it_is_open_goes_on_to_be_read(path, saved):
    found = Recording.load(path)
    Recording(["other"], [Layer(*np.ones((2, 1, 1, 1), np.float32))]).save(path)
    assert_same(found, sample())
    path.unlink()
    assert_same(found, sample())


def test_a_file_that_is_cut_while_it_is_copied_is_a_recording_error(path, monkeypatch):
    q = np.ones((1, 600, 600), np.float32)
    Recording(["a"] * 600, [Layer(q, q)]).save(path)
    checked = _loading._read_spans

    def cut(*arguments):
        os.truncate(path, 4096)
        return checked(*arguments)

    monkeypatch.setattr(_loading, "_read_spans", cut)
    with pytest.raises(regard.RecordingError, match="was cut while it was read; load it again"):
        Recording.load(path, mapped=False)
