"""A recording holds what a forward pass attended with, and its file is whole or not there."""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import regard
from regard.recording import Layer, Recording

TOKENS = ["Your", " journey", " starts", " with"]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def numbers(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def layer(Hq=4, Hkv=2, Lq=4, Lk=4, D=6, Dv=3, dtype=np.float32, **options):
    q, k = numbers(Hq, Lq, D, dtype=dtype), numbers(Hkv, Lk, D, dtype=dtype, seed=1)
    return Layer(q, k, numbers(Hkv, Lk, Dv, dtype=dtype, seed=2), **options)


def sample():
    masked = layer(
        causal=True,
        window=(2, 0),
        scale=0.25,
        softcap=30.0,
        query_start=0,
        key_lengths=3,
        segments=np.array([0, 0, 1, 1]),
        sinks=numbers(4),
        bias=numbers(4, 4, 4),
        mask=np.tri(4, dtype=bool),
    )
    return Recording(
        TOKENS, [layer(causal=True), masked, Layer(numbers(2, 4, 5), numbers(1, 4, 5))]
    )


def assert_same(found, expected):
    assert found.tokens == expected.tokens
    assert found.query_tokens == expected.query_tokens
    assert found.model == expected.model
    assert len(found.layers) == len(expected.layers)
    for a, b in zip(found.layers, expected.layers):
        assert a.options.keys() == b.options.keys()
        for name in a.options:
            np.testing.assert_equal(a.options[name], b.options[name])
            assert type(a.options[name]) is type(b.options[name])
        for x, y in ((a.query, b.query), (a.key, b.key), (a.value, b.value)):
            assert (x is None) == (y is None)
            if x is not None:
                assert (x.dtype, x.shape) == (y.dtype, y.shape)
                np.testing.assert_array_equal(
                    x.view(np.uint8), np.ascontiguousarray(y).view(np.uint8)
                )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


@pytest.fixture
def saved(path):
    sample().save(path)
    return path.read_bytes()


def test_weights_are_those_of_the_layer():
    recording = sample()
    assert len(recording.weights) == len(recording.layers) == 3
    for found, weights in zip(recording.layers, recording.weights):
        output = regard.attention(
            found.query, found.key, np.eye(4, dtype=np.float32)[None].repeat(found.key_heads, 0),
            **found.options,
        )  # fmt: skip
        np.testing.assert_allclose(weights[:], output, atol=1e-6)


def test_weights_are_made_once_and_counted_from_both_ends():
    recording = sample()
    assert recording.weights[2] is recording.weights[-1]
    with pytest.raises(IndexError, match=r"layer 3; there are 3, 0 to 2"):
        recording.weights[3]


def test_arrays_are_kept_as_they_come():
    q = numbers(2, 4, 8).swapaxes(0, 1)[:, :, ::2].swapaxes(0, 1)
    assert Layer(q, q).query is q
    tensor = torch.ones(1, 4, 2, dtype=torch.bfloat16, requires_grad=True)
    assert Recording(TOKENS, [Layer(tensor, tensor)]).layers[0].query is tensor


def test_queries_without_tokens_of_their_own_are_the_last_keys():
    assert Recording(TOKENS, [layer(Lq=2)]).query_tokens == (" starts", " with")
    assert Recording(TOKENS, [layer(Lq=2, query_start=1)]).query_tokens == (" journey", " starts")
    assert Recording(TOKENS, [layer(Lq=2, key_lengths=3)]).query_tokens == (" journey", " starts")
    assert Recording(TOKENS, [layer(key_lengths=3)]).query_tokens == tuple(TOKENS)


def test_cross_attention_has_query_tokens_of_its_own():
    recording = Recording(TOKENS, [layer(Lq=5)], query_tokens=list("abcde"))
    assert recording.query_tokens == tuple("abcde")
    with pytest.raises(regard.ShapeError, match=r"5 queries .* need query_tokens"):
        Recording(TOKENS, [layer(Lq=5)])
    with pytest.raises(regard.ShapeError, match="2 query_tokens, but 5 queries"):
        Recording(TOKENS, [layer(Lq=5)], query_tokens=["a", "b"])


def test_repr_tells_tokens_layers_heads_and_bytes():
    assert repr(Recording(TOKENS, [layer()], model="small")) == (
        "Recording(4 tokens, 1 layer, 4 heads, 672 B, model='small')"
    )
    two = Recording(TOKENS, [layer(), layer(Hq=2, D=500)])
    assert repr(two) == "Recording(4 tokens, 2 layers, 2 to 4 heads, 32.8 kB)"
    assert repr(layer(causal=True, sinks=numbers(4))) == (
        "Layer(query (4, 4, 6), key (2, 4, 6), value (2, 4, 3), causal=True, sinks)"
    )


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Recording([], [layer()]), regard.ShapeError, "no tokens; at least one"),
        (lambda: Recording(TOKENS, []), regard.ShapeError, "no layers; at least one"),
        (lambda: Recording("Your", [layer()]), TypeError, "tokens is one str; a list"),
        (lambda: Recording([1, 2, 3, 4], [layer()]), TypeError, r"tokens\[0\] is int; .*not ids"),
        (lambda: Recording(TOKENS, [1]), TypeError, r"layers\[0\] is int; every layer must be"),
        (lambda: Recording(TOKENS, [layer()], model=3), TypeError, "model is int; it must be"),
        (
            lambda: Recording(TOKENS[:3], [layer()]),
            regard.ShapeError,
            r"3 tokens, but layer 0 has 4 keys; one token per key(.|\n)*key \(2, 4, 6\)",
        ),
        (
            lambda: Recording(TOKENS, [layer(), layer(Lq=2)]),
            regard.ShapeError,
            "layer 1 has 2 queries and layer 0 has 4; make one recording for each",
        ),
        (lambda: layer(Hq=3), regard.ShapeError, "3 query heads cannot share 2 key heads"),
        (lambda: layer(Hq=0, Hkv=0), regard.ShapeError, "at least one head"),
        (
            lambda: Layer(numbers(2, 1, 4, 3), numbers(2, 1, 4, 3)),
            regard.ShapeError,
            r"query \(2, 1, 4, 3\) is not read as \(H, L, D\)",
        ),
        (
            lambda: Layer(numbers(1, 4, 3), numbers(1, 4, 3), numbers(1, 5, 3)),
            regard.ShapeError,
            "4 keys and 5 values",
        ),
        (lambda: Layer([1.0], [1.0]), TypeError, "query is a builtins.list"),
        (lambda: layer(dtype=np.int64), TypeError, "query is int64; floating numbers"),
        (lambda: layer(temperature=1.0), TypeError, "no option 'temperature' to record; there are"),
        (lambda: layer(dropout=0.5), TypeError, "no option 'dropout' to record"),
        (lambda: layer(key_lengths=np.array([3, 4])), TypeError, "there is no batch"),
        (lambda: layer(key_lengths=5), regard.ShapeError, "key_lengths are from 5 to 5"),
        (lambda: layer(query_start=2**60), ValueError, r"query_start lies beyond 2\*\*53"),
        (lambda: layer(causal=1), TypeError, "causal is 1; True or False"),
        (lambda: layer(window=(1, True)), TypeError, "window is True; an int is needed"),
        (lambda: layer(scale=float("nan")), ValueError, "scale is nan; it must be finite"),
        (lambda: layer(segments=np.zeros((2, 4), int)), regard.ShapeError, "one id each"),
        (lambda: layer(mask=numbers(4, 4)), TypeError, "mask is float32; a mask is bool"),
    ],
)  # fmt: skip
def test_what_cannot_be_recorded_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


# The file.


def test_what_is_saved_is_loaded(path, saved):
    assert_same(Recording.load(path), sample())
    np.testing.assert_array_equal(Recording.load(path).weights[1][:], sample().weights[1][:])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_recording_round_trips(data):
    draw = data.draw
    Hkv, group, Lk, Lq = (draw(st.integers(1, n)) for n in (2, 2, 4, 4))
    Lq = min(Lq, Lk)
    Hq = Hkv * group
    pair = (np.arange(Lq), np.arange(Lk, dtype=np.int8))
    options = {
        "causal": st.booleans(),
        "window": st.tuples(*[st.none() | st.integers(0, 2**53)] * 2),
        "scale": st.floats(allow_nan=False, allow_infinity=False),
        "softcap": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "key_lengths": st.integers(Lq, Lk),
        "query_start": st.integers(0, Lk - Lq),
        "segments": st.just(pair),
        "sinks": st.just(numbers(Hq)),
        "mask": st.just(np.ones((Lq, 1), bool)),
        "bias": st.just(numbers(Hq, 1, Lk, dtype=np.float16)),
    }
    layers = [
        layer(
            Hq, Hkv, Lq, Lk, draw(st.integers(1, 3)), draw(st.integers(0, 2)),
            draw(st.sampled_from(DTYPES)),
            **draw(st.fixed_dictionaries({}, optional=options)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]  # fmt: skip
    texts = st.text(st.characters(), max_size=5)
    tokens = draw(st.lists(texts, min_size=Lk, max_size=Lk))
    query_tokens = draw(st.none() | st.lists(texts, min_size=Lq, max_size=Lq))
    recording = Recording(tokens, layers, model=draw(texts), query_tokens=query_tokens)
    with tempfile.TemporaryDirectory() as folder:
        recording.save(Path(folder, "r"))
        assert_same(Recording.load(Path(folder, "r")), recording)


def test_any_text_is_a_token(path):
    tokens = ["\ud800", "\x00\x1b[31m", "</script>", "🙂\u202e", ""]
    Recording(tokens, [layer(Lq=5, Lk=5)], model="\udfff").save(path)
    assert Recording.load(path).tokens == tuple(tokens)
    assert Recording.load(path).model == "\udfff"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_tensors_come_back_as_arrays_of_the_same_numbers(path, dtype):
    tensor = torch.randn(2, 4, 6, generator=torch.manual_seed(0)).to(getattr(torch, dtype))
    tensor = tensor.requires_grad_()[..., ::2]
    found = Layer(tensor, tensor, None, sinks=torch.ones(2), segments=torch.arange(4))
    Recording(TOKENS, [found]).save(path)
    loaded = Recording.load(path).layers[0]
    assert loaded.query.dtype.name == dtype
    np.testing.assert_array_equal(loaded.query.astype(np.float64), tensor.detach().double().numpy())
    np.testing.assert_array_equal(loaded.options["segments"], np.arange(4))


def test_strides_and_byte_order_do_not_show_in_the_file(path):
    plain = numbers(2, 4, 6)
    strided = np.ascontiguousarray(plain.transpose(2, 0, 1)).transpose(1, 2, 0)
    Recording(TOKENS, [Layer(strided, plain, segments=np.arange(4, dtype=">i4"))]).save(path)
    loaded = Recording.load(path).layers[0]
    np.testing.assert_array_equal(loaded.query, plain)
    np.testing.assert_array_equal(loaded.options["segments"], np.arange(4))


def test_nan_and_infinity_are_numbers_to_record(path):
    q = np.array([[[np.nan, np.inf], [-np.inf, 0.0]]], np.float32)
    Recording(["a", "b"], [Layer(q, q)]).save(path)
    np.testing.assert_array_equal(Recording.load(path).layers[0].query, q)


def test_the_file_is_a_safetensors_file(path, saved):
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["layers.1.bias"], numbers(4, 4, 4))
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    assert (metadata["format"], metadata["version"]) == ("regard-recording", "1")
    assert json.loads(metadata["tokens"]) == TOKENS
    save_file(tensors, path, metadata)
    assert_same(Recording.load(path), sample())


def test_loading_maps_the_file_and_never_changes_it(path, saved):
    found = Recording.load(path)
    query = found.layers[0].query
    assert not query.flags.owndata
    assert query.flags.aligned
    with pytest.raises(ValueError, match="read-only"):
        query[:] = 0
    found.save(path)
    assert path.read_bytes() == saved


def test_bfloat16_without_ml_dtypes_is_widened_and_says_so(path, monkeypatch):
    q = numbers(2, 4, 6, dtype=ml_dtypes.bfloat16)
    Recording(TOKENS, [Layer(q, q)]).save(path)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.warns(UserWarning, match="widened to float32, exactly"):
        loaded = Recording.load(path).layers[0]
    np.testing.assert_array_equal(loaded.query, q.astype(np.float32))


WRITER = """
import os, signal, sys
import numpy as np
from pathlib import Path
from regard import _recording_file as file
from regard.recording import Layer, Recording

def killed(where):
    return lambda *args: os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((2, 2, 3000), np.float32)
recording = Recording(["new", "new"], [Layer(x, x, x)] * 3)
point, path = sys.argv[1], sys.argv[2]
if point.isdigit():
    whole, calls = file._bytes, []
    def some_bytes(array):
        calls.append(array)
        return whole(array) if len(calls) <= int(point) else killed(point)()
    file._bytes = some_bytes
elif point == "fsync":
    os.fsync = killed(point)
elif point == "replace":
    Path.replace = killed(point)
elif point == "folder":
    file._sync_folder = killed(point)
recording.save(path)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills the writer by a POSIX signal")
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("point", ["0", "4", "8", "fsync", "replace", "folder"])
def test_a_killed_writer_leaves_the_old_file_or_none(path, point, there):
    old = Recording(["old", "old"], [layer(Lq=2, Lk=2)])
    if there:
        old.save(path)
    ended = subprocess.run([sys.executable, "-c", WRITER, point, path], check=False)
    assert ended.returncode == -signal.SIGKILL
    if point == "folder":
        assert Recording.load(path).tokens == ("new", "new")
        return
    assert path.exists() == there
    if there:
        assert_same(Recording.load(path), old)
    left = [file for file in path.parent.iterdir() if file != path]
    assert all(file.suffix == ".tmp" for file in left)
    if point.isdigit():
        for file in left:
            with pytest.raises(regard.RecordingError):
                Recording.load(file)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside_it(path, saved, monkeypatch):
    def full(handle):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Recording(["a"], [layer(Lq=1, Lk=1)]).save(path)
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


def test_saving_through_a_link_replaces_what_it_points_to(path, saved, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    Recording(["a"], [layer(Lq=1, Lk=1)]).save(link)
    assert link.is_symlink()
    assert Recording.load(path).tokens == ("a",)


def test_a_folder_is_no_place_to_save_under(tmp_path):
    with pytest.raises(OSError, match="is no ordinary file; a recording needs a file name"):
        sample().save(tmp_path)
    with pytest.raises(FileNotFoundError):
        sample().save(tmp_path / "missing" / "r")


def test_a_header_beyond_the_limit_is_refused_before_writing(path, monkeypatch):
    monkeypatch.setattr("regard._recording_file.HEADER_LIMIT", 1000)
    with pytest.raises(
        regard.RecordingError, match="1000 fit into a safetensors header; save parts"
    ):
        sample().save(path)
    assert list(path.parent.iterdir()) == []


# Files that are no recordings, damaged or hostile.


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
    with pytest.raises(regard.RecordingError, match="is no ordinary file"):
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


@pytest.mark.parametrize("version", ["2", "999999999999999999999", "1.0", "", None, 1, "x" * 9999])
def test_another_version_is_refused_by_its_name(path, saved, version):
    header, data = parts(saved)
    header["__metadata__"]["version"] = version
    said = refusal(path, packed(header, data))
    assert "this regard reads 1" in said
    assert ("upgrade" in said) == (version in ("2", "999999999999999999999"))


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


@pytest.mark.parametrize("shift", [-4, 4])
def test_tensors_neither_overlap_nor_leave_gaps(path, saved, shift):
    header, data = parts(saved)
    header["layers.0.key"]["data_offsets"][0] += shift
    header["layers.0.key"]["data_offsets"][1] += shift
    assert "must start at" in refusal(path, packed(header, data))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", "", "tokens is no JSON"),
        ("tokens", "[" * 100_000, "tokens is no JSON"),
        ("tokens", "9" * 5000, "tokens is no JSON"),
        ("tokens", '"abcd"', "tokens is str; list is needed"),
        ("tokens", '["a", "b", "c", 7]', r"tokens[3] is int"),
        ("tokens", '["a", "b", "c", ["d"]]', r"tokens[3] is list"),
        ("tokens", '["a"]', "1 tokens, but layer 0 has 4 keys"),
        ("tokens", "[]", "no tokens"),
        ("tokens", ["a"], "its header has no tokens"),
        ("query_tokens", '["a"]', "1 query_tokens, but 4 queries"),
        ("query_tokens", "{}", "query_tokens is dict"),
        ("query_tokens", 4, "its header has no query_tokens"),
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
        ("options", '[{"scale": 1' + "0" * 400 + "}, {}, {}]", "too large"),
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
        (retyped("layers.0.query", "F32", [96]), "1 axes"),
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
