"""Row statistics in the file of a recording: the same weights, without a pass over all keys."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import regard
from recordings import DTYPES, TOKENS, assert_same, layer, numbers, sample
from regard import Edit
from regard._backends.kernel import Kernel
from regard._backends.reference import Reference
from regard._backends.torch import Torch
from regard.recording import Layer, Recording, Writer
from regard.viewer._facts import without_first_token

WORDS = [" The", " jour", "ney", " of", " a", " thou", "sand", " mi", "les", ".", " A", "b"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


@pytest.fixture
def computed(monkeypatch):
    """The rows and heads whose statistics are computed from here on."""
    found = []
    for backend in (Kernel, Torch, Reference):

        def counted(self, call, plain=backend.row_statistics):
            found.append(call.query.shape[1:3])
            return plain(self, call)

        monkeypatch.setattr(backend, "row_statistics", counted)
    return found


def text(n=12, **options):
    return layer(4, 2, n, n, 6, 3, **options)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, 0)},
    "scale": {"scale": 3.0, "softcap": 5.0},
    "sinks": {"causal": True, "sinks": numbers(4)},
    "bias": {"bias": numbers(4, 12, 12), "mask": np.tri(12, dtype=bool)},
    "segments": {"segments": np.arange(12) // 5, "key_lengths": 11, "query_start": 0},
    "edits": {"causal": True, "edits": [Edit(1, slice(2, None), 0), Edit(keys=3, factor=0.25)]},
    "nothing": {"mask": np.zeros((12, 12), bool)},
    "chosen": {"causal": True, "head_numbers": (3, 5, 8, 9), "number": 7, "name": "a"},
}


def answers(weights):
    """What is asked of weights in each of their ways."""
    yield weights[...]
    for h in weights.head_numbers:
        one = weights.head(h)
        yield from (one[5], one.entropy(), one.topk(3).values, one.distance(), one.received())
        yield from (one.pool((4, 4)), one.part(slice(3, 7), slice(2, 9))[...], one.lse)
        yield from (one @ np.ones((12, 2)), one.at([3, 4], [1, 2]), one.mass([0, 3]))
    yield from weights.summary(topk=2, strongest=2, pool=(3, 3))[:4]


@pytest.mark.parametrize("options", OPTIONS)
def test_weights_are_those_without(path, options):
    made = Recording(WORDS, [text(**OPTIONS[options])])
    made.save(path, statistics=True)
    found = Recording.load(path)
    assert_same(found, made)
    (number,) = found.layer_numbers
    assert found.layers[0].statistics.total.shape == (4, 12)
    for a, b in zip(answers(found.weights[number]), answers(made.weights[number]), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=3e-7)
    a, b = (x.in_words().weights[number] for x in (found, made))
    np.testing.assert_allclose(a[...], b[...], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.3, 3000.0])
def test_they_are_those_of_the_scores(path, dtype, scale):
    """And weights made of them are exact, at scores of any size."""
    made = Recording(WORDS, [text(dtype=dtype, scale=scale, causal=True)])
    made.save(path, statistics=True)
    q, k = (np.asarray(x, np.float64) for x in (made.layers[0].query, made.layers[0].key))
    scores = np.einsum("hid,hjd->hij", q, k.repeat(2, 0)) * scale
    scores = np.where(np.tri(12, dtype=bool), scores, -np.inf)
    arrays = load_file(path)
    maximum, total = arrays["layers.0.maximum"], arrays["layers.0.total"]
    wide = dtype is np.float64
    assert maximum.dtype == total.dtype == (np.float64 if wide else np.float32)
    eps = np.finfo(maximum.dtype).eps
    np.testing.assert_allclose(maximum, scores.max(-1), rtol=20 * eps, atol=1e-6 * (not wide))
    expected = np.exp(scores - maximum.astype(np.float64)[..., None]).sum(-1)
    np.testing.assert_allclose(total, expected, rtol=40 * eps * (1 + abs(scores.max())))
    plain = made.weights[0][...]
    np.testing.assert_allclose(
        Recording.load(path).weights[0][...], plain, rtol=20 * eps * 6, atol=2 * eps
    )


def test_rows_of_scores_that_no_processor_rounds_alike_are_computed_anew(path, computed):
    x = numbers(2, 12, 8)
    x[1] *= 3e4
    made = Recording(WORDS, [Layer(x, x, causal=True)])
    made.save(path, statistics=True)
    arrays = load_file(path)
    with safe_open(path, "np") as file:
        header = file.metadata()
    arrays["layers.0.maximum"][1] *= 1 + 1e-6  # as another instruction set may have it
    save_file(arrays, path, header)
    weights = Recording.load(path).weights[0]
    computed.clear()
    np.testing.assert_array_equal(weights[1], made.weights[0][1])
    assert computed[0] == (1, 12)
    computed.clear()
    np.testing.assert_allclose(weights[0], made.weights[0][0], rtol=1e-6)
    assert computed[0] == (1, 1)


def test_parts_need_no_pass_over_all_rows(path, computed):
    n = 700
    x = numbers(2, n, 8)
    made = Recording(["a"] * n, [Layer(x, x, causal=True)])
    made.save(path, statistics=True)
    assert computed == [(2, n)]
    computed.clear()
    weights = Recording.load(path).weights[0]
    row = weights[1, 17]
    tile = weights.head(1).part(slice(100, 400)).pool((10, 10))
    top = weights.head(1).part(slice(600, 700)).topk(4)
    assert computed == [(1, 1)]  # one row of the head, to know that they fit
    weights.entropy()
    assert computed == [(1, 1), (2, 1)]
    plain = made.weights[0]
    np.testing.assert_allclose(row, plain[1, 17], rtol=1e-6)
    np.testing.assert_allclose(
        tile, plain.head(1).part(slice(100, 400)).pool((10, 10)), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        top.values, plain.head(1).part(slice(600, 700)).topk(4).values, rtol=1e-6
    )


def test_the_file_says_so(path):
    sample().save(path)
    before = load_file(path)
    sample().save(path, statistics=True)
    assert safe_open(path, "np").metadata()["version"] == "4"
    arrays = load_file(path)
    names = {f"layers.{n}.{name}" for n in range(3) for name in ("maximum", "total")}
    assert arrays.keys() - before.keys() == names
    assert_same(Recording.load(path), sample())
    assert "statistics" in repr(Recording.load(path).layers[0])


def test_they_are_kept_when_it_is_saved_again(path, computed):
    sample().save(path, statistics=True)
    written = path.read_bytes()
    computed.clear()
    for found in (Recording.load(path), Recording.load(path, mapped=False)):
        found.save(path)
        assert path.read_bytes() == written
        found.save(path, statistics=True)
        assert path.read_bytes() == written
    assert computed == []
    found = Recording.load(path).layers[1].head(2)
    whole = Recording.load(path).layers[1].statistics
    for a, b in zip(found.statistics, whole):
        np.testing.assert_array_equal(a, b[2:3])


def test_copies_have_them(path, computed):
    made = Recording(WORDS, [text(causal=True)])
    made.save(path, statistics=True)
    found = Recording.load(path)
    computed.clear()
    for copied in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        np.testing.assert_array_equal(copied.weights[0][...], found.weights[0][...])
    part = found.weights[0].head(1).part(slice(3, 9))
    np.testing.assert_array_equal(part.copy()[...], part[...])
    assert all(rows == 1 for _, rows in computed)


def test_groups_have_them_each(path):
    cross = Recording(TOKENS, [layer(Lq=3)], query_tokens=["a", "b", "c"])
    made = Recording(WORDS, [text(causal=True)], group="decoder", others={"cross": cross})
    made.save(path, statistics=True)
    found = Recording.load(path)
    for name, group in made.groups.items():
        assert found.groups[name].layers[0].statistics is not None
        np.testing.assert_allclose(
            found.groups[name].weights[0][...], group.weights[0][...], rtol=1e-6
        )


def test_given_weights_have_them(path):
    weights = regard.AttentionWeights(numbers(2, 12, 6), numbers(2, 12, 6), causal=True)[...]
    made = Recording.from_weights(WORDS, [weights])
    made.save(path, statistics=True)
    found = Recording.load(path)
    np.testing.assert_allclose(found.weights[0][...], weights, atol=1e-6)
    with pytest.raises(regard.UnsupportedError, match="scores are not known"):
        found.weights[0].statistics  # noqa: B018


def test_a_recording_without_queries_has_none_to_keep(path):
    Recording(TOKENS, [layer(Lq=0)]).save(path, statistics=True)
    found = Recording.load(path)
    assert found.layers[0].statistics.total.shape == (4, 0)
    assert found.weights[0][...].shape == (4, 0, 4)


def test_the_viewer_hides_the_first_token_without_them(path):
    Recording(WORDS, [text(causal=True)]).save(path, statistics=True)
    hidden = without_first_token(Recording.load(path))
    expected = without_first_token(Recording(WORDS, [text(causal=True)]))
    np.testing.assert_array_equal(hidden.weights[0][...], expected.weights[0][...])


# A writer, and layers that bring them.


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_those_of_the_pass_itself_are_taken(path, computed, kind):
    q, k, v = (numbers(h, 12, 6, seed=h) for h in (4, 2, 3))
    v = v[:2]
    if kind == "torch":
        q, k, v = map(torch.from_numpy, (q, k, v))
    _, statistics = regard.attention(q, k, v, causal=True, return_statistics=True)
    computed.clear()
    with Writer(path) as writer:
        writer.add(Layer(q, k, v, causal=True, statistics=statistics))
        writer.finish({"": {"tokens": WORDS}})
    found = Recording.load(path)
    np.testing.assert_array_equal(found.layers[0].statistics.total, np.asarray(statistics.total))
    plain = np.asarray(regard.AttentionWeights(q, k, causal=True))
    np.testing.assert_allclose(found.weights[0][...], plain, rtol=1e-6)
    assert [rows for _, rows in computed].count(1) == 1
    here = Recording(WORDS, [Layer(q, k, v, causal=True, statistics=statistics)])
    assert type(here.weights[0][1, 3]) is type(q)
    np.testing.assert_allclose(np.asarray(here.weights[0]), plain, rtol=1e-6)


def test_a_writer_computes_them_where_it_is_told(path):
    recording = sample()
    with Writer(path, statistics=True) as writer:
        for one in recording.layers:
            writer.add(one)
        writer.finish({"": {"tokens": TOKENS}})
    written = load_file(path)
    recording.save(path, statistics=True)
    saved = load_file(path)
    assert written.keys() == saved.keys()
    for name, x in saved.items():
        np.testing.assert_array_equal(written[name], x)


def test_a_layer_says_which_statistics_it_takes():
    q = numbers(2, 5, 4)
    fits = np.ones((2, 5), np.float32)
    for statistics, error, message in (
        ([fits, fits], TypeError, "statistics is a list; RowStatistics"),
        ((fits,), TypeError, "statistics is a tuple; RowStatistics"),
        ((fits, 1.0), TypeError, "total of statistics is a float, and query an ndarray; both"),
        ((torch.ones(2, 5), fits), TypeError, "maximum of statistics is a Tensor, and query an nd"),
        ((fits, fits.astype("f8")), TypeError, "total of statistics is float64; float32 is needed"),
        (
            (fits, fits[:1]),
            regard.ShapeError,
            r"total of statistics has shape \(1, 5\); one .*\(2, 5\)",
        ),
    ):
        with pytest.raises(error, match=message):
            Layer(q, q, statistics=statistics)
    with pytest.raises(TypeError, match="maximum of statistics is float32; float64 is needed"):
        Layer(q.astype("f8"), q.astype("f8"), statistics=(fits, fits))
    half = q.astype(ml_dtypes.bfloat16)
    assert Layer(half, half, statistics=(fits, fits)).statistics.total is fits


# Those that do not fit.


def kept(path, **changed):
    """A file whose statistics are changed."""
    Recording(WORDS, [text(causal=True)]).save(path, statistics=True)
    arrays, told = load_file(path), safe_open(path, "np").metadata()
    for name, change in changed.items():
        found = change(arrays[f"layers.0.{name}"].copy())
        arrays.pop(f"layers.0.{name}")
        if found is not None:
            arrays[f"layers.0.{name}"] = np.ascontiguousarray(found)
    save_file(arrays, path, told)


def at(place, value):
    def change(x):
        x[place] = value
        return x

    return change


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"total": lambda x: None}, "layer 0 has row statistics without a total"),
        ({"maximum": lambda x: None}, "layer 0 has row statistics without a maximum"),
        ({"total": lambda x: x[:2]}, "layer 0: Layer: total of statistics has shape (2, 12); one"),
        ({"total": lambda x: x.T}, "total of statistics has shape (12, 4)"),
        ({"total": lambda x: x[None]}, "total of statistics has shape (1, 4, 12)"),
        ({"total": lambda x: x.astype("f8")}, "total of statistics is float64; float32 is needed"),
        ({"maximum": lambda x: x.astype("i4")}, "maximum of statistics is int32; float32"),
    ],
)
def test_statistics_of_another_form_are_a_damaged_recording(path, changed, message):
    kept(path, **changed)
    with pytest.raises(regard.RecordingError) as caught:
        Recording.load(path)
    assert str(caught.value).startswith(f"{path} is a damaged recording: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"total": at((1, 3), 0.0)},
        {"total": at((1, 3), -1.0)},
        {"total": at((1, 3), 14.0)},
        {"total": at((1, 3), np.inf)},
        {"maximum": at((1, 3), np.inf)},
        {"maximum": at((1, 3), -np.inf)},
        {"maximum": lambda x: x + 0.5},
        {"total": lambda x: x * 1.1},
        {"maximum": lambda x: x[::-1].copy()},
    ],
)
def test_statistics_that_cannot_be_are_refused(path, changed):
    kept(path, **changed)
    found = Recording.load(path)
    with pytest.raises(regard.RecordingError, match=r"statistics that were kept .*not those of"):
        found.weights[0].head(1)[3]
    with pytest.raises(regard.RecordingError, match="with statistics=True where it was made"):
        found.weights[0].entropy()


@pytest.mark.parametrize("name", ["maximum", "total"])
def test_rows_whose_statistics_are_nan_are_computed(path, name):
    kept(path, **{name: at((slice(None), slice(2, 5)), np.nan)})
    found, plain = Recording.load(path).weights[0], text(causal=True)
    expected = Recording(WORDS, [plain]).weights[0]
    np.testing.assert_allclose(found[...], expected[...], rtol=1e-6)
    np.testing.assert_allclose(found.entropy(), expected.entropy(), rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_so_with_them(path, wrong):
    q, k = numbers(2, 12, 4), numbers(2, 12, 4, seed=1)
    q[1, 11], k[0, 4] = wrong, wrong
    made = Recording(WORDS, [Layer(q, k, causal=True)])
    made.save(path, statistics=True)
    found = Recording.load(path).weights[0][...]
    expected = made.weights[0][...]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
