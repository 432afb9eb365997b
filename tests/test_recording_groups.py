"""Groups of layers in one recording and one file, and a file that is written layer by layer."""

import base64
import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import regard
from recordings import TOKENS, assert_same, layer, numbers, sample
from regard.recording import Grid, Layer, Recording, Writer, _writer

WORDS = ["<s>", "Dein", " Weg"]
PATCHES = [f"patch {n}" for n in range(6)]


def whole():
    """A pass of a model that reads a picture and writes a text: three pairs of lengths."""
    encoder = Recording(PATCHES, [layer(Lq=6, Lk=6), layer(Lq=6, Lk=6)], grids=[Grid(0, 2, 3)])
    cross = Recording(
        PATCHES,
        [layer(2, 1, Lq=3, Lk=6, number=1, head_numbers=(0, 5), name="decoder.1.cross")],
        query_tokens=WORDS,
        grids=[Grid(0, 2, 3)],
    )
    return Recording(
        WORDS,
        [layer(Lq=3, Lk=3, causal=True, number=n, name=f"decoder.{n}") for n in (1, 3)],
        model="whole",
        boundary=1,
        group="decoder",
        others={"encoder": encoder, "cross": cross},
    )


def assert_all_same(found, expected):
    assert [*found.groups] == [*expected.groups]
    for name, group in found.groups.items():
        assert group.group == name
        assert_same_group(group, expected.groups[name])


def assert_same_group(found, expected):
    # The groups of the whole, and of a part of it alone, differ.
    assert_same(*(Recording(
        x.tokens, x.layers, model=x.model, query_tokens=x.query_tokens, boundary=x.boundary,
        grids=x.grids, group=x.group,
    ) for x in (found, expected)))  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


def test_groups_are_whole_recordings_by_name_its_own_first():
    recording = whole()
    assert [*recording.groups] == ["decoder", "encoder", "cross"]
    assert recording.groups["decoder"] is recording
    cross = recording.groups["cross"]
    assert cross.group == "cross"
    assert [*cross.groups] == ["cross"]
    assert cross.weights[1][5].shape == (3, 6)
    assert cross.picture(1, 5, -1).shape == (2, 3)
    assert cross.steps(1, 0).query.shape == (3, 6)
    alone = Recording(TOKENS, [layer()])
    assert alone.group == ""
    assert alone.groups == {"": alone}


def test_repr_tells_the_groups():
    assert repr(whole()) == (
        "Recording('decoder': 3 tokens, 2 layers, 4 heads, 1.0 kB; 'encoder': 6 tokens, 2 layers,"
        " 4 heads, 2.0 kB; 'cross': 6 tokens, 1 layer, 2 heads, 360 B, model='whole')"
    )
    assert repr(whole().groups["cross"]) == (
        "Recording('cross': 6 tokens, 1 layer, 2 heads, 360 B)"
    )


def test_a_group_does_not_rename_what_it_is_made_of():
    encoder = Recording(TOKENS, [layer()])
    recording = Recording(TOKENS, [layer()], group="a", others={"b": encoder})
    assert encoder.group == ""
    assert recording.groups["b"].group == "b"
    assert recording.groups["b"].layers is encoder.layers
    again = Recording(TOKENS, [layer()], group="c", others={"b": recording.groups["b"]})
    assert again.groups["b"] is recording.groups["b"]


def test_what_is_assigned_is_checked_as_what_a_recording_is_made_of(path):
    recording = whole()
    for name, bad, error in (
        ("group", "cross", ValueError), ("group", "", ValueError), ("group", 5, TypeError),
        ("boundary", 7, ValueError), ("boundary", 1.5, TypeError), ("model", None, TypeError),
        ("grids", [(0, 1, 5)], ValueError),
    ):  # fmt: skip
        before = getattr(recording, name)
        with pytest.raises(error, match="recording: "):
            setattr(recording, name, bad)
        assert getattr(recording, name) == before
    recording.group, recording.boundary, recording.grids = "text", np.int64(1), [(0, 1, 2)]
    recording.groups["cross"].group = "other"
    recording.save(path)
    found = Recording.load(path)
    assert [*found.groups] == [*recording.groups] == ["text", "encoder", "other"]
    assert (found.boundary, found.grids[0].stop) == (1, 2)
    recording.groups["other"].group = "text"
    with pytest.raises(ValueError, match="two groups have the name 'text'"):
        recording.save(path)
    assert [*Recording.load(path).groups] == ["text", "encoder", "other"]


@pytest.mark.parametrize("mapped", [True, False])
def test_all_groups_are_saved_and_loaded(path, mapped):
    recording = whole()
    recording.save(path)
    found = Recording.load(path, mapped=mapped)
    assert_all_same(found, recording)
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert_all_same(copied, recording)
    found.groups["cross"].save(path)
    assert_same(Recording.load(path), recording.groups["cross"])


def test_a_group_of_a_file_that_was_cut_says_so(path):
    whole().save(path)
    cross = Recording.load(path).groups["cross"]
    os.truncate(path, 100)
    with pytest.raises(regard.RecordingError, match="was cut to 100 bytes"):
        cross.weights  # noqa: B018


def test_a_recording_without_queries_comes_back(path):
    recording = Recording(TOKENS, [layer(Lq=0)])
    recording.save(path)
    assert Recording.load(path).query_tokens == ()
    assert_same(Recording.load(path), recording)


def test_a_file_with_groups_has_a_version_of_its_own(path):
    whole().save(path)
    metadata = safe_open(path, "np").metadata()
    assert metadata["version"] == "2"
    assert json.loads(metadata["group"]) == "decoder"
    assert [other["group"] for other in json.loads(metadata["others"])] == ["encoder", "cross"]
    tensors = load_file(path)
    np.testing.assert_array_equal(tensors["layers.1.query"], numbers(4, 3, 6))
    np.testing.assert_array_equal(tensors["others.1.layers.0.key"], numbers(1, 6, 6, seed=1))


@pytest.mark.parametrize(
    "recording",
    [sample(), Recording(["a"], [layer(Lq=1, Lk=1)], model="m", query_tokens=["b"], boundary=0)],
)
def test_a_file_without_groups_numbers_and_grids_is_what_it_was(path, recording):
    recording.save(path)
    metadata = safe_open(path, "np").metadata()
    known = {"format", "version", "model", "tokens", "options", "query_tokens", "boundary"}
    assert metadata.keys() <= known
    assert metadata["version"] == "1"


# Recording(["ab", "c"], [Layer(q, q, q, causal=True)] * 2, model="old", boundary=1).save(...) of
# regard 0.1.0, q = np.arange(4, dtype=np.float32).reshape(1, 2, 2).
OLD = zlib.decompress(
    base64.b64decode(
        b"eNqtUk1vgzAMnfZLkM9exZcQ49Ke9icIQm5juqpAuhCqIYS0nz7DLkU7TK1mRVH8nv2cF+Xz+WmJEcqyYUeaHJUl"
        b"ZCNUxjbkIAPLR7L6xfLBWH1qj4BwZdudTCtkIFljNNdyVmBqrUAQZ87cdgLlCmivAD0FBwWFUObipHPhRgGp76hW"
        b"kHnO9jyh9xubm/ambzXZYRk4IdQ0yA02/uaj5xkdQbvhwkK/RaHUd+80Z3mAIYYFwuLKVFXHTibnPgZJcStz5vtF"
        b"ggSjcKVypbrnu3WiEOP0Rid40FScYhKvdB5xlcSY+iuVx1ylPr7KG0/eH/Hz+762su1k7f47/waMcMj2"
    )
)


def test_an_old_file_loads_and_is_written_with_the_same_bytes(path):
    path.write_bytes(OLD)
    found = Recording.load(path)
    q = np.arange(4, dtype=np.float32).reshape(1, 2, 2)
    expected = [Layer(q, q, q, causal=True)] * 2
    assert_same(found, Recording(["ab", "c"], expected, model="old", boundary=1))
    assert (found.group, found.grids, found.layer_numbers) == ("", (), (0, 1))
    found.save(path)
    assert path.read_bytes() == OLD


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        ({"group": 3}, TypeError, "group is int; it must be a str"),
        ({"others": [sample()]}, TypeError, "others is list; a dict of a name and a Recording"),
        ({"others": {"b": sample()}}, ValueError, 'so these layers need a name too: group="'),
        ({"group": "a", "others": {"a": sample()}}, ValueError, "others has the name 'a'; a new"),
        ({"group": "a", "others": {"": sample()}}, ValueError, "others has the name ''; a new one"),
        ({"group": "a", "others": {1: sample()}}, TypeError, "others has int: Recording; a name"),
        ({"group": "a", "others": {"b": 1}}, TypeError, "others has str: int; a name and a Rec"),
        (
            {"group": "a", "others": {"b": whole()}},
            ValueError,
            r"others\['b'\] has groups of its own; give each of 'decoder', 'encoder', 'cross' by",
        ),
    ],
)
def test_groups_that_cannot_be_are_said(make, error, message):
    with pytest.raises(error, match=message):
        Recording(TOKENS, [layer()], **make)


# A writer, layer by layer.


def facts(group):
    return {
        "tokens": group.tokens,
        "query_tokens": group.query_tokens,
        "boundary": group.boundary,
        "grids": group.grids,
    }


def write(path, recording, **options):
    with Writer(path, **options) as writer:
        for name, group in recording.groups.items():
            for found in group.layers:
                writer.add(found, group=name)
        told = {name: facts(group) for name, group in recording.groups.items()}
        writer.finish(told, model=recording.model)


@pytest.mark.parametrize("make", [sample, whole])
@pytest.mark.parametrize("options", [{}, {"tokens": 1000}])
def test_a_writer_writes_what_save_does(path, make, options):
    write(path, make(), **options)
    found = Recording.load(path)
    assert [*found.groups] == [*make().groups]
    for name, group in found.groups.items():
        expected = make().groups[name]
        expected.model = make().model  # one for all groups
        assert_same_group(group, expected)
    arrays = load_file(path)
    make().save(path)
    saved = load_file(path)
    assert arrays.keys() == saved.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, saved[name])


def test_groups_may_be_written_in_turns(path):
    recording = whole()
    with Writer(path) as writer:
        writer.add(recording.layers[0], group="decoder")
        for found in recording.groups["encoder"].layers:
            writer.add(found, group="encoder")
        writer.add(recording.groups["cross"].layers[0], group="cross")
        writer.add(recording.layers[1], group="decoder")
        writer.finish({name: facts(x) for name, x in recording.groups.items()}, model="whole")
    assert [*Recording.load(path).groups] == [*recording.groups]
    assert_same_group(Recording.load(path), recording)


def test_a_writer_keeps_every_array_at_a_multiple_of_its_item_size(path):
    odd, q = np.ones((3, 1), bool), numbers(1, 3, 1, dtype=np.float64)
    half, ids = numbers(1, 3, 1, dtype=np.float16), np.arange(3, dtype=np.int8)
    layers = [
        Layer(half, half, mask=odd, segments=ids), Layer(q, q),
        Layer(q.astype(np.float32), q.astype(np.float32), mask=odd), Layer(q, q),
    ]  # fmt: skip
    recording = Recording(["a", "b", "c"], layers)
    write(path, recording)
    found = Recording.load(path)
    assert_same(found, recording)
    for one in found.layers:
        assert one.query.flags.aligned
        assert not one.query.flags.owndata  # mapped, not copied to a better place
    assert load_file(path).keys() == {name for name in json_header(path) if name[0] != "_"}


def json_header(path):
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


@pytest.mark.parametrize("chunk", [1 << 20, 64, 7])
def test_a_header_that_outgrows_its_room_moves_the_arrays(path, monkeypatch, chunk):
    monkeypatch.setattr(_writer, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(_writer, "ROOM", 64)
    for tokens in (0, 3):
        write(path, whole(), tokens=tokens)
        assert [*Recording.load(path).groups] == ["decoder", "encoder", "cross"]
        assert_same_group(Recording.load(path), whole())
        load_file(path)


def test_room_for_the_tokens_is_left_so_that_nothing_moves(path, monkeypatch):
    tokens = [f" to⏎ken{n}" for n in range(3000)]
    x = np.zeros((1, 3000, 2), np.float32)
    monkeypatch.setattr(_writer, "_move", None)
    write(path, Recording(tokens, [Layer(x, x)]), tokens=3000)
    assert Recording.load(path).tokens == tuple(tokens)


def test_a_writer_takes_tensors_and_holds_no_copy(path):
    x = torch.zeros(2, 2, 1_000_000, dtype=torch.bfloat16).requires_grad_()  # 8 MB
    found = Layer(x[:, :, ::2], x[:, :, ::2])
    with _writer._saving.room():  # which is kept from file to file
        pass
    tracemalloc.start()
    with Writer(path) as writer:
        for _ in range(3):
            writer.add(found)
        writer.finish({"": {"tokens": ["a", "b"]}})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6  # what NumPy copies is traced
    assert path.stat().st_size > 24e6
    assert Recording.load(path).layers[2].query.shape == (2, 2, 500_000)


@pytest.mark.parametrize("size", [1 << 7, 1 << 10, 1 << 22])
def test_arrays_that_are_gathered_and_those_that_are_not_make_one_file(path, size, monkeypatch):
    monkeypatch.setattr(_writer._saving, "ROOM_BYTES", size)
    monkeypatch.setattr(_writer._saving, "_spare", [])
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    x = torch.arange(600.0).reshape(2, 3, 100)
    layers = [
        Layer(x, x[:, :, ::2].repeat(1, 1, 2)), Layer(x.bfloat16(), x.bfloat16()),
        Layer(x[..., :5], x[..., 5:10], x.swapaxes(1, 2)[:, :3]),
        Layer(x.numpy()[..., ::3], x.numpy()[..., ::3], mask=np.ones((1, 3), bool)),
    ]  # fmt: skip
    recording = Recording(["a", "b", "c"], layers)
    write(path, recording)
    written = {name: x.copy() for name, x in load_file(path).items() if "layers.1" not in name}
    recording.save(path)
    for name, array in written.items():
        np.testing.assert_array_equal(array, load_file(path)[name])
    found = Recording.load(path, mapped=False)
    for one, given in zip(found.layers, layers):
        for name in ("query", "key", "value"):
            x = getattr(given, name)
            x = x.float() if isinstance(x, torch.Tensor) else x
            if x is not None:
                np.testing.assert_array_equal(getattr(one, name).astype(np.float32), x)


def test_writers_of_a_batch_share_the_memory_of_one():
    file = _writer._saving
    sizes = []
    for parts in (1, 3, 10**6):
        with file.room(parts) as room:
            sizes.append(len(room))
            assert len(room) % file.ALIGNMENT == 0
    assert sizes == [file.ROOM_BYTES, file.ROOM_BYTES // 3 // 64 * 64, file.LEAST_ROOM]


def test_an_error_in_the_block_leaves_the_old_file_or_none(path):
    for there in (False, True):
        if there:
            sample().save(path)
        with contextlib.suppress(KeyError), Writer(path) as writer:
            writer.add(Layer(numbers(1, 1, 1), numbers(1, 1, 1), mask=np.ones((1, 1), bool)))
            raise KeyError
        with contextlib.suppress(KeyError), Writer(path) as writer:
            writer.add(layer())
            writer.finish({"": {"tokens": TOKENS}})
            assert path.exists() == there
            raise KeyError
        assert [*path.parent.iterdir()] == [path] * there
    assert_same(Recording.load(path), sample())


def test_a_block_without_finish_leaves_nothing(path):
    with Writer(path) as writer:
        writer.add(layer())
    with Writer(path):
        pass
    assert not [*path.parent.iterdir()]


def test_a_layer_that_was_written_in_part_is_never_finished(path, monkeypatch):
    with Writer(path) as writer:
        writer.add(layer())
        with monkeypatch.context() as patch:
            patch.setattr(_writer._saving.Target, "add", lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                writer.add(layer())
        with pytest.raises(RuntimeError, match="is broken: it failed to write a layer"):
            writer.finish({"": {"tokens": TOKENS}})
    assert not [*path.parent.iterdir()]


KILLED = """
import os, signal, sys
import numpy as np
from regard.recording import Layer, Writer

x = np.ones((2, 2, 3000), np.float32)
with Writer(sys.argv[1]) as writer:
    writer.add(Layer(x, x, mask=np.ones((1, 1), bool)))
    if sys.argv[2] == "finish":
        writer.finish({"": {"tokens": ["new", "new"]}})
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills the writer by a POSIX signal")
@pytest.mark.parametrize("point", ["add", "finish"])
def test_a_killed_writer_leaves_the_old_file(path, point):
    sample().save(path)
    ended = subprocess.run([sys.executable, "-c", KILLED, path, point], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert_same(Recording.load(path), sample())
    left = [file for file in path.parent.iterdir() if file != path]
    assert all(file.suffix == ".tmp" for file in left)
    if point == "add":
        for file in left:
            with pytest.raises(regard.RecordingError):
                Recording.load(file)


RENAMED = [
    ("name", 5, TypeError, "Layer: name is int; it must be a str"),
    ("number", "x", TypeError, "number is 'x'; an int"),
    ("number", -1, ValueError, "number is -1; a number from 0"),
    ("head_numbers", (1,), regard.ShapeError, "1 head_numbers for 4 query heads"),
]


def test_a_writer_says_what_it_cannot_write(path):
    for make, error, message in (
        (lambda: Writer(path.with_suffix(".pt")), ValueError, "recording ends in .safetensors"),
        (lambda: Writer(path, tokens="3"), TypeError, "tokens is '3'; the number that is expected"),
        (lambda: Writer(path, tokens=-1), ValueError, "tokens is -1; it must not be negative"),
        (lambda: Writer(path).add(layer()), RuntimeError, "is not open: it is used as with Writer"),
        (lambda: Writer(path).finish({}), RuntimeError, "is not open"),
        (lambda: Writer(path / "missing" / "r").__enter__(), OSError, "missing"),
    ):
        with pytest.raises(error, match=message):
            make()

    def finish(groups, **options):
        with Writer(path) as writer:
            writer.add(layer(), group="a")
            writer.add(layer(Lq=2), group="b")
            writer.finish(groups, **options)

    own = {"tokens": TOKENS}
    for groups, error, message in (
        ([], TypeError, "groups is list; a dict is needed"),
        ({"a": own}, ValueError, r"groups is of \['a'\], and layers were added to \['a', 'b'\]"),
        ({"a": own, "b": own, "c": own}, ValueError, r"groups is of \['a', 'b', 'c'\], and"),
        ({"a": own, "b": {}}, TypeError, "tokens"),
        ({"a": own, "b": {"token": TOKENS}}, TypeError, "group 'b' has 'token'; there are tokens,"),
        ({"a": own, "b": {"tokens": TOKENS[:3]}}, regard.ShapeError, "3 tokens, but layer 0 has 4"),
        ({"a": own, "b": own | {"boundary": 9}}, ValueError, "boundary is 9; there are 4 tokens"),
        ({"a": own, "b": own | {"grids": [(0, 9, 9)]}}, ValueError, "the tokens 0 to 80; there"),
    ):
        with pytest.raises(error, match=message):
            finish(groups)
    with pytest.raises(TypeError, match="model is int"):
        finish({"a": own, "b": own}, model=3)
    with Writer(path) as writer:
        with pytest.raises(ValueError, match=r"groups is of \[\], and layers were added to \[\]"):
            writer.finish({})
        with pytest.raises(TypeError, match="layer is int; a regard"):
            writer.add(3)
        with pytest.raises(TypeError, match="group is int; it must be a str"):
            writer.add(layer(), group=1)
        for name, wrong, error, message in RENAMED:
            renamed = layer()
            setattr(renamed, name, wrong)
            with pytest.raises(error, match=message):
                writer.add(renamed)
        writer.add(layer())
        writer.finish({"": own})
        with pytest.raises(RuntimeError, match="is finished"):
            writer.add(layer())
    with pytest.raises(RuntimeError, match="is closed"):
        writer.finish({"": own})
    assert [*path.parent.iterdir()] == [path]


# Damage.


def damaged(path, change):
    """The file with a changed header."""
    whole().save(path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])


def fact(name, value):
    def change(header):
        header["__metadata__"][name] = value if value is None else json.dumps(value)

    return change


def other(name, value):
    def change(header):
        others = json.loads(header["__metadata__"]["others"])
        others[1].pop(name, None) if value is None else others[1].update({name: value})
        header["__metadata__"]["others"] = json.dumps(others)

    return change


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (fact("names", ["a"]), "names are 1, and there are 2 layers"),
        (fact("names", "ab"), "names is str; list is needed"),
        (fact("names", [1, 2]), "layer 0: Layer: name is int"),
        (fact("numbers", [1]), "numbers are 1, and there are 2 layers"),
        (fact("numbers", [1, 1]), r"layers\[0\] and layers\[1\] both have the number 1"),
        (fact("numbers", [1, -1]), "layer 1: Layer: number is -1; a number from 0"),
        (fact("numbers", [1.0, 2]), "layer 0: Layer: number is 1.0; an int is needed"),
        (fact("numbers", [1, 2**70]), "layer 1: Layer: number is 1180591620717411303424; a"),
        (fact("head_numbers", [[0, 1, 2], None]), "layer 0: Layer: 3 head_numbers for 4 query"),
        (fact("head_numbers", [[0, 1, 2, 2], None]), "are 0, 1, 2, 2; each head has its own"),
        (fact("head_numbers", ["0123", None]), "head_numbers is '0123'; one int"),
        (fact("head_numbers", ["x" * 10**6, None]), r"head_numbers is 'xxxx.*xx\.\.\.$"),
        (fact("grids", ["y" * 10**6]), r"grids\[0\] is 'y.*y\.\.\.$"),
        (fact("head_numbers", [3, None]), "head_numbers is 3; one int"),
        (fact("head_numbers", {}), "head_numbers is dict; list is needed"),
        (fact("grids", [[0, 2, 2]]), r"grids\[0\] is Grid.*; there are 3"),
        (fact("grids", [0, 1, 1]), r"grids\[0\] is 0; a Grid\(start, rows, columns\)"),
        (fact("grids", [[0, True, 1]]), "of ints is needed"),
        (fact("grids", "x"), "grids is str; list is needed"),
        (fact("group", 3), "group is int; str is needed"),
        (fact("group", ""), "so these layers need a name too"),
        (fact("group", "cross"), "others has the name 'cross'; a new one is needed"),
        (fact("others", {}), "others is dict; list is needed"),
        (fact("others", [1]), r"others\[0\]: it is int; dict is needed"),
        (fact("others", []), "tensor 'others.0.layers.0.key' belongs to no layer"),
        (fact("others", None), "its header has no others"),
        (lambda header: header["__metadata__"].update(others=DEEP), r"others is no JSON \("),
        (other("tokens", None), r"others\[1\]: it has no tokens"),
        (other("model", None), r"others\[1\]: it has no model"),
        (other("tokens", "abc"), r"others\[1\]: tokens is str; list is needed"),
        (other("options", [{}, {}]), r"others\[1\]: names are 1, and there are 2 layers"),
        (other("options", [{"mask": 1}]), r"others\[1\]: layer 0 has options"),
        (other("grids", [[5, 1, 2]]), r"others\[1\]: recording: grids\[0\]"),
        (other("group", None), "others has the name ''; a new one is needed"),
        (other("group", "encoder"), "there are two groups 'encoder'"),
        (other("boundary", [0]), r"others\[1\]: boundary is list; int is needed"),
        (other("boundary", True), r"others\[1\]: recording: boundary is bool"),
        (fact("version", "2"), "recording of version '\"2\"', this regard reads 1 to 4"),
    ],
)
def test_a_damaged_header_is_a_recording_error(path, change, message):
    damaged(path, change)
    with pytest.raises(regard.RecordingError, match=message) as caught:
        Recording.load(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 700
