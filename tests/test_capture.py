"""regard.record: the attention of any torch model, layer by layer."""

import contextlib
import copy
import errno
import functools
import gc
import os
import pickle
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
import regard.nn
from recordings import assert_same
from regard import Edit
from regard.capture._groups import group_names, names_of, places
from regard.capture._rows import Rows, Step, joined, simplified
from regard.recording import Layer

X = torch.randn(1, 10, 32, generator=torch.Generator().manual_seed(0))
LETTERS = list("abcdefghij")
OPEN = Path("/proc/self/fd")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def named(folder):
    """What lies in a folder."""
    return {path.name for path in folder.iterdir()}


class Attention(nn.Module):
    """What many a model has, as nanoGPT."""

    def __init__(self, heads=4):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(32, 96)

    def forward(self, x, **options):
        B, L, _ = x.shape
        q, k, v = self.qkv(x).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).reshape(B, L, 32)


class Blocks(nn.Module):
    """Two of them, causal."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Identity(), Attention()) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = x + block[1](block[0](x), is_causal=True)
        return x


def test_a_model_is_recorded_under_the_names_of_its_modules():
    model = Blocks()
    plain = model(X)
    with regard.record(tokens=LETTERS) as recording:
        assert torch.equal(model(X), plain)
    assert [layer.name for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]
    assert recording.layer_numbers == (0, 1)
    assert recording.tokens == tuple(LETTERS)
    assert isinstance(recording, regard.Recording)
    q, k, _ = model.blocks[0][1].qkv(X).view(10, 3, 4, 8).permute(1, 2, 0, 3)
    hidden = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected = (q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(recording.weights[0][:], expected, atol=1e-6, rtol=0)
    assert recording.batch == (recording,)


def test_torchs_own_layers_are_recorded():
    model = nn.Transformer(32, 4, 2, 3, 64, batch_first=True).eval()
    target = torch.randn(1, 7, 32)
    later = nn.Transformer.generate_square_subsequent_mask(7)
    with regard.record() as recording:
        model(X, target, tgt_mask=later)
    assert {name: len(one.layers) for name, one in recording.groups.items()} == {
        "decoder": 3, "encoder": 2, "cross": 3,
    }  # fmt: skip
    assert recording.groups["cross"].weights[2].shape == (4, 7, 10)
    assert recording.layers[0].options["causal"] is True


def test_weights_that_torch_returns_are_those_recorded():
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    state = torch.get_rng_state()
    with regard.record() as recording:
        _, weights = layer(X, X, X, average_attn_weights=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(recording.weights[0][:], weights[0], atol=1e-6, rtol=0)


def test_weights_that_torch_returns_are_of_the_mask_whatever_the_hint_says():
    layer = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    nearer = torch.arange(10.0).repeat(10, 1).masked_fill(torch.ones(10, 10).triu(1) > 0, -np.inf)
    with regard.record() as recording:
        _, weights = layer(X, X, X, attn_mask=nearer, is_causal=True, average_attn_weights=False)
    torch.testing.assert_close(recording.weights[0][:], weights[0], atol=1e-6, rtol=0)
    assert recording.layers[0].options["causal"] is True


def test_regards_own_calls_are_recorded():
    layer = regard.nn.MultiHeadAttention(32, 4, 2, causal=True, window=(3, 0)).eval()
    with regard.record(values=True) as recording:
        _, weights = layer(X, return_weights=True)
    (one,) = recording.layers
    assert (one.heads, one.key_heads, one.options["window"]) == (4, 2, (3, 0))
    assert one.value is not None
    assert torch.equal(recording.weights[0][:], weights[0])
    x = np.ones((3, 2, 4), np.float32)
    with regard.record() as recording:
        regard.attention(x[:, None], x[:, None], x[:, None], causal=True)
    assert len(recording.batch) == 3
    assert isinstance(recording.batch[0].layers[0].query, np.ndarray)


def test_calls_of_other_lengths_outside_modules_are_groups():
    x, longer = (np.ones((1, 2, n, 4), np.float32) for n in (3, 5))
    with regard.record() as recording:
        regard.attention(x, x, x, causal=True)
        regard.attention(longer, longer, longer)
    assert {name: len(found.tokens) for name, found in recording.groups.items()} == {
        "call": 3, "call 2": 5,
    }  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_names_that_no_recording_has_are_attribute_errors(count):
    with regard.record() as recording:
        assert not hasattr(recording, "weigths")
        x = X.reshape(1, 10, 4, 8).swapaxes(1, 2).expand(count, -1, -1, -1)
        regard.attention(x, x, x)
    with pytest.raises(AttributeError, match="'Recorded' object has no attribute 'weigths'"):
        print(recording.weigths)


def test_padding_of_a_batch_is_left_out():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[1, 6:] = True
    with regard.record(tokens=[LETTERS, LETTERS]) as recording:
        model(X.expand(2, -1, -1), src_key_padding_mask=padding)
    assert [len(one.tokens) for one in recording.batch] == [10, 6]
    with pytest.raises(regard.RecordingError, match=r"a batch of 2 texts.*recording\.batch\[0\]"):
        print(recording.weights)
    assert "batch of 2" in repr(recording)


def test_a_generation_with_a_cache_is_one_recording():
    layer = regard.nn.MultiHeadAttention(32, 4, causal=True).eval()
    cache, parts = layer.new_cache(), X.split([6, 1, 3], 1)
    with regard.record(tokens=LETTERS) as recording:
        for part in parts:
            layer(part, cache=cache)
    whole = layer(X, return_weights=True)[1]
    assert recording.boundary == 6
    assert recording.layers[0].options["causal"] is True
    torch.testing.assert_close(recording.weights[0][:], whole[0], atol=1e-6, rtol=0)


def test_layers_go_to_disk_as_they_come(tmp_path):
    path = tmp_path / "one.safetensors"
    path.write_bytes(b"before")
    path.chmod(0o600)
    with regard.record(path=path, layers=[1], heads=[2, 3]) as recording:
        Blocks()(X)
        assert path.read_bytes() == b"before"
    assert recording.weights[1][2, 5].shape == (10,)
    assert named(tmp_path) == {path.name}
    assert path.stat().st_mode & 0o777 == 0o600
    assert regard.Recording.load(path).layer_numbers == (1,)
    with regard.record(path=tmp_path / "both") as recording:
        Blocks()(X.expand(2, -1, -1))
    assert named(tmp_path) == {path.name, "both-0.safetensors", "both-1.safetensors"}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("run", "run.safetensors"), ("run.1", "run.1.safetensors"),
        ("gpt-3.5", "gpt-3.5.safetensors"), ("run.SafeTensors", "run.SafeTensors"),
    ],
)  # fmt: skip
def test_a_file_has_the_name_that_it_is_given(given, written, tmp_path):
    with regard.record(path=tmp_path / given) as recording:
        Blocks()(X)
    assert named(tmp_path) == {written}
    assert_same(regard.Recording.load(tmp_path / written), recording)
    (tmp_path / written).unlink()
    with regard.record(path=tmp_path / given):
        Blocks()(X.expand(2, -1, -1))
    place = Path(written)
    assert named(tmp_path) == {f"{place.stem}-{b}{place.suffix}" for b in range(2)}


def test_files_grow_beside_their_places_and_nothing_else_does(tmp_path):
    folder, during = tmp_path / "there", []
    folder.mkdir()
    with regard.record(path=folder / "both"):
        Blocks()(X.expand(2, -1, -1))
        during += folder.iterdir()
    assert len(during) == 2
    assert all(path.name.startswith(".regard-") and path.suffix == ".tmp" for path in during)
    assert named(folder) == {"both-0.safetensors", "both-1.safetensors"}


def test_a_file_that_an_earlier_batch_left_beside_is_told_of(tmp_path):
    def record(count):
        with regard.record(path=tmp_path / "run"):
            Blocks()(X.expand(count, -1, -1))

    for count in (3, 3, 1):
        record(count)
    with pytest.warns(UserWarning, match=r"run-2.safetensors was there before; .* 2 texts") as told:
        record(2)
    assert [warning.filename for warning in told] == [__file__]


def test_files_of_a_batch_are_all_there_or_none(tmp_path, monkeypatch):
    calls = []

    def full(handle):
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), regard.record(path=tmp_path / "a"):
        Blocks()(X.expand(3, -1, -1))
    assert named(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_refused_before_the_pass(tmp_path, monkeypatch):
    path, begun = tmp_path / "a", []
    monkeypatch.setattr(os, "access", lambda *given: False)
    with pytest.raises(PermissionError) as error, regard.record(path=path):
        begun.append(True)
    assert error.value.filename == str(path)
    assert not begun


def test_a_file_is_read_when_it_is_first_asked_for_anything(tmp_path):
    path = tmp_path / "a.safetensors"
    with regard.record(path=path) as recording:
        Blocks()(X)
    with regard.record(path=path, layers=[1]) as second:  # which replaces the file
        Blocks()(2 * X)
    path.unlink()
    assert recording.batch == (recording,)
    assert repr(recording).startswith("Recording(10 tokens, 2 layers")
    assert second.layer_numbers == (1,)
    with regard.record(path=path) as recording:
        Blocks()(X)
    for copied in (copy.deepcopy(recording), pickle.loads(pickle.dumps(recording))):
        assert_same(copied, regard.Recording.load(path))
    with regard.record(path=path) as recording:
        Blocks()(X.expand(2, -1, -1))
    assert [len(one.layers) for one in pickle.loads(pickle.dumps(recording)).batch] == [2, 2]
    with pytest.raises(regard.RecordingError, match="a batch of 2 texts was recorded"):
        print(recording.layers)


def test_what_is_assigned_to_a_file_that_was_not_read_is_kept(tmp_path):
    with regard.record(path=tmp_path / "one") as recording:
        Blocks()(X)
    recording.model = "mine"
    assert (recording.weights[0]._origin.model, recording.model) == ("mine", "mine")
    with regard.record() as recording:
        with pytest.raises(regard.RecordingError, match="there is nothing yet"):
            recording.model = "mine"
        Blocks()(X.expand(2, -1, -1))
    with pytest.raises(regard.RecordingError, match="a batch of 2 texts"):
        recording.model = "mine"


@pytest.mark.skipif(os.name != "posix", reason="Windows cuts no file that is mapped")
def test_a_file_that_was_cut_before_it_was_read_is_said_to_be(tmp_path):
    path = tmp_path / "a.safetensors"
    with regard.record(path=path) as recording:
        Blocks()(X)
    os.truncate(path, 4096)
    for _ in range(2):
        with pytest.raises(regard.RecordingError, match="was cut to 4096 bytes while it was open"):
            print(recording.layers)


@pytest.mark.skipif(not OPEN.is_dir(), reason="/proc of Linux counts open files")
def test_a_recording_that_nobody_reads_leaves_no_file_open(tmp_path):
    model = Blocks()
    before = named(OPEN)
    for _ in range(3):
        with regard.record(path=tmp_path / "a"):
            model(X)
    assert named(OPEN) == before


def test_files_of_passes_that_are_alike_have_texts_and_names_of_their_own(tmp_path):
    models = {"a": Blocks(), "b": nn.Sequential(Blocks())}
    for name, model in models.items():
        for tokens in (LETTERS, LETTERS[::-1]):
            with regard.record(tokens=tokens, path=tmp_path / name):
                model(X)
            found = regard.Recording.load(tmp_path / f"{name}.safetensors")
            before = "0." if name == "b" else ""
            assert found.tokens == tuple(tokens)
            assert [layer.name for layer in found.layers] == [
                f"{before}blocks.{n}.1" for n in range(2)
            ]


@pytest.mark.parametrize("to_disk", [False, True])
def test_a_recording_goes_when_nobody_holds_it(to_disk, tmp_path):
    with regard.record(path=tmp_path / "a" if to_disk else None) as recording:
        Blocks()(X)
    seen = weakref.ref(recording)
    gc.disable()
    try:
        del recording
        assert seen() is None
    finally:
        gc.enable()


L, H = 10, 4
IDS = torch.arange(L) // 4
ENDS = torch.arange(L).clamp(max=7), torch.full((L,), L)
SINGLY = {
    "causal": True, "window": (2, None), "mask": torch.ones(L, L).tril().bool(),
    "bias": torch.randn(H, L, L), "key_lengths": 7, "segments": IDS[None],
    "intervals": ENDS, "query_start": 3, "sinks": torch.randn(H), "scale": 0.3, "softcap": 20.0,
    "edits": [Edit(heads=1, keys=0), Edit(queries=slice(2, 5), factor=0.5)],
}  # fmt: skip


@pytest.mark.parametrize("name", [*SINGLY, "edits, none of which is left"])
def test_a_recorded_layer_is_as_if_it_were_made_of_its_options(name, tmp_path):
    q = torch.randn(1, H, L, 8)
    given = {name: SINGLY[name]} if name in SINGLY else {"edits": [Edit(keys=slice(0, 0))]}
    for more in ({}, {"heads": [1, 3]}):
        with regard.record(path=tmp_path / "a", values=True, **more) as on_disk:
            regard.attention(q, q, q, **given)
        with regard.record(values=True, **more) as recording:
            regard.attention(q, q, q, **given)
        (found,) = recording.layers
        vectors = {name: getattr(found, name) for name in ("query", "key", "value")}
        told = {name: getattr(found, name) for name in ("name", "number", "head_numbers")}
        made = Layer(**vectors, **told, **found.options)
        regard.Recording(recording.tokens, [made]).save(tmp_path / "b")
        assert_same(on_disk, regard.Recording.load(tmp_path / "b"))
        assert {name: type(x) for name, x in found.options.items()} == {
            name: type(x) for name, x in made.options.items()
        }


class Calls(nn.Module):
    """Attention, called in a module for each of its options."""

    def __init__(self, *calls):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity() for _ in calls])
        for block, options in zip(self.blocks, calls):
            block.forward = functools.partial(regard.attention, **options)

    def forward(self, q, k, which, prepare=lambda n, k: k):
        for n in which:
            self.blocks[n](q, prepare(n, k), prepare(n, k))


def recorded_layers(model, which, mask, **options):
    """The layers of a pass, by number, with the tokens of each; the mask changes on the way."""
    q, k = torch.randn(2, 2, H, L, 8, generator=torch.Generator().manual_seed(1))
    mask[:] = torch.ones(L, L).tril().bool()

    def prepare(n, k):
        mask[3:, 1] &= n != 4
        return k[:, ::2] if n == 5 else k

    with regard.record(**options) as recording:
        model(q, k, which, prepare)
    return [
        {
            layer.number: (layer, group.tokens)
            for group in one.groups.values()
            for layer in group.layers
        }
        for one in recording.batch
    ]


@pytest.mark.parametrize("more", [{}, {"heads": [1, 3]}, {"values": True}, {"layers": [1, 4, 9]}])
def test_layers_alike_are_what_each_would_be_alone(more, tmp_path, monkeypatch):
    mask = torch.ones(L, L, dtype=torch.bool)
    calls = [
        {"causal": True}, {"causal": True}, {"causal": True, "scale": 0.3}, {"mask": mask},
        {"mask": mask}, {"scale": 0.3}, {"bias": torch.randn(2, H, L, L)}, {"bias": -ENDS[0] * 0.1},
        {"key_lengths": 10}, {"intervals": ENDS}, {"intervals": ENDS},
        {"sinks": torch.randn(H)}, {"sinks": torch.randn(H)}, {"softcap": 5.0, "dropout": 0.0},
        {"causal": True, "window": (2, 0)}, {"causal": True},
    ]  # fmt: skip
    check_alike(calls, mask, more, tmp_path / "a", monkeypatch)
    padded = [{"key_lengths": torch.tensor([7, 10])}] * 10
    check_alike(padded, mask, more, tmp_path / "b", monkeypatch)


def check_alike(calls, mask, more, path, monkeypatch):
    model, every = Calls(*calls), range(len(calls))
    wanted = more.get("layers", every)
    alone = []
    for n in wanted:
        monkeypatch.setattr("regard.capture._recorder._plain", {})
        alone.append(recorded_layers(model, [n], mask, **more))
    for to in (None, path, path):
        found = recorded_layers(model, every, mask, path=to, **more)
        for b, layers in enumerate(found):
            assert sorted(layers) == [*wanted]
            for n, expected in zip(wanted, alone):
                (one, tokens), (other, same) = layers[n], expected[b][n]
                assert (one.name, one.head_numbers, tokens) == (
                    f"blocks.{n}", other.head_numbers, same
                )  # fmt: skip
                assert one.options.keys() == other.options.keys()
                pairs = [(getattr(one, x), getattr(other, x)) for x in ("query", "key", "value")]
                pairs += [(x, other.options[name]) for name, x in one.options.items()]
                for x, y in pairs:
                    np.testing.assert_array_equal(x, y)


def test_layers_of_several_modes_of_torch_go_to_one_file(tmp_path):
    model, x = Calls({}, {}, {}), torch.randn(1, H, L, 8)
    with regard.record(path=tmp_path / "a") as recording:
        with torch.inference_mode():
            model(x, x, [0])
        with torch.enable_grad():
            model(x.clone().requires_grad_(), x, [1])
        with torch.inference_mode():
            model(x + 0, x + 0, [2])
    for layer in recording.layers:
        np.testing.assert_array_equal(layer.query, x[0])
    assert recording.layer_numbers == (0, 1, 2)


def test_a_layer_that_is_new_in_a_later_step(tmp_path):
    model, k = Calls(*4 * [{"causal": True}]), torch.randn(1, H, L + 1, 8)
    for path in (tmp_path / "a", None):
        with regard.record(path=path) as recording:
            model(k[:, :, :L], k[:, :, :L], [1])
            model(k[:, :, L:], k, [0, 1, 2, 3])
        groups = recording.groups.values()
        found = {x.name: len(x.query[0]) for group in groups for x in group.layers}
        assert found == {"blocks.0": 1, "blocks.1": L + 1, "blocks.2": 1, "blocks.3": 1}
        for group in groups:
            for layer in group.layers:
                np.testing.assert_array_equal(np.asarray(layer.key), k[0])


def test_a_compiled_model_runs_uncompiled_and_a_thread_of_others_is_left_alone():
    import threading

    model = Blocks()
    compiled = torch.compile(model, backend="eager")
    with regard.record() as recording:
        compiled(X)
        thread = threading.Thread(target=lambda: regard.attention(X, X, X))
        thread.start()
        thread.join()
    assert [layer.name[-10:] for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]


def test_attention_that_regard_computes_for_torch_is_recorded_once():
    with regard.patch_torch(), regard.record() as recording:
        Blocks()(X)
    assert [layer.name for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]


class Heads(nn.Module):
    """torch's operator on heads that are given."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
def test_nested_tensors_are_computed_by_torch_and_said_to_be_left_out():
    dense = torch.randn(1, 2, 7, 8)
    nested = torch.nested.nested_tensor(
        [torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged
    ).transpose(1, 2)
    model = nn.ModuleDict({"packed": Heads(), "padded": Heads()})
    model.forward = lambda x, y: (model["packed"](x), model["padded"](y))
    expected = model(nested, dense)
    said = "packed is left out: .* nested tensor"
    with pytest.warns(UserWarning, match=f"record: {said}"), regard.record() as recording:
        found = model(nested, dense)
    assert [layer.name for layer in recording.layers] == ["padded"]
    assert torch.equal(found[0].values(), expected[0].values())
    with pytest.warns(UserWarning, match=f"step 0: {said}"), regard.watch(model, every=1) as watch:
        model(nested, dense)
    assert list(watch.left_out) == ["packed"]


class Flexible(nn.Module):
    """Calls torch's other attention, under the name that it is asked for."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        if self.name == "flex_attention":
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(x, x, x)
        return getattr(torch.ops.aten, self.name)(x, x, x)[0]


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", ["flex_attention", "_scaled_dot_product_flash_attention_for_cpu"])
def test_attention_that_is_not_seen_beside_other_is_said_once(name):
    x, others = torch.randn(1, 2, 7, 8), [Flexible(name) for _ in range(3)]
    model = nn.Sequential(Heads(), *others)
    plain = model(x)
    match = rf"record: 1 and 2 more are left out: {name} is called\. What is seen is regard"
    with pytest.warns(UserWarning, match=match) as told, regard.record() as recording:
        assert torch.equal(model(x), plain)
    assert len(told) == 1
    assert Path(told[0].filename) == Path(__file__)
    assert [layer.name for layer in recording.layers] == ["0"]
    match = f"step 0: 1 and 2 more are left out: {name} is called"
    with pytest.warns(UserWarning, match=match), regard.watch(model, evaluation=True) as watch:
        model(x)
    assert [*watch.left_out] == ["1", "2", "3"]


class OwnAttention(nn.Module):
    """Multiplies query and key by itself."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class Holder(nn.Module):
    """Attention whose operator is called around a part of that name."""

    def __init__(self):
        super().__init__()
        self.inner = type("InnerAttention", (nn.Identity,), {})()

    def forward(self, x):
        return F.scaled_dot_product_attention(self.inner(x), x, x)


def test_attention_of_a_models_own_is_said_to_be_left_out_beside_other():
    x = torch.randn(1, 2, 7, 8)
    model = nn.Sequential(Heads(), OwnAttention(), Holder(), nn.Sequential(OwnAttention()))
    model.other = OwnAttention()
    model.forward = lambda x: model[3](model[2](model[1](model[0](x))))  # without the other
    match = "1 and 3.0 are left out: no call of attention is seen there. What is seen is"
    with pytest.warns(UserWarning, match=f"record: {match}"), regard.record() as recording:
        model(x)
    assert [layer.name for layer in recording.layers] == ["0", "2"]
    watched = regard.watch(model, evaluation=True)
    with pytest.warns(UserWarning, match=f"watch: step 0: {match}"), watched:
        model(x)
    assert [*watched.left_out] == ["1", "3.0"]
    with pytest.raises(regard.RecordingError, match="no attention was"), regard.record():
        OwnAttention()(x)  # and nothing else is said


def test_an_exported_model_is_recorded():
    x = torch.randn(1, 2, 7, 8)
    model = torch.export.export(Heads(), (x,)).module()
    with regard.record() as recording:
        model(x)
    torch.testing.assert_close(
        recording.weights[0][:], regard.AttentionWeights(x[0], x[0])[:], atol=1e-6, rtol=0
    )


class Half(nn.Module):
    """Two layers, of which one is called within a function that gives it other tensors."""

    def __init__(self, within):
        super().__init__()
        self.one, self.other, self.within = Heads(), Heads(), within

    def forward(self, x):
        self.within(self.other, x)
        return self.one(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    "within",
    [
        lambda layer, x: torch.export.export(layer, (x,)),
        lambda layer, x: torch.vmap(layer)(x[None]),
        lambda layer, x: layer(x.to("meta")),
    ],
    ids=["export", "vmap", "meta"],
)
def test_tensors_without_numbers_are_said_to_be_left_out(within):
    x = torch.randn(1, 2, 7, 8)
    match = "record: other is left out: .* hold no numbers"
    with pytest.warns(UserWarning, match=match), regard.record() as recording:
        Half(within)(x)
    assert [layer.name for layer in recording.layers] == ["one"]


@pytest.mark.parametrize("to_disk", [False, True])
def test_what_grad_follows_is_recorded(to_disk, tmp_path):
    model, mask = Attention(), torch.rand(10, 10) < 0.7
    path = tmp_path / "one" if to_disk else None

    def number(x):
        return model(x, attn_mask=x[0, :, :10].where(mask, -torch.inf)).sum()

    with regard.record(values=True) as exact:
        number(X)
    with regard.record(values=True, path=path) as recording:
        torch.func.grad(number)(X)
    np.testing.assert_array_equal(recording.weights[0][:], exact.weights[0][:])
    np.testing.assert_array_equal(recording.layers[0].value, exact.layers[0].value)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_torchscript_is_said_to_be_left_out():
    x, scripted = torch.randn(1, 2, 7, 8), torch.jit.script(nn.Sequential(Heads()))
    model = nn.Sequential(Heads(), scripted, torch.jit.script(nn.ReLU()))
    match = "record: 1 is left out: TorchScript"
    with pytest.warns(UserWarning, match=match) as told, regard.record() as recording:
        model(x)
    assert len(told) == 1
    assert len(recording.layers) == 1


@pytest.mark.parametrize("within", [regard.record, regard.patch_torch])
def test_a_block_that_ends_in_another_thread_is_refused_and_sees_no_more(within):
    block, entered, left = within(), threading.Event(), threading.Event()
    seen = []  # by a block after it, in the first thread

    def first():
        block.__enter__()
        Blocks()(X)
        entered.set()
        left.wait(60)
        with regard.record() as recording:
            Blocks()(X)
        seen.append(len(recording.layers))

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(60)
    with pytest.raises(RuntimeError, match="entered in one thread and left in another"):
        block.__exit__(None, None, None)
    left.set()
    thread.join()
    assert seen == [2]
    with regard.record() as recording:
        Blocks()(X)
    assert len(recording.layers) == 2


def test_blocks_that_end_in_another_order_end_by_themselves():
    recorded, patched = regard.record(), regard.patch_torch()
    recording, report = recorded.__enter__(), patched.__enter__()
    Blocks()(X)
    recorded.__exit__(None, None, None)
    Blocks()(X)
    patched.__exit__(None, None, None)
    Blocks()(X)
    assert len(recording.layers) == 2
    assert sum(report.replaced.values()) == 4
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_causal_bias_of_torch_is_recorded_as_what_it_hides():
    from torch.nn.attention.bias import causal_lower_right

    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    with regard.record() as recording:
        F.scaled_dot_product_attention(q, k, k, causal_lower_right(4, 9))
    expected = regard.AttentionWeights(q[0], k[0], causal=True)
    np.testing.assert_allclose(recording.weights[0], expected, atol=1e-6)


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda x: [*np.array(x)]])
def test_numbers_of_layers_and_heads_may_be_those_of_an_array(of):
    with regard.record(layers=of([1]), heads=of([3, 0])) as recording:
        Blocks()(X)
    assert recording.layer_numbers == (1,)
    assert recording.layers[0].head_numbers == (0, 3)


def test_what_is_wrong_is_said():
    with pytest.raises(regard.RecordingError, match="no attention was computed"), regard.record():
        nn.Linear(32, 32)(X)
    match = r"in layers \[7\]; it was in 0, 1\."
    with pytest.raises(regard.RecordingError, match=match), regard.record(layers=[7]):
        Blocks()(X)
    with pytest.raises(regard.ShapeError, match="3 tokens are given"), regard.record(list("abc")):
        Blocks()(X)
    with pytest.raises(IndexError, match="there is no head 4"), regard.record(heads=[4]):
        Blocks()(X)
    for given, error in (
        ({"layers": "1"}, TypeError),
        ({"heads": [-1]}, TypeError),
        ({"heads": [[1]]}, TypeError),
        ({"heads": np.array([True, False])}, TypeError),
        ({"layers": torch.ones(2)}, TypeError),
        ({"layers": []}, ValueError),
        ({"path": "a.json"}, ValueError),
        ({"path": "no/such/folder/a"}, FileNotFoundError),
        ({"path": "."}, IsADirectoryError),
    ):
        with pytest.raises(error), regard.record(**given):
            Blocks()(X)
    with regard.record() as recording:
        assert "nothing yet" in repr(recording)
        with pytest.raises(regard.RecordingError, match="there is nothing yet"):
            print(recording.weights)
        with pytest.raises(regard.RecordingError, match="another record is open"), regard.record():
            pass
        Blocks()(X)
    with regard.record() as recording:  # nothing is left behind by any of them
        Blocks()(X)
    assert len(recording.layers) == 2


class Interruption(BaseException):
    """As one from the keyboard is, none that torch's hooks notice."""


def test_a_pass_after_an_interrupted_one_begins_anew():
    model, x = Blocks(), X

    def interrupt(*given):
        raise Interruption

    def interrupted(module):
        hook = module.register_forward_hook(interrupt)
        with pytest.raises(Interruption):
            model(x)
        hook.remove()

    with regard.record() as recording:
        interrupted(model.blocks[0][0])
        model(x)
    assert [layer.name for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]
    with regard.record():
        interrupted(model.blocks[0][1])
        with pytest.raises(regard.RecordingError, match="its queries are not the next ones"):
            model(x)


class Again(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, times=2):
        x = self.attention(x)
        return self(x, times - 1) if times else x


def test_a_model_that_calls_itself_is_one_pass():
    with regard.record() as recording:
        Again()(X)
    assert recording.layer_numbers == (0, 1, 2)


def test_the_layers_of_what_forward_calls_are_no_pass():
    expected = r"One pass is one call of the model, model\(x\): what model\.forward\(x\) calls"
    with pytest.raises(regard.RecordingError, match=expected), regard.record():
        Blocks().forward(X)


def test_a_hook_of_others_that_raises_leaves_the_names_as_they_are():
    model = Blocks()

    def refuse(module, given):
        if isinstance(module, nn.Identity):
            raise ValueError

    def forward(block, x):
        with contextlib.suppress(ValueError):
            block[0](x)
        return block[1](x)

    model.forward = lambda x: [forward(block, x) for block in model.blocks]
    hook = nn.modules.module.register_module_forward_pre_hook(refuse)
    try:
        with regard.record() as recording:
            model(X)
    finally:
        hook.remove()
    assert [layer.name for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]


def test_the_modules_of_a_model_are_named_as_torch_names_them():
    shared = Attention()
    model = nn.ModuleDict({"b": Blocks(), "a": shared, "c": nn.Sequential(shared, nn.ReLU())})
    model.register_module("none", None)
    found = names_of(model)
    expected = {module: name for name, module in model.named_modules()}
    assert [*found.items()] == [
        (module, name) for module, name in expected.items() if type(module) is not nn.Linear
    ]


def test_numbers_and_names_of_layers():
    def named(*names):
        root = nn.Module()
        for name in names:
            *folders, last = name.split(".")
            here = root
            for part in folders:
                if not hasattr(here, part):
                    here.add_module(part, nn.Module())
                here = getattr(here, part)
            here.add_module(last, nn.Identity())
        found = places(dict(root.named_modules()))
        return {name: found[name] for name in names}

    assert named("h.0.a", "h.3.a") == {"h.0.a": ("h.*.a", 0), "h.3.a": ("h.*.a", 3)}
    t5 = named("b.0.layer.0.A", "b.1.layer.0.A", "b.0.layer.1.B", "b.1.layer.1.B")
    assert [number for _, number in t5.values()] == [0, 1, 0, 1]
    swin = named(*(f"s.{i}.b.{j}.a" for i in range(2) for j in range(2)))
    assert [number for _, number in swin.values()] == [0, 1, 2, 3]
    assert group_names(["model.layers.*.attn"]) == [""]
    assert group_names(["e.encoder.*.a", "e.decoder.*.self_attn", "e.decoder.*.encoder_attn"]) == [
        "encoder", "decoder", "cross",
    ]  # fmt: skip
    t5 = ["encoder.*.a.*", "decoder.*.a.*", "decoder.*.a.*"]  # one class, whose names do not tell
    assert group_names(t5, [False, False, True]) == ["encoder", "decoder", "cross"]
    halves = ["e.encoder.*.a", "e.decoder.*.a"]  # where keys are others, but no second pattern is
    assert group_names(halves, [False, True]) == ["encoder", "decoder"]
    assert group_names(["m.text.encoder.*.a", "m.vision.encoder.*.a"]) == ["text", "vision"]
    assert group_names(["a.*", "a.*"]) == ["a.*", "a.* 2"]
    assert group_names(["a.*"] * 4) == ["a.*", "a.* 2", "a.* 3", "a.* 4"]
    assert len({*group_names(["b.*", "a.*", "a.*", "a.* 2", "a.* 2"])}) == 5


def test_intervals_are_said_in_the_fewest_words():
    i = np.arange(6)
    for first, last, keys, expected in (
        (0 * i, 0 * i + 6, 6, {}),
        (0 * i, i + 1, 6, {"causal": True}),
        (0 * i, i + 3, 8, {"causal": True}),
        (0 * i, i + 1, 9, {"causal": True, "query_start": 0}),
        (np.maximum(0, i - 2), i + 1, 6, {"causal": True, "window": (2, 0)}),
    ):
        assert simplified(first, last, keys) == expected
    assert set(simplified(i // 2 * 2, i // 2 * 2 + 2, 6)) == {"intervals"}


def test_what_is_kept_of_a_mask_is_what_was_seen():
    rng = np.random.default_rng(0)
    for _ in range(40):
        keys, queries = int(rng.integers(2, 9)), int(rng.integers(1, 7))
        mask = rng.random((int(rng.choice([1, 3])), queries, keys)) < 0.6
        first = rng.integers(0, keys, queries)
        last = np.minimum(keys, first + rng.integers(0, keys + 1, queries))
        rows = Rows(first, last, None if rng.random() < 0.3 else mask, 0, keys)
        kept = rng.random(keys + 2) < 0.8
        kept[0] = True
        chosen = slice(int(rng.integers(0, queries)), queries)
        options = joined([Step(rows, chosen, 1)], kept)
        whole = np.zeros((mask.shape[0], queries, keys + 2), bool)
        j = np.arange(keys)
        inside = (first[:, None] <= j) & (j < last[:, None])
        whole[..., 1 : keys + 1] = inside if rows.mask is None else inside & mask
        expected = whole[:, chosen][..., kept]
        x = np.zeros((mask.shape[0], expected.shape[1], 1)), np.zeros((1, expected.shape[2], 1))
        found = regard.AttentionWeights(*x, **options)[...]
        assert ((found > 0) == expected).all()


def test_texts_of_different_lengths_and_places_keep_what_they_see():
    q = k = v = torch.randn(2, 1, 10, 8)
    for options in (
        {"key_lengths": torch.tensor([4, 10]), "causal": True},
        {"key_lengths": torch.tensor([4, 10])},
        {"query_start": torch.tensor([2, 7]), "causal": True},
    ):
        few = q[:, :, :3] if "query_start" in options else q
        with regard.record() as recording:
            regard.attention(few, k, v, **options)
        whole = regard.AttentionWeights(few, k, **options)
        for b, one in enumerate(recording.batch):
            expected = whole[b]
            seen = torch.nonzero(expected.sum((0, 1)))[:, 0]
            kept = expected[..., seen[0] : seen[-1] + 1]
            found = one.weights[0][:]
            count = found.shape[1]  # the last keys' queries, or without an order the first keys'
            kept = kept[:, -count:] if "causal" in options else kept[:, :count]
            torch.testing.assert_close(found, kept, atol=1e-6, rtol=0)


def test_another_thread_is_no_part_of_a_recording():
    model, stop = Blocks(), threading.Event()

    def others():
        other = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
        while not stop.is_set():
            other(torch.ones(1, 4))

    thread = threading.Thread(target=others)
    thread.start()
    try:
        for _ in range(5):
            with regard.record() as recording:
                model(X)
            assert [layer.name for layer in recording.layers] == ["blocks.0.1", "blocks.1.1"]
    finally:
        stop.set()
        thread.join()


class Hiding(nn.Module):
    """Writes into the mask of its layers, each of which is called with one key less."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        for n, layer in enumerate(self.layers):
            mask[:, n + 1] = False
            layer(x, attn_mask=mask)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_is_written_to_between_layers_is_that_of_each(mode):
    model = Hiding()
    with mode(), regard.record() as recording, regard.watch(model, evaluation=True) as watch:
        model(X)
    for n in range(3):
        weights = torch.as_tensor(recording.weights[n][:])
        assert (weights == 0).all((0, 1)).tolist() == [0 < key <= n + 1 for key in range(10)]
        keep = [key for key in range(10) if not 0 < key <= n + 1]
        entropy = torch.as_tensor(recording.weights[n].entropy())[:, keep].mean(-1)
        np.testing.assert_allclose(watch.last["entropy_mean"][n], entropy, rtol=1e-5)


@pytest.mark.parametrize("within", [regard.record, regard.patch_torch])
def test_blocks_of_two_threads_leave_the_compiler_as_it_was(within):
    from torch._dynamo import eval_frame

    inside, left = threading.Event(), threading.Event()

    def first():
        with regard.patch_torch():
            inside.wait(60)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with within():
        inside.set()
        left.wait(60)
        Blocks()(X)
    thread.join()
    assert eval_frame._stance.stance == "default"


class Operator(nn.Module):
    """Calls it with what it is called with."""

    def forward(self, *arrays):
        return F.scaled_dot_product_attention(*arrays)


def test_another_number_of_heads_is_no_step():
    model, (query, key) = Operator(), torch.randn(2, 1, 4, 5, 8)
    packed = query[:, :2, :2], key[:, :2], key[:, :2]
    with contextlib.suppress(regard.RecordingError), regard.record():
        model(query, key, key)
        with pytest.raises(regard.RecordingError, match="other heads, as transformers packs them"):
            model(*packed)


def test_a_module_that_is_every_layer_has_a_number_for_each():
    class Shared(nn.Module):
        def __init__(self, before):
            super().__init__()
            others = [nn.Linear(32, 32) for _ in range(before)]
            self.groups = nn.ModuleList([*others, Attention()])

        def forward(self, x):
            for _ in range(3):
                x = x + self.groups[-1](x)
            return x

    for before in (0, 1, 5):  # other modules
        with regard.record(layers=[before, before + 2]) as recording:
            Shared(before)(X)
        assert recording.layer_numbers == (before, before + 2)
        assert [*recording.groups] == [""]
        with regard.record() as recording:
            Shared(before)(X)
        assert recording.layer_numbers == (before, before + 1, before + 2)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("valid", [(4, 4), (6, 6), (4, 6)], ids=str)
def test_cross_attention_to_other_keys_or_more_of_them_is_no_step(queries, valid):
    pooling = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    queries, *texts = torch.randn(1, queries, 8), *torch.randn(2, 1, 6, 8)
    texts[1][:, 3:] = texts[0][:, 3:]  # the last keys are the same
    if valid == (4, 6):
        texts[1] = texts[0]
    words = r"attends to other keys|keys before it are others|did not see"
    with regard.record():
        for x, count, is_last in zip(texts, valid, (False, True)):
            told = pytest.raises(regard.RecordingError, match=words)
            with told if is_last else contextlib.nullcontext():
                hidden = torch.arange(6)[None] >= count
                pooling(queries, x, x, key_padding_mask=hidden, need_weights=False)


class FixedCache(nn.Module):
    """Attention to a cache of a fixed length, of which a mask hides what is not filled."""

    def __init__(self, places):
        super().__init__()
        self.keys = torch.zeros(1, 2, places, 8)
        self.seen = torch.ones(places, places, dtype=torch.bool).tril()

    def forward(self, query, key, at):
        self.keys[:, :, at] = key
        return F.scaled_dot_product_attention(
            query, self.keys, self.keys, self.seen[None, None, at]
        )


@pytest.mark.parametrize("cuts", [[3], [3, 4, 5, 6], [2, 5, 9], [9], [1], [1, 2, 3, 4], [1, 4, 9]])
def test_a_cache_of_a_fixed_length_and_a_mask(cuts):
    model, (q, k) = FixedCache(9), torch.randn(2, 1, 2, 9, 8)
    with regard.record() as recording:
        for low, high in zip([0, *cuts], cuts):
            model(q[:, :, low:high], k[:, :, low:high], torch.arange(low, high))
    whole = regard.AttentionWeights(q[0, :, : cuts[-1]], k[0, :, : cuts[-1]], causal=True)
    assert len(recording.tokens) == cuts[-1]
    np.testing.assert_allclose(recording.weights[0][...], whole[...].numpy(), atol=1e-6)


@pytest.mark.parametrize("dtypes", [("float64", "float64"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("name", [None, "pass.safetensors"])
def test_biases_of_a_generation_keep_their_digits(dtypes, name, tmp_path):
    of_arrays, of_bias = (getattr(torch, name) for name in dtypes)
    query, key = torch.randn(2, 1, 2, 9, 8, dtype=of_arrays)
    model, bias = Operator(), 1000 + torch.randn(1, 2, 9, 9, dtype=of_bias)
    with regard.record(path=name and tmp_path / name) as recording:
        for low, high in ((0, 5), (5, 6), (6, 9)):
            causal = torch.ones(high - low, high, dtype=torch.bool).tril(low)
            own = bias[..., low:high, :high].masked_fill(~causal, -torch.inf)
            k = key[:, :, :high]
            model(query[:, :, low:high], k, k, own)
    whole = regard.AttentionWeights(query[0], key[0], bias=bias[0], causal=True)
    found, true = (np.asarray(weights[...]) for weights in (recording.weights[0], whole))
    np.testing.assert_allclose(found, true, rtol=0, atol=1e-13 if found.itemsize == 8 else 1e-6)


def test_sinks_keep_their_digits():
    query, key = torch.randn(2, 1, 2, 9, 8, dtype=torch.bfloat16)
    sinks, segments = torch.tensor([5.01, 7.01]), torch.arange(9)[None] // 4
    with regard.record() as recording:
        regard.attention(query, key, key, sinks=sinks, segments=segments)
    whole = regard.AttentionWeights(query, key, sinks=sinks, segments=segments)
    np.testing.assert_allclose(recording.weights[0][...], whole[0].numpy(), atol=1e-6)


@pytest.mark.parametrize("ends", [((2, 5), (0, 5)), ((0, 3), (0, 5)), ((4, 5), (0, 4))], ids=str)
def test_a_cache_of_a_fixed_length_and_padding(ends):
    query, key = torch.randn(2, 2, 2, 9, 8)
    keep = torch.stack([torch.arange(9) >= low for low, _ in ends])
    keep &= torch.stack([torch.arange(9) < high for _, high in ends])
    seen = torch.ones(5, 9, dtype=torch.bool).tril() & keep[:, None, None]
    with regard.record() as recording:
        F.scaled_dot_product_attention(query[:, :, :5], key, key, seen)
    for b, (one, (low, high)) in enumerate(zip(recording.batch, ends)):
        q, k = query[b, :, low:high], key[b, :, low:high]
        whole = regard.AttentionWeights(q, k, causal=True)
        assert one.tokens == tuple(map(str, range(low, high)))
        np.testing.assert_allclose(one.weights[0][...], whole[...].numpy(), atol=1e-6)


def test_cross_attention_to_other_keys_is_no_step():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.cross_attn = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x, y):
            return self.cross_attn(x, y, y, need_weights=False)[0]

    model = Cross()
    with regard.record() as recording:
        model(X[:, :3], X)
        model(X[:, 3:4], X)
        with pytest.raises(regard.RecordingError, match="it attends to other keys"):
            model(X[:, 4:5], X.flip(1))
    assert recording.layers[0].query.shape == (4, 4, 8)
    model.another = nn.MultiheadAttention(32, 4, batch_first=True)
    model.forward = lambda x, y: model.another(x, y, y, need_weights=False)[0]  # no telling name
    with regard.record() as recording:
        for n in range(3):
            model(X[:, n : n + 1], X)
    assert recording.layers[0].query.shape == (4, 3, 8)
    assert (len(recording.query_tokens), len(recording.tokens)) == (3, 10)


def test_one_query_of_texts_of_several_lengths_begins_no_cache_of_a_fixed_length():
    model, (query, key) = Operator(), torch.randn(2, 2, 2, 6, 8)
    first, second = (torch.arange(6) < torch.tensor(ends)[:, None] for ends in ((3, 4), (4, 4)))
    with regard.record():
        model(query[:, :, :1], key, key, first[:, None, None])
        with pytest.raises(regard.RecordingError, match="it sees keys that the first queries did"):
            model(query[:, :, 1:2], key, key, second[:, None, None])


def test_keys_of_cross_attention_that_one_query_did_not_see_are_no_cache():
    model, (query, key) = nn.Module(), torch.randn(2, 1, 2, 6, 8)
    model.cross_attn = Operator()
    model.forward = lambda *arrays: model.cross_attn(*arrays)
    with regard.record():
        model(query[:, :, :1], key, key, torch.arange(6)[None] < 3)
        with pytest.raises(regard.RecordingError, match="it sees keys that the first queries did"):
            model(query[:, :, 1:2], key, key, torch.arange(6)[None] < 4)


def test_what_checkpoints_compute_again_is_no_layer():
    from torch.utils.checkpoint import checkpoint

    model = Blocks()
    with torch.enable_grad(), regard.record() as recording:
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert recording.layer_numbers == (0, 1)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_that_is_given_is_refused_with_the_way_out(model):
    with pytest.raises(TypeError, match=r"leave it out: with regard.record"), regard.record(model):
        pass


def test_tokens_are_texts_of_one_or_each():
    for tokens in (3, "text", [], [1, 2], [["a", 1]], torch.arange(10), torch.arange(10)[None]):
        with pytest.raises(TypeError, match="tokens are texts"), regard.record(tokens=tokens):
            Blocks()(X)
    with pytest.raises(regard.ShapeError, match="tokens of 2 texts"):  # noqa: SIM117
        with regard.record(tokens=[LETTERS, LETTERS]):
            Blocks()(X)
    with regard.record(tokens=iter(LETTERS), layers=iter([1])) as recording:
        Blocks()(X)
    assert (recording.tokens, recording.layer_numbers) == (tuple(LETTERS), (1,))


class Separate(nn.Module):
    """Attention of a text to another, with a projection for each of query, key and value."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def project(self, x, memory):
        pairs = (self.q, x), (self.k, memory), (self.v, memory)
        return [part(y).view(len(y), -1, 4, 8).transpose(1, 2) for part, y in pairs]

    def forward(self, x, memory, keep):
        q, k, v = self.project(x, memory)
        return F.scaled_dot_product_attention(q * 1.0, k * 1.0, v, attn_mask=keep[:, None, None])


class OneClass(nn.Module):
    """An encoder-decoder whose names do not tell self-attention from cross-attention."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = (
            nn.ModuleList(nn.ModuleList(Separate() for _ in range(n)) for _ in range(2))
            for n in (1, 2)
        )

    def forward(self, x, y):
        def attend(attention, query, memory):
            every = torch.ones(1, memory.shape[1], dtype=torch.bool)
            return attention(query, memory, every).transpose(1, 2).flatten(2)

        for (own,) in self.encoder:
            x = attend(own, x, x)
        for own, cross in self.decoder:
            y = attend(cross, attend(own, y, y), x)


def test_cross_attention_of_the_class_of_the_self_attention_is_named_so():
    with regard.record() as recording:
        OneClass()(X, X[:, :6])
    layers = {name: one.layers for name, one in recording.groups.items()}
    lengths = {name: (x.query.shape[1], x.key.shape[1]) for name, (x, _) in layers.items()}
    assert lengths == {"encoder": (10, 10), "decoder": (6, 6), "cross": (6, 10)}


class Torchs(nn.MultiheadAttention):
    """The same with torch's module."""

    def __init__(self):
        super().__init__(32, 4, batch_first=True)

    def project(self, x, memory):
        parts = zip((x, memory), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3))
        return [F.linear(*own).view(len(own[0]), -1, 4, 8).transpose(1, 2) for own in parts]

    def forward(self, x, memory, keep):
        return super().forward(x, memory, memory, key_padding_mask=~keep)


@pytest.mark.parametrize("kind", [Separate, Torchs])
@pytest.mark.parametrize("keys", [9, 6])
def test_no_query_of_another_text_is_taken_for_padding(kind, keys):
    model, x, memory = kind(), X[:, :6].expand(2, -1, -1), torch.randn(2, keys, 32)
    for ends in ([(0, keys - 3), (0, keys)], [(2, keys), (0, keys - 1)]):
        keep = torch.stack([torch.arange(keys) >= low for low, _ in ends])
        keep &= torch.stack([torch.arange(keys) < high for _, high in ends])
        with regard.record() as recording:
            model(x, memory, keep)
        q, k, *_ = model.project(x, memory)
        scores = (q @ k.mT / 8**0.5).masked_fill(~keep[:, None, None], -torch.inf)
        for one, weights, (low, high) in zip(recording.batch, scores.softmax(-1), ends):
            found = one.weights[0][:]
            if keys == 9:  # other tokens, as their number shows
                weights = weights[..., low:high]
                assert one.query_tokens == tuple("012345")
            torch.testing.assert_close(found, weights, atol=1e-6, rtol=0)


class Pooling(nn.Module):
    """Attention of learned queries, or of given ones, to a text; only this is projected."""

    def __init__(self, turns):
        super().__init__()
        self.queries, self.kv = nn.Parameter(torch.randn(1, 10, 32)), nn.Linear(32, 64)
        self.turns = turns

    def forward(self, x, keep, queries=None):
        q = self.queries * 1.0 if queries is None else queries
        q, k, v = (y.unflatten(-1, (4, 8)).transpose(1, 2) for y in (q, *self.kv(x).chunk(2, -1)))
        k = 1.5 * k if self.turns else k
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("queries", [None, X.flip(1)])
def test_queries_that_no_projection_made_are_not_taken_for_padding(queries, turns):
    with regard.record() as recording:
        Pooling(turns)(X, torch.arange(10)[None] < 6, queries)
    assert recording.weights[0].shape[1] == 10


class Grouped(nn.Module):
    """Attention whose key heads are repeated for the query heads, with or without positions."""

    def __init__(self, heads, turns):
        super().__init__()
        self.turns = turns
        self.q, self.k, self.v = (nn.Linear(32, 8 * n) for n in (8, heads, heads))

    def forward(self, x, keep):
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (1.5 * y if turns else y for y, turns in zip((q, k), self.turns))
        k, v = (
            y[:, :, None].expand(-1, -1, 8 // y.shape[1], -1, -1).reshape(q.shape) for y in (k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


@pytest.mark.parametrize("turns", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_padding_is_left_out_where_key_heads_are_repeated(heads, turns):
    with regard.record() as recording:
        Grouped(heads, turns)(X, torch.arange(10)[None] < 6)
    assert recording.weights[0].shape == (8, 6, 6)


def test_padding_of_one_text_is_left_out_whatever_its_modules_are_called():
    keep = torch.arange(10)[None] < 6
    for model in (Separate(), Torchs()):
        with regard.record() as recording:
            model(X, X, keep)
        assert recording.weights[0].shape == (4, 6, 6)

    class Adapted(Separate):
        def __init__(self):
            super().__init__()
            self.q = nn.Sequential(self.q, nn.Dropout(0.0))  # as adapters are in their places

        def forward(self, x, memory, keep):
            return F.scaled_dot_product_attention(*self.project(x, memory), keep[:, None, None])

    with regard.record() as recording:
        Adapted()(X, X, keep)
    assert recording.weights[0].shape == (4, 6, 6)

    class Inner(nn.Module):
        def forward(self, q, k, v, mask):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    class Outer(Separate):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x, memory, keep, by=1.0):
            q, k, v = self.project(x, memory)
            return self.inner(q * by if by != 1 else q, k, v, keep[:, None, None])

    with regard.record() as recording:
        Outer()(X, X, keep)
    assert recording.weights[0].shape == (4, 6, 6)
    with regard.record() as recording:
        Outer()(X, X, keep, 2.0)  # of which nothing is known
    assert recording.weights[0].shape == (4, 10, 10)
    assert not recording.weights[0][..., 6:].any()


def test_a_key_that_no_query_chooses_is_no_padding():
    x = torch.randn(1, 2, 6, 8)
    before = torch.ones(6, 6).tril(-1).bool()
    before[0, 0] = True
    with regard.record() as recording:
        F.scaled_dot_product_attention(x, x, x, attn_mask=before)
    expected = (x[0] @ x[0].mT / 8**0.5).masked_fill(~before, -torch.inf).softmax(-1)
    torch.testing.assert_close(recording.weights[0][:], expected, atol=1e-6, rtol=0)


def test_layers_of_a_group_have_the_same_padding():
    some = {"key_lengths": 7, "query_start": 0}
    x = torch.randn(1, 2, 10, 8)
    for calls, shapes in (([{}, some], {"": [10, 10]}), ([some, {}], {"a": [7], "b": [10]})):
        with regard.record() as recording:
            Calls(*calls)(x, x, [0, 1])
        found = [[layer.key.shape[1] for layer in g.layers] for g in recording.groups.values()]
        assert found == [*shapes.values()]


def test_queries_of_cross_attention_lose_the_padding_of_their_own_layer_alone():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn, self.cross_attn = Torchs(), Torchs()

        def forward(self, x, memory, keep):
            self.self_attn(x, x, keep)
            self.cross_attn(x, memory, torch.ones(1, 10, dtype=torch.bool))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.layers = Torchs(), nn.ModuleList([Layer()])
            self.last_cross = Torchs()

        def forward(self, x, memory, keep):
            self.layers[0](x, memory, keep)
            self.last_cross(memory, x, keep)

    with regard.record() as recording:
        Model()(X, X.flip(1), torch.arange(10)[None] < 6)
    shapes = {g.layers[0].name: g.weights[0].shape for g in recording.groups.values()}
    assert shapes == {
        "layers.0.self_attn": (4, 6, 6), "layers.0.cross_attn": (4, 6, 10),
        "last_cross": (4, 10, 6),
    }  # fmt: skip
