"""Recordings of weights that exist: what comes back, what works without query and key, and what
is refused."""

import copy
import pickle
import re

import numpy as np
import pytest

import regard
from regard import Layer, Recording
from regard.viewer.answer import Answers

torch = pytest.importorskip("torch")
TOKENS = ["a", " b", " c", " a", " b"]


def softmax(scores):
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def weights(*shape, causal=True, sink=0.0, seed=0):
    """Float64 ``(..., Lq, Lk)``; with a sink, rows sum to less than 1."""
    scores = 3 * np.random.default_rng(seed).standard_normal((*shape[:-1], shape[-1] + 1))
    scores[..., -1] = scores[..., -1] * sink if sink else -np.inf
    if causal:
        scores[..., :-1][..., np.tri(*shape[-2:], shape[-1] - shape[-2]) == 0] = -np.inf
    return softmax(scores)[..., :-1]


def all_of(recording):
    return np.stack([np.asarray(layer) for layer in recording.weights])


W = weights(2, 3, 5, 5)
FORMS = {
    "one array, as of np.load": W,
    "a list": list(W),
    "with a batch of one, as of transformers": tuple(torch.tensor(w[None]) for w in W),
    "one array with a batch of one": torch.tensor(W)[:, None],
    "by number": {0: W[0], 1: W[1]},
    "computed as it goes": (w for w in W),
    "with a gradient": [torch.tensor(w, requires_grad=True) for w in W],
    "strided": W.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_recording(form):
    recording = Recording.from_weights(TOKENS, FORMS[form])
    np.testing.assert_allclose(all_of(recording), W, rtol=1e-14, atol=1e-16)
    assert recording.layer_numbers == (0, 1)
    assert repr(recording) == "Recording(5 tokens, 2 layers, 3 heads, 1.2 kB)"
    named = "number=0, " if form == "by number" else ""
    assert repr(recording.layers[0]) == f"Layer(weights (3, 5, 5), {named}causal=True)"


@pytest.mark.parametrize("sink", [0.0, 1.0])
@pytest.mark.parametrize("length", [1, 7, 97, 800])
@pytest.mark.parametrize(
    ("dtype", "absolute", "relative"), [("float32", 3e-7, 4e-6), ("float64", 2e-15, 2e-14)]
)
def test_weights_come_back_within_a_few_roundings(dtype, absolute, relative, length, sink):
    given = weights(1, 2, length, length, sink=sink).astype(dtype)
    found = all_of(Recording.from_weights([""] * length, given, sinks=bool(sink)))
    assert found.dtype == dtype
    expected = given.astype(np.float64)
    if not sink:
        expected /= expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=absolute)
    large = expected > 1e-6
    np.testing.assert_allclose(found[large], expected[large], rtol=relative)
    assert (found[given == 0] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_half_precision_sum_to_1(dtype, wide):
    """Also where they were handed on in a wider dtype, as NumPy has no bfloat16."""
    given = torch.tensor(weights(1, 2, 300, 300)).to(getattr(torch, dtype))
    off = (given.double().sum(-1) - 1).abs().max()
    assert off > 1e-5
    found = all_of(Recording.from_weights([""] * 300, given.float() if wide else given))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.sum(-1, dtype=float), 1, atol=1e-6)
    np.testing.assert_allclose(found, given.double().numpy(), rtol=float(2 * off), atol=1e-7)


def test_a_row_that_sees_nothing_stays_0():
    given = W.copy()
    given[0, 1, 3] = 0
    for sinks in (False, True):
        found = Recording.from_weights(TOKENS, given, sinks=sinks)
        np.testing.assert_allclose(all_of(found), given, rtol=1e-13, atol=1e-15)
        assert found.weights[0].head(1).entropy()[3] == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_heads_with_and_without_a_sink_share_a_layer(dtype):
    with_rest = np.tri(4) / np.arange(2, 6)[:, None]
    given = np.stack([np.eye(4), with_rest, np.zeros((4, 4))]).astype(dtype)
    found = Recording.from_weights(list("abcd"), [given], sinks=True)
    np.testing.assert_allclose(all_of(found)[0], given, rtol=1e-6 if dtype == "float32" else 1e-15)


def test_zeros_after_the_queries_are_masked_and_others_are_not():
    causal, open_ = weights(1, 2, 5, 5), weights(1, 2, 5, 5, causal=False)
    open_[..., 0, 4] = 0
    open_ /= open_.sum(-1, keepdims=True)
    assert Recording.from_weights(TOKENS, causal).layers[0].options["causal"]
    found = Recording.from_weights(TOKENS, open_)
    assert "causal" not in found.layers[0].options
    assert found.weights[0].pool()[0, 0, 4] == -np.inf
    assert np.isnan(Recording.from_weights(TOKENS, causal).weights[0].pool()[0, 0, 4])
    last = weights(1, 2, 2, 5)  # the queries are the last of the keys
    found = Recording.from_weights(TOKENS, last)
    assert (found.query_tokens, found.layers[0].options["causal"]) == ((" a", " b"), True)
    np.testing.assert_allclose(all_of(found), last, rtol=1e-14)
    cross = Recording.from_weights(TOKENS, causal, query_tokens=list("vwxyz"))
    assert "causal" not in cross.layers[0].options
    assert cross.query_tokens == tuple("vwxyz")
    assert not Layer.from_weights(W[0], causal=False).options.get("causal")


def test_reductions_are_those_of_the_numbers():
    recording = Recording.from_weights(TOKENS, W)
    found, given = recording.weights[1], W[1]
    np.testing.assert_allclose(found[2, 3], given[2, 3], rtol=1e-14)
    entropy = -(given * np.log(np.where(given, given, 1))).sum(-1)
    np.testing.assert_allclose(found.entropy(), entropy, atol=1e-14)
    np.testing.assert_allclose(found.received(), given.sum(-2), rtol=1e-14)
    distance = (given * abs(np.subtract.outer(range(5), range(5)))).sum(-1)
    np.testing.assert_allclose(found.distance(), distance, atol=1e-14)
    np.testing.assert_allclose(found.topk(2).values, -np.sort(-given)[..., :2], rtol=1e-14)
    assert (found.strongest(1).query[0, 0], found.strongest(1).key[0, 0]) == np.unravel_index(
        given[0].argmax(), (5, 5)
    )
    part = found.head(1).part(slice(2, 4), slice(1, None))
    np.testing.assert_allclose(part[:], given[1, 2:4, 1:], rtol=1e-14)
    summary = found.summary()
    assert summary.lse is None
    np.testing.assert_allclose(summary.entropy, entropy, atol=1e-14)
    scores = recording.heads()
    np.testing.assert_allclose(scores.first, W[:, :, 1:, 0].mean(-1), rtol=1e-12)


def test_what_needs_query_and_key_says_so():
    recording = Recording.from_weights(TOKENS, W)
    assert len(recording.layers[0].key) == len(W[0]), "no head is said to share its keys"
    with pytest.raises(regard.UnsupportedError, match="steps: query and key are not known"):
        recording.steps(0, 0)
    found = recording.weights[0]
    for one in (
        found, found.head(1), found.part(slice(2)), found.copy(), copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)), Recording(TOKENS, [found.layer()]).weights[0],
        Recording(TOKENS, [recording.layers[0].head(1)]).weights[0],
    ):  # fmt: skip
        with pytest.raises(regard.UnsupportedError, match="lse: the scores are not known"):
            _ = one.lse
        with pytest.raises(regard.UnsupportedError, match="max_score: the scores are not known"):
            _ = one.max_score


def test_attentions_of_transformers_are_taken_as_they_are():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=3, n_embd=12, vocab_size=9, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2Model._from_config(config, attn_implementation="eager").eval()
    given = model(torch.arange(9)[None], output_attentions=True).attentions
    found = Recording.from_weights([str(n) for n in range(9)], given)
    assert found.layers[0].options["causal"]
    np.testing.assert_allclose(all_of(found), torch.cat(given).detach(), rtol=1e-5, atol=1e-7)


def test_names_and_numbers_are_kept():
    found = Recording.from_weights(TOKENS, {5: W[0], 9: W[1]}, names=["x.5", "x.9"], model="m")
    assert (found.layer_numbers, found.model) == ((5, 9), "m")
    assert [layer.name for layer in found.layers] == ["x.5", "x.9"]
    one = Layer.from_weights(W[0], name="x", number=4, head_numbers=[1, 3, 5])
    assert (one.name, one.number, one.head_numbers, one.nbytes) == ("x", 4, (1, 3, 5), 600)
    np.testing.assert_allclose(Recording(TOKENS, [one]).weights[4][3], W[0, 1], rtol=1e-14)


@pytest.mark.parametrize("sink", [0.0, 1.0])
def test_a_file_brings_them_back(tmp_path, sink):
    made = Recording.from_weights(TOKENS, weights(2, 3, 5, 5, sink=sink), sinks=bool(sink))
    path = tmp_path / "a.safetensors"
    made.save(path)
    found = Recording.load(path)
    assert [layer.weights_only for layer in found.layers] == [True, True]
    assert repr(found.layers) == repr(made.layers)
    np.testing.assert_array_equal(all_of(found), all_of(made))
    with pytest.raises(regard.UnsupportedError):
        found.steps(0, 0)
    found.save(tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == path.read_bytes()


def test_a_file_of_layer_by_layer_has_them(tmp_path):
    from regard.recording import Writer

    layers = [Layer.from_weights(W[0]), Layer(W[0], W[0])]
    Recording(TOKENS, layers).save(tmp_path / "a.safetensors")
    with Writer(tmp_path / "b.safetensors") as writer:
        for layer in layers:
            writer.add(layer)
        writer.finish({"": {"tokens": TOKENS}})
    for name in ("a", "b"):
        found = Recording.load(tmp_path / f"{name}.safetensors")
        assert [layer.weights_only for layer in found.layers] == [True, False]


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    Recording(TOKENS, [Layer(W[0], W[0])], model="weights_only").save(path)
    data = path.read_bytes()
    for fact in ("[true]", "[1]", "{}"):
        text = json_of(data, fact)
        path.write_bytes(text)
        with pytest.raises(regard.RecordingError, match="weights_only"):
            Recording.load(path)


def json_of(data, fact):
    """The file with a fact about its layers."""
    import json

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["weights_only"] = fact
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 64)
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + length :]


def test_the_viewer_answers_but_for_the_steps():
    answers = Answers([Recording.from_weights(TOKENS, W)])
    row = np.frombuffer(answers.answer("row", "layer=1&head=2&query=3").body, "<f4")
    np.testing.assert_allclose(np.nan_to_num(np.exp(row)), W[1, 2, 3], rtol=1e-6)
    for path in (
        "about", "tokens?side=key", "tile?layer=0&head=0&plane=max&level=0&row=0&column=0",
        "column?layer=0&head=0&key=1", "visible?layer=0&head=0", "links?layer=0&head=0&n=5",
        "heads?layer=1", "pair?query=3&key=1",
    ):  # fmt: skip
        assert answers.answer(*path.split("?")).status == 200, path
    answer = answers.answer("steps", "layer=0&head=0&queries=1&keys=0")
    assert (answer.status, answer.body.decode()[:35]) == (
        400,
        "steps: query and key are not known,",
    )
    (facts,) = answers.recordings
    assert [layer.weights_only for layer in facts.layers] == [True, True]


B = np.array([[[1.0, 0.0], [0.5, 0.5]]])  # (H, Lq, Lk)


def changed(i, j, x):
    found = B.copy()
    found[0, i, j] = x
    return [found]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (B, regard.ShapeError, r"weights \(1, 2, 2\) are not read as .*\[weights\] of one layer"),
        ([B[0]], regard.ShapeError, r"weights\[0\] \(2, 2\) is not read as .*weights\[None\]"),
        ([B, np.stack([B, B])], regard.ShapeError, r"weights\[1\] .* is of 2 texts; .*w\[i\]"),
        ([B[:0]], regard.ShapeError, "with at least one head"),
        ([np.eye(3)[None]], regard.ShapeError, "there are 2 tokens; one for each key is needed"),
        ([np.eye(3)[None, :, :2]], regard.ShapeError, "queries that are not among .* query_tokens"),
        ([], regard.ShapeError, "weights is empty; one array .*attn_implementation=.eager"),
        ([B, None], TypeError, r"weights\[1\] is None; .*attn_implementation=.eager"),
        ({3: B.tolist()}, TypeError, r"weights\[3\] is list; a NumPy array or torch tensor"),
        ([B > 0], TypeError, r"weights\[0\] is of bool; float16, bfloat16"),
        ("ab", TypeError, "weights is str; one array"),
        (3, TypeError, "weights is int; one array"),
        (changed(1, 0, np.nan), ValueError, r"head 0 query 1 key 0 is nan; .*nan_to_num"),
        (changed(1, 1, np.inf), ValueError, "query 1 key 1 is inf; weights are finite"),
        (changed(1, 1, -0.1), ValueError, r"query 1 key 1 is -0.1; .*not negative. .*softmax"),
        (changed(0, 0, 1.1), ValueError, r"head 0 query 0 sums to 1.1; .*model.eval\(\)"),
        (changed(1, 1, 0.2), ValueError, r"query 1 sums to 0.7; .*sinks=True; if keys"),
        ([B, B.astype(np.float32) * np.float32(0.999)], ValueError, r"weights\[1\] head 0 query 0"),
    ],
)  # fmt: skip
def test_what_no_weights_are_is_refused(given, error, message):
    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        Recording.from_weights(["a", "b"], given)


def test_other_arguments_are_checked():
    for sinks in ("no", np.array([0.5])):  # of a head, as ``attention`` has them
        with pytest.raises(TypeError, match=r"from_weights: sinks is .*; True or False is needed"):
            Recording.from_weights(["a", "b"], [B], sinks=sinks)
    with pytest.raises(TypeError, match="names is an int; a list is needed"):
        Recording.from_weights(["a", "b"], [B], names=3)
    with pytest.raises(regard.ShapeError, match="names is one str; 1 layer needs one each"):
        Recording.from_weights(["a", "b"], [B], names="x")
    with pytest.raises(regard.ShapeError, match="there are 3 query_tokens; one for each query"):
        Recording.from_weights(["a", "b"], [B], query_tokens=list("abc"))
    with pytest.raises(ValueError, match="has weights after its queries' positions, and causal"):
        Layer.from_weights(B[:, ::-1], causal=True)
    with pytest.raises(ValueError, match=r"weights_only without a bias; Layer\.from_weights"):
        Layer(B, B, weights_only=True)
    with pytest.raises(TypeError, match="weights_only is 1; True or False"):
        Layer(B, B, weights_only=1)


def test_a_size_above_the_limit_is_refused():
    with (
        regard.limits(weights_bytes=700),
        pytest.raises(
            regard.MaterializeError, match=r"\(6, 5, 5\) float64 is 1.2 kB.*700 B\."
        ) as it,
    ):
        Recording.from_weights(TOKENS, W)
    assert "Give fewer layers or heads" in str(it.value)
    with regard.limits(weights_bytes=700):
        Recording.from_weights(TOKENS, W.astype(np.float32))
