"""Bad input gets an error that says what was found, what is needed, and the way out."""

import array
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard._base.errors import a_type
from regard.lm.training import Settings

x = np.ones((2, 4, 6, 8), np.float32)
ones = np.ones


def heads(n):
    return ones((2, n, 6, 8), np.float32)


def test_heads_that_do_not_divide():
    q, k = ones((2, 12, 128, 64), np.float32), ones((2, 5, 128, 64), np.float32)
    with pytest.raises(regard.ShapeError) as caught:
        regard.attention(q, k, k)
    assert str(caught.value) == (
        "attention: 12 query heads cannot share 5 key heads; 12 must be a multiple of 5.\n"
        "  query (2, 12, 128, 64)  key (2, 5, 128, 64)  value (2, 5, 128, 64)  "
        "read as (B, H, L, D)"
    )


BAD_SHAPES = {
    "lengths that disagree": ((x, x, x[:, :, :5]), {}, "6 keys and 5 values; each key needs its"),
    "sizes that disagree": ((x, x[..., :4], x), {}, "query vectors have 8 numbers and key vectors"),
    "value heads": ((x, x, x[:, :2]), {}, "4 key heads and 2 value heads; they must be equal"),
    "more key heads": ((heads(2), x, x), {}, "2 query heads cannot share 4 key heads"),
    "leading axes": ((x, ones((3, *x.shape[1:]), "f"), x), {}, "leading axes of key (3,) do not"),
    "numbers of axes": ((x, x[0], x[0]), {}, "query has 4 axes and key has 3; they must agree"),
    "a vector": ((x[0, 0, 0],) * 3, {}, "query has 1 axis; at least (L, D) is needed"),
    "one of each": ((x[:, :, :1], x, x[:, :, :1]), {}, "6 keys and 1 value; each key needs"),
    "one head for two": ((x[:, :1], heads(2), heads(2)), {}, "1 query head cannot share 2 key he"),
    "no width": ((x[..., :0], x[..., :0], x), {}, "the head size D is 0"),
    "a mask of the wrong shape": (
        (x, x, x),
        {"mask": ones((5, 6), bool)},
        "mask (5, 6) cannot be broadcast to (2, 4, 6, 6), the weights' shape (..., Hq, Lq, Lk)",
    ),
    "a bias of the wrong shape": ((x, x, x), {"bias": ones((3, 1, 6, 6))}, "bias (3, 1, 6, 6) can"),
    "a mask of keys for each text": (
        (x, x, x),
        {"mask": ones((2, 6), bool)},
        "(..., Hq, Lq, Lk). For each element of the batch it is mask[:, None, None].",
    ),
    "a bias for each text": (
        (x, x, x),
        {"bias": ones((2, 6, 6), "f")},
        "(..., Hq, Lq, Lk). For each element of the batch it is bias[:, None].",
    ),
    "a mask of too many axes": (
        (x[0], x[0], x[0]),
        {"mask": ones((2, 4, 6, 6), bool)},
        "cannot be broadcast to (4, 6, 6)",
    ),
    "lengths per batch": ((x, x, x), {"key_lengths": [1, 2, 3]}, "key_lengths has shape (3,); (2,"),
    "lengths too large": (
        (x, x, x),
        {"key_lengths": [1, 7]},
        "from 1 to 7; each must be between 0",
    ),
    "lengths negative": ((x, x, x), {"key_lengths": -1}, "from -1 to -1; each must be between 0"),
    "places per batch": ((x, x, x), {"query_start": [1, 2, 3]}, "query_start has shape (3,)"),
    "segments": ((x, x, x), {"segments": [0, 1]}, "segments has shape (2,); (2, 6) is needed"),
    "one segments for two lengths": (
        (x[:, :, :3], x, x),
        {"segments": [0] * 6},
        "there are 3 queries and 6 keys. Pass a pair",
    ),
    "intervals of keys": (
        (x, x, x),
        {"intervals": ([0] * 6, [1] * 5)},
        "intervals has shape (5,); (2, 6) is needed",
    ),
    "three segments": (
        (x, x, x),
        {"segments": ([0], [1], [2])},
        "segments is a tuple of 3; a pair",
    ),
    "sinks": ((x, x, x), {"sinks": ones(3, "f")}, "sinks has shape (3,); one logit per query head"),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shapes_that_do_not_fit(name, library):
    arrays, options, message = BAD_SHAPES[name]
    if library == "torch":
        arrays = [torch.from_numpy(a) for a in arrays]
        options = {n: torch.from_numpy(o) if isinstance(o, np.ndarray) else o
                   for n, o in options.items()}  # fmt: skip
    with pytest.raises(regard.ShapeError) as caught:
        regard.attention(*arrays, **options)
    assert message in str(caught.value)


t = torch.from_numpy(x)
BAD_TYPES = {
    "integer q": (
        (x.astype(int), x, x),
        {},
        "query is int64; floating numbers are needed (float16, bfloat16, float32, float64). "
        "Convert it, as in query.astype(np.float32).",
    ),
    "complex q": ((x.astype(complex),) * 3, {}, "query is complex128; floating numbers are needed"),
    "mixed dtypes": (
        (x, x.astype(float), x),
        {},
        "query is float32 and key is float64; query, key",
    ),
    "mixed libraries": ((x, t, x), {}, "query is of numpy and key of torch; all must be of one"),
    "a list": (([[1.0]], x, x), {}, "query is a builtins.list; NumPy arrays and dense"),
    "a masked array": ((np.ma.array(x), x, x), {}, "query is a numpy.ma"),
    "a float mask": (
        (x, x, x),
        {"mask": ones((6, 6))},
        "mask is float64; a mask is bool, True where "
        "a query may attend. Numbers that are added to the scores are passed as bias=",
    ),
    "an int mask": (
        (x, x, x),
        {"mask": ones((6, 6), int)},
        "ones and zeros become a mask with mask",
    ),
    "a matrix": ((x[0, 0].view(np.matrix),) * 3, {}, "NumPy arrays and dense torch tensors"),
    "swapped bytes": ((x.astype(">f4"),) * 3, {}, "query.astype(query.dtype.newbyteorder('='))"),
    "a mask in a list": ((x, x, x), {"mask": [[True]]}, "as in np.array(mask, dtype=bool)"),
    "a swapped bias": (
        (x, x, x),
        {"bias": ones((6, 6), ">f4")},
        "bias.astype(bias.dtype.newbyteorder('='))",
    ),
    "an int bias": ((x, x, x), {"bias": ones((6, 6), int)}, "bfloat16, float32, float64)."),
    "a bool bias": ((x, x, x), {"bias": ones((6, 6), bool)}, "A bool that says who may attend is"),
    "a mask of the other library": (
        (x, x, x),
        {"mask": t > 0},
        "query is of numpy and mask of torch",
    ),
    "float lengths": (
        (x, x, x),
        {"key_lengths": [1.0, 2.0]},
        "key_lengths is float64; integers are",
    ),
    "bool segments": (
        (x, x, x),
        {"segments": ones(6, bool)},
        "segments is bool; integers are needed",
    ),
    "one interval": (
        (x, x, x),
        {"intervals": np.zeros((2, 6), int)},
        "intervals is an ndarray; a pair is needed: the first key that each query sees",
    ),
    "three ends of intervals": (
        (x, x, x),
        {"intervals": ([0] * 6, [1] * 6, [2] * 6)},
        "intervals is a tuple of 3; a pair is needed",
    ),
    "integer sinks": ((x, x, x), {"sinks": ones(4, int)}, "sinks is int64; floating numbers are"),
    "a window of one int": (
        (x, x, x),
        {"window": 256},
        "window is 256; a pair (left, right) of ints",
    ),
    "a window of floats": (
        (x, x, x),
        {"window": (1.0, 0)},
        "a pair (left, right) of ints is needed",
    ),
    "causal as a mask": ((x, x, x), {"causal": ones(3)}, "True or False is needed"),
    "a scale in words": ((x, x, x), {"scale": "1"}, "scale is a str; a number is needed"),
    "lengths with a mask": (
        (x, x, x),
        {"key_lengths": np.ma.array([3, 6], mask=[True, False])},
        "key_lengths: a masked array is given, whose mask would not count",
    ),
    "lists of several lengths": (
        (x, x, x),
        {"segments": [[0], [1, 2]]},
        "segments: lists of several lengths are given; an array is needed",
    ),
    "a softcap in words": ((x, x, x), {"softcap": "1"}, "softcap is a str; a number is needed"),
    "a seed in words": (
        (x, x, x),
        {"dropout": 0.5, "seed": "1"},
        "seed is a str; an int is needed",
    ),
    "a seed that is not used": ((x, x, x), {"seed": 1.0}, "seed is a float; an int is needed"),
    "a seed that says yes": (
        (x, x, x),
        {"dropout": 0.5, "seed": True},
        "seed is a bool; an int is needed",
    ),
    "a seed of parts": (
        (t, t, t),
        {"dropout": 0.5, "seed": torch.tensor(1.7)},
        "seed is a tensor () of float32; an int, or a tensor () of ints, is needed",
    ),
    "two seeds": (
        (t, t, t),
        {"dropout": 0.5, "seed": torch.tensor([1, 2])},
        "seed is a tensor (2,) of int64; an int, or a tensor () of ints",
    ),
    "weights in words": (
        (x, x, x),
        {"return_weights": "no"},
        "return_weights is 'no'; True or False is needed",
    ),
    "statistics by a number": (
        (x, x, x),
        {"return_statistics": 1},
        "return_statistics is 1; True or False is needed",
    ),
}


@pytest.mark.parametrize("name", BAD_TYPES)
def test_wrong_types(name):
    arrays, options, message = BAD_TYPES[name]
    with pytest.raises(TypeError) as caught:
        regard.attention(*arrays, **options)
    assert message in str(caught.value)


q = ones((2, 5, 4), np.float32)


def builtin():
    return regard.lm.LanguageModel.load("builtin")


record = regard.Recording(list("abcde"), [regard.Layer(q, q)])
FLAGS = {
    "mapped": lambda x: regard.Recording.load("a.safetensors", mapped=x),
    "statistics": lambda x: record.save("/", statistics=x),
    "statistics of a Writer": lambda x: regard.recording.Writer("a", statistics=x),
    "weights_only": lambda x: regard.Layer(q, q, weights_only=x),
    "sinks": lambda x: regard.Layer.from_weights(q, sinks=x),
    "causal": lambda x: regard.Layer.from_weights(q, causal=x),
    "transparent": lambda x: record.figure(0, 0, transparent=x),
    "words": lambda x: record.view(words=x, open_browser=False),
    "open_browser": lambda x: record.view(open_browser=x),
    "open_browser of texts": lambda x: regard.viewer.view_texts(None, open_browser=x),
    "ascending": lambda x: record.heads().sort("entropy", ascending=x),
    "bos": lambda x: regard.lm.WordTokenizer("a b").encode("a", bos=x),
    "eos": lambda x: regard.lm.WordTokenizer("a b").encode("a", eos=x),
    "bos of byte pairs": lambda x: builtin().tokenizer.encode("a", bos=x),
    "values": lambda x: regard.record(values=x).__enter__(),
    "evaluation": lambda x: regard.watch(torch.nn.Linear(2, 2), evaluation=x),
    "check_nan": lambda x: regard.watch(torch.nn.Linear(2, 2), check_nan=x),
    "bias": lambda x: regard.nn.MultiHeadAttention(8, 2, bias=x),
    "bias of one head": lambda x: regard.nn.SelfAttention(8, 2, bias=x),
    "causal of one head": lambda x: regard.nn.SelfAttention(8, 2, causal=x),
}


@pytest.mark.parametrize("wrong", ["no", 1, 0.0])
@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name, wrong):
    with pytest.raises(TypeError, match=f"{name.split()[0]} is {wrong!r}; True or False is needed"):
        FLAGS[name](wrong)


BAD_VALUES = {
    "window": ({"window": (-1, 0)}, "window is (-1, 0); its sides must not be negative"),
    "scale": ({"scale": float("nan")}, "scale is nan; it must be finite"),
    "a scale above all floats": ({"scale": -(10**400)}, "scale is -inf; it must be finite"),
    "softcap": ({"softcap": 0.0}, "softcap is 0.0; it must be positive and finite"),
    "dropout": ({"dropout": 1.0}, "dropout is 1.0; it must be at least 0 and less than 1"),
    "negative dropout": ({"dropout": -0.1}, "dropout is -0.1; it must be at least 0"),
    "seed": ({"dropout": 0.5, "seed": 2**64}, "it must fit into 64 bits with a sign"),
    "backend": (
        {"backend": "cuda"},
        "backend is 'cuda'; 'auto', 'kernel', 'torch', 'fused', 'triton', 'reference' are known",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_values_out_of_range(name):
    options, message = BAD_VALUES[name]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared whole
        regard.attention(x, x, x, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("function", [regard.attention, regard.scaled_dot_product_attention])
def test_tensors_that_are_not_dense_are_refused_with_the_way_out(function):
    for q in (torch.eye(4).to_sparse(), torch.eye(4).to_mkldnn()):
        said = rf"attention: query is a tensor of layout {q.layout}; .*query\.to_dense\(\)"
        with pytest.raises(regard.UnsupportedError, match=said):
            function(q, q, q)


@pytest.mark.parametrize(
    ("what", "ask"),
    [
        ("weights: x", lambda w, sparse: w @ sparse),
        ("weights: y", lambda w, sparse: w.T @ sparse),
        ("weights: keys", lambda w, sparse: w.mass(sparse)),
        ("effects: value", lambda w, sparse: w.effects(sparse, sparse)),
        ("effects: gradient", lambda w, sparse: w.effects(t[0, 0], sparse)),
        ("effects: x", lambda w, sparse: w.effects(t[0, 0], t[0, 0]) @ sparse),
        ("merge: output of part 0", lambda w, sparse: regard.merge([(sparse, w.statistics)])),
        (
            "attention_gradients: output",
            lambda w, sparse: regard.attention_gradients(
                *(t[0, 0],) * 3, sparse, w.statistics, t[0, 0]
            ),
        ),
    ],
)
def test_what_is_asked_of_weights_takes_dense_tensors(what, ask):
    weights = regard.AttentionWeights(t[0, 0], t[0, 0])
    said = rf"^{what} is a tensor of layout torch\.sparse_coo; .*to_dense"
    with pytest.raises(regard.UnsupportedError, match=said):
        ask(weights, t[0, 0].to_sparse())


@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.parametrize("function", [regard.attention, regard.scaled_dot_product_attention])
def test_nested_tensors_are_refused_with_the_way_out(function, layout):
    texts = [torch.randn(n, 2, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(texts, layout=layout).transpose(1, 2)
    said = rf"attention: query is a nested tensor, of layout {layout}; .*key_lengths="
    with pytest.raises(regard.UnsupportedError, match=said):
        function(q, q, q)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_causal_biases_of_torch_are_refused_with_the_way_out(name):
    from torch.nn.attention.bias import causal_lower_right

    q, k = torch.randn(3, 8), torch.randn(4, 8)
    with pytest.raises(TypeError, match=f"{name} is a CausalBias .* Pass causal=True"):
        regard.attention(q, k, k, **{name: causal_lower_right(3, 4)})


INTEGERS = {
    "key_lengths": np.array([5, 3]),
    "query_start": np.array([2, -1]),
    "segments": (np.arange(6) // 3, np.arange(7)[::-1] // 4),
    "intervals": (np.arange(6) % 2, np.arange(12).reshape(2, 6) // 2),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("form", ["backwards", "swapped", "read-only", "lists"])
def test_integers_are_read_in_any_form(form, name):
    def formed(ids):
        if form == "swapped":
            return ids.astype(">i4")
        if form == "lists":
            return ids.tolist()
        found = np.ascontiguousarray(ids[..., ::-1])[..., ::-1] if form == "backwards" else +ids
        found.flags.writeable = False
        return found

    given = INTEGERS[name]
    many = tuple(map(formed, given)) if isinstance(given, tuple) else formed(given)
    q, k = np.random.default_rng(0).normal(size=(2, 2, 3, 7, 4))
    expected = regard.attention(q[:, :, :6], k, k, causal=True, **{name: given})
    for arrays in ((q[:, :, :6], k, k), tuple(map(torch.from_numpy, (q[:, :, :6], k, k)))):
        found = regard.attention(*arrays, causal=True, **{name: many})
        np.testing.assert_allclose(np.asarray(found), expected, atol=1e-13)
        weights = regard.AttentionWeights(*arrays[:2], causal=True, **{name: many})
        np.testing.assert_allclose(np.asarray(weights @ arrays[2]), expected, atol=1e-13)


BEYOND_FLOATS = {
    "residual is 1000": lambda x: regard.rollout(record, residual=x),
    "dpi is 1000": lambda x: record.figure(0, 0, dpi=x),
    "size is (1000": lambda x: record.figure(0, 0, size=(x, 3)),
    "rope is 1000": lambda x: regard.nn.MultiHeadAttention(8, 2, rope=x),
    "scale is inf": lambda x: regard.Layer(q, q, scale=x),
    "temperature inf": lambda x: builtin().generate("a", 1, temperature=x),
    "needs inf GB": lambda x: builtin().generate("a", x),
    "000) float64 is inf GB": lambda x: regard.AttentionWeights(q, q).blocks(
        [0] * 5, [0] * 5, "mass", (5, x)
    ),
    "muon_rate 1000": lambda x: Settings(muon_rate=x),
}


@pytest.mark.parametrize("said", BEYOND_FLOATS)
def test_a_number_that_no_float_can_hold_is_told(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        BEYOND_FLOATS[said](10**400)


def test_a_limit_that_no_float_can_hold_is_none():
    with regard.limits(weights_bytes=10**400):
        assert len(np.asarray(regard.AttentionWeights(q, q))) == 2


@pytest.mark.parametrize("name", ["every", "start"])
def test_a_tensor_that_is_no_int_is_told(name):
    with pytest.raises(TypeError, match=rf"watch: {name} is tensor\(1\.\); an int is needed"):
        regard.watch(torch.nn.Linear(2, 2), **{name: torch.tensor(1.0)})


def test_the_seed_of_a_text_may_be_an_array_without_axes():
    text = builtin().generate("a", 3, temperature=1, seed=7)
    assert builtin().generate("a", 3, temperature=1, seed=np.array(7)) == text


def test_an_edit_is_by_a_factor_that_a_float_can_hold():
    with pytest.raises(ValueError, match="factor is inf; it must be at least 0 and finite"):
        regard.Edit(factor=10**400)


@pytest.mark.parametrize("name", ["key_lengths", "query_start"])
def test_integers_that_are_not_dense_are_refused_with_the_way_out(name):
    lengths = torch.tensor([1, 2]).to_sparse()
    for arrays in ((x, x, x), (t, t, t)):
        with pytest.raises(regard.UnsupportedError, match=rf"{name}\.to_dense\(\)"):
            regard.attention(*arrays, **{name: lengths})


def test_lengths_without_a_batch_axis_say_that_there_is_none():
    with pytest.raises(regard.ShapeError, match="no batch axis in front of"):
        regard.attention(x[0], x[0], x[0], key_lengths=[1, 2, 3, 4])


def test_devices_that_differ():
    q = torch.ones(2, 3, 4)
    k = torch.empty(2, 3, 4, device="meta")
    with pytest.raises(
        TypeError, match=r"query is on cpu and key on meta; .*key.to\(query.device\)"
    ):
        regard.attention(q, k, k)


def test_questions_on_meta_have_shapes_and_no_numbers():
    q, here = torch.empty(2, 3, 4, device="meta"), torch.randn(2, 3, 4)
    weights = regard.AttentionWeights(q, q, causal=True)
    of_here = regard.AttentionWeights(here, here, causal=True)
    for name, args in (("entropy", ()), ("received", ()), ("topk", (2,))):
        found, expected = (getattr(x, name)(*args) for x in (weights, of_here))
        for x, y in zip(found, expected) if isinstance(found, tuple) else [(found, expected)]:
            assert x.is_meta
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert weights[0, 0].is_meta
    _, statistics = regard.attention(q, q, q, causal=True, return_statistics=True)
    assert statistics.total.shape == (2, 3)
    for read in (np.asarray, regard.AttentionWeights.argmax):
        with pytest.raises(regard.UnsupportedError, match="on meta, where tensors have shapes"):
            read(weights)
    lengths = torch.ones(2, dtype=torch.int64, device="meta")
    batch = regard.AttentionWeights(q[:, None], q[:, None], key_lengths=lengths)
    with pytest.raises(regard.UnsupportedError, match=r"numbers of a tensor \(2,\) are read here"):
        batch.entropy()


@pytest.mark.parametrize("rounded", [False, True])
def test_meta_serves_whatever_torch_rounds(rounded):
    q = torch.empty(2, 3, 5, 4, device="meta")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if rounded else before)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            out = regard.scaled_dot_product_attention(q, q, q, is_causal=True)
            assert out.is_meta
            assert (out.shape, out.dtype) == (q.shape, q.dtype)
            assert regard.AttentionWeights(q, q).entropy().is_meta
            layer = regard.nn.MultiHeadAttention(4, 2, device="meta")
            assert layer(q[0]).shape == q[0].shape
            with pytest.raises(TypeError, match="one dtype is needed"):
                layer(q[0].double())
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_reference_refuses_other_devices():
    q = torch.empty(2, 3, 4, device="meta")
    with pytest.raises(
        regard.UnsupportedError, match=r"reference: it computes on the CPU; .*\.cpu"
    ):
        regard.attention(q, q, q, backend="reference")


def test_the_weights_check_their_arguments_too():
    with pytest.raises(regard.ShapeError, match="12 query heads cannot share 5 key heads"):
        regard.AttentionWeights(ones((12, 3, 4)), ones((5, 3, 4)))
    with pytest.raises(TypeError, match="mask is float64"):
        regard.AttentionWeights(ones((3, 4)), ones((3, 4)), mask=ones((3, 3)))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (3, "an int"),
        ("3", "a str"),
        ([], "a list"),
        (None, "a NoneType"),
        (ones(1), "an ndarray"),
        (regard.AttentionWeights(x, x), "an AttentionWeights"),
        (np.uint8(1), "a uint8"),
        (torch.nn.LSTM(1, 1), "an LSTM"),
        (torch.nn.MultiheadAttention(1, 1), "a MultiheadAttention"),
        (torch.nn.Linear(1, 1), "a Linear"),
    ],
)
def test_what_is_found_has_its_article(found, told):
    assert a_type(found) == told


def test_what_is_found_is_told_with_its_module():
    assert a_type(torch.ones(1), whole=True) == "a torch.Tensor"
    with pytest.raises(TypeError, match=r"query is an array\.array; NumPy arrays and"):
        regard.attention(array.array("f", [1.0]), x, x)


def test_messages_are_written_with_the_article_of_what_is_found():
    package = Path(regard.__file__).parent
    texts = {path: path.read_text() for path in package.rglob("*.py")}
    assert [str(path) for path, text in texts.items() if "a {type(" in text] == []
