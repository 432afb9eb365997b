"""What is saved is loaded, and the file is whole or not there."""

import copy
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import tracemalloc
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
from recordings import DTYPES, TOKENS, assert_same, layer, numbers, sample
from regard import Edit
from regard.recording import Layer, Recording, _saving


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


@pytest.fixture
def saved(path):
    sample().save(path)
    return path.read_bytes()


def test_what_is_saved_is_loaded(path, saved):
    assert_same(Recording.load(path), sample())
    np.testing.assert_array_equal(Recording.load(path).weights[1][:], sample().weights[1][:])


@pytest.mark.parametrize(
    ("name", "given", "error", "told"),
    [
        ("number", 1, ValueError, "layer 0 was given the number 1 since"),
        ("number", 7, ValueError, "layer 0 was given the number 7 since"),
        ("name", 5, TypeError, r"the name of layer 0 is an int; .*str"),
        ("head_numbers", (1,), regard.ShapeError, "1 head_numbers for 4 query heads"),
        ("head_numbers", (1, 2, 3, 1), ValueError, "head_numbers are 1, 2, 3, 1; each"),
    ],
)
def test_a_layer_that_was_renamed_past_its_recording_is_not_saved(path, name, given, error, told):
    """No such file could be opened, or its layers would have other numbers."""
    recording = Recording(TOKENS, [layer(), layer()])
    setattr(recording.layers[0], name, given)
    with pytest.raises(error, match=told):
        recording.save(path)
    assert not path.exists()
    one = layer()
    one.number, one.name = 5, "five"
    Recording(TOKENS, [one]).save(path)
    assert Recording.load(path).layer_numbers == (5,)


def edits(*counts):
    spans = (
        st.none() | st.integers(-n, n - 1) | st.builds(slice, st.integers(0, n)) for n in counts
    )
    return st.builds(Edit, *spans, st.floats(0, 1e300))


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
        "intervals": st.just((np.arange(Lq), np.full(Lq, Lk, np.int32))),
        "sinks": st.just(numbers(Hq)),
        "mask": st.just(np.ones((Lq, 1), bool)),
        "bias": st.just(numbers(Hq, 1, Lk, dtype=np.float16)),
        "edits": st.lists(edits(Hq, Lq, Lk), max_size=3),
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
    starts = {one.query_start for one in layers}
    query_tokens = draw(st.lists(texts, min_size=Lq, max_size=Lq))
    if len(starts) == 1 and min(starts) >= 0 and draw(st.booleans()):
        query_tokens = None
    boundary = draw(st.none() | st.integers(0, Lk - 1))
    recording = Recording(
        tokens, layers, model=draw(texts), query_tokens=query_tokens, boundary=boundary
    )
    with tempfile.TemporaryDirectory() as folder:
        recording.save(Path(folder, "r"))
        assert_same(Recording.load(Path(folder, "r")), recording)


def test_a_file_without_a_boundary_has_none(path, saved):
    assert b'"boundary"' not in saved
    assert Recording.load(path).boundary is None


@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy])
def test_options_without_axes_come_back(path, library):
    x = library(numbers(2, 4, 3))
    options = {"mask": library(np.array(True)), "bias": library(np.array(0.5, np.float32))}
    Recording(TOKENS, [Layer(x, x, **options)]).save(path)
    for mapped in (True, False):
        (found,) = Recording.load(path, mapped=mapped).layers
        assert [found.options[name].shape for name in options] == [(), ()]
        assert (bool(found.options["mask"]), float(found.options["bias"])) == (True, 0.5)


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


def test_every_array_lies_at_a_multiple_of_its_item_size(path):
    odd = np.ones((3, 1), bool)
    q, half = numbers(1, 3, 1, dtype=np.float64), numbers(1, 3, 1, dtype=np.float16)
    Recording(["a", "b", "c"], [Layer(half, half, mask=odd), Layer(q, q)]).save(path)
    for found in Recording.load(path).layers:
        assert not found.query.flags.owndata  # mapped, not copied to a better place
        assert found.query.flags.aligned


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
from regard._base import files
from regard.recording import _saving as file
from regard.recording import Layer, Recording

def killed(where):
    return lambda *args: os.kill(os.getpid(), signal.SIGKILL)

x = np.ones((2, 2, 3000), np.float32)
recording = Recording(["new", "new"], [Layer(x, x, x)] * 3)
point, path = sys.argv[1], sys.argv[2]
if point.isdigit():
    whole, calls = file.Target.add, []
    def some_arrays(target, array):
        calls.append(array)
        return whole(target, array) if len(calls) <= int(point) else killed(point)()
    file.Target.add = some_arrays
elif point == "fsync":
    os.fsync = killed(point)
elif point == "replace":
    Path.replace = killed(point)
elif point == "folder":
    files._sync_folder = killed(point)
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


@pytest.mark.parametrize("mapped", [True, False])
def test_a_recording_can_be_copied_and_sent_to_another_process(path, saved, mapped):
    found = Recording.load(path, mapped=mapped)
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert_same(copied, sample())


def test_what_is_not_mapped_stays_whatever_becomes_of_the_file(path, saved):
    found = Recording.load(path, mapped=False)
    path.write_bytes(bytes(len(saved)))
    os.truncate(path, 0)
    assert_same(found, sample())
    assert all(layer.query.flags.aligned for layer in found.layers)
    assert not found.layers[0].query.flags.writeable


def test_a_header_beyond_the_limit_is_refused_before_writing(path, monkeypatch):
    monkeypatch.setattr("regard.recording._saving.HEADER_LIMIT", 1000)
    with pytest.raises(
        regard.RecordingError, match="1000 fit into a safetensors header; save parts"
    ):
        sample().save(path)
    assert list(path.parent.iterdir()) == []


@settings(deadline=None)
@given(data=st.data())
def test_arrays_of_any_strides_are_written_in_order(data):
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
    axes = data.draw(st.permutations(range(len(shape))))
    steps = data.draw(st.tuples(*[st.sampled_from([1, 2, -1])] * len(shape)))
    dtype = data.draw(st.sampled_from([*DTYPES, np.bool_, ">f4", ">i8"]))
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    x = x.transpose(axes)[tuple(slice(None, None, step) for step in steps)]
    room, written = _saving.Room(data.draw(st.sampled_from([8, 64, 1 << 18]))), io.BytesIO()
    target = _saving.Target(written, room)
    target.add(x)
    target.flush()
    assert written.getvalue() == x.astype(x.dtype.newbyteorder("<")).tobytes()


def test_loading_and_saving_hold_no_copy(path):
    x = np.zeros((2, 4, 1_000_000), np.float32).swapaxes(0, 1)[:2]  # 16 MB, strided
    recording = Recording(["a", "b"], [Layer(x, x, x)] * 2)
    with _saving.room():  # which is kept from file to file
        pass
    tracemalloc.start()
    recording.save(path)
    _, while_saving = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    loaded = Recording.load(path)
    _, while_loading = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 96e6
    assert while_saving < 1e6
    assert while_loading < 1e6
    assert loaded.layers[1].value.shape == (2, 2, 1_000_000)
