"""Each request of the page gets the right numbers, and any other request gets a sentence."""

import base64
import functools
import json
import threading
from urllib.parse import quote_plus, urlencode

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from definition import define, visible_pairs
from regard import Edit
from regard._backends import kernel
from regard._weights.statistics_cache import BLOCK
from regard.heads import head_scores
from regard.recording import Layer, Recording
from regard.viewer import _heads, _maps
from regard.viewer._alignment import Alignments
from regard.viewer._heads import Heads
from regard.viewer._maps import Maps, Where
from regard.viewer.answer import Answers
from viewer.conftest import made

SIDE = 256
VISIBILITY = (
    "causal",
    "window",
    "mask",
    "key_lengths",
    "segments",
    "edits",
    "intervals",
    "query_start",
)


def layer(Lq=70, Lk=70, heads=4, key_heads=2, seed=0, **options):
    random = np.random.default_rng(seed)

    def numbers(*shape):
        return 1.5 * random.standard_normal(shape).astype(np.float32)

    return Layer(
        numbers(heads, Lq, 6), numbers(key_heads, Lk, 6), numbers(key_heads, Lk, 3), **options
    )


def of(*layers, query_tokens=None):
    tokens = [f"t{n}" for n in range(layers[0].key.shape[1])]
    return Recording(tokens, layers, query_tokens=query_tokens)


def random_bits(*shape):
    return np.random.default_rng(1).random(shape) < 0.5


def in_torch(found, dtype, **options):
    arrays = (torch.from_numpy(x).to(dtype) for x in (found.query, found.key, found.value))
    return Layer(*arrays, **found.options, **options)


@functools.cache
def recordings():
    ids = np.arange(70) // 11 % 3
    hidden = random_bits(70, 70)
    hidden[[0, 33]] = False
    bias = np.random.default_rng(2).standard_normal((4, 70, 70)).astype(np.float32)
    cross = layer(37, 300, key_heads=1)
    return {
        "grouped, over a tile": of(layer(300, 300, causal=True), layer(300, 300, heads=2, seed=3)),
        "window": of(layer(causal=True, window=(9, 0)), layer(window=(3, 5))),
        "padded": of(layer(key_lengths=50), layer(key_lengths=50, causal=True, query_start=0)),
        "padded at the front": of(layer(key_lengths=50, causal=True)),
        "cross": of(cross, query_tokens=[f"q{n}" for n in range(37)]),
        "last queries": of(layer(5, causal=True), layer(5, causal=True, window=(6, 0))),
        "segments": of(layer(segments=ids), layer(segments=(ids, ids[::-1].copy()), causal=True)),
        "intervals": of(
            layer(intervals=(ids * 10, 60 - ids)), layer(intervals=(ids * 9, ids * 30), causal=True)
        ),
        "mask": of(layer(mask=hidden, causal=True), layer(mask=hidden[:1], segments=ids)),
        "edits": of(
            layer(causal=True, edits=[Edit(-1, slice(9, None), slice(30)), Edit(keys=0, factor=3)]),
            layer(bias=bias, edits=[Edit(0, 3), Edit(slice(1, None), None, slice(9, 40), 0.1)]),
        ),
        "everything": of(
            layer(
                causal=True, window=(40, 0), scale=0.3, softcap=4.0, bias=bias, segments=ids,
                sinks=np.float32([0, 1, -1, 2]), mask=random_bits(4, 70, 70),
            )
        ),
        "bias of one row": of(layer(bias=bias[:, :1], sinks=np.float32([0, 1, -1, 2]))),
        "float64": of(Layer(*(np.random.default_rng(4).standard_normal((3, 1, 9, 4))))),
        "torch": of(in_torch(layer(causal=True), torch.float32)),
        "bfloat16": of(in_torch(layer(causal=True), torch.bfloat16, sinks=torch.ones(4))),
        "one token": of(layer(1, 1)),
    }  # fmt: skip


NAMES = list(recordings())


@functools.cache
def answers(name):
    return Answers([recordings()[name]], [name])


@functools.cache
def defined(name, index):
    """``(H, Lq, Lk)`` each: the weights in float64, and which pairs are visible."""
    found = recordings()[name].layers[index]
    options = {key: plain(value) for key, value in found.options.items()}
    q, k = (plain(x)[None].astype(np.float64) for x in (found.query, found.key))
    weights, _ = define(q, k, **options)
    seen = {key: value for key, value in options.items() if key in VISIBILITY}
    visible = visible_pairs(*q.shape[:3], k.shape[2], **seen)
    return weights[0], np.broadcast_to(visible, weights.shape)[0]


def plain(x):
    return x.double().numpy() if isinstance(x, torch.Tensor) else x


def logs(name, index, head):
    """ln of the weights, NaN where invisible."""
    weights, visible = defined(name, index)
    with np.errstate(divide="ignore"):
        return np.where(visible[head], np.log(weights[head]), np.nan)


def heads():
    for name in NAMES:
        for index, found in enumerate(recordings()[name].layers):
            yield name, index, found.heads - 1


def ask(name, path, **parameters):
    found = answers(name).answer(path, urlencode(parameters))
    assert found.status == 200, found.body
    return found


def floats(name, path, **parameters):
    found = ask(name, path, **parameters)
    assert found.media_type == "application/octet-stream"
    return np.frombuffer(found.body, "<f4")


def asked(name, path, **parameters):
    found = ask(name, path, **parameters)
    assert found.media_type == "application/json"
    return json.loads(found.body)


def assert_logs(found, expected):
    """The same places invisible, the same −∞, and weights that differ by roundings."""
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    seen = ~np.isnan(expected)
    np.testing.assert_allclose(found[seen], expected[seen], rtol=1e-5, atol=5e-5)


def binned(x, plane, level):
    """Bins of ``2^level`` rows and columns: the definition, bin by bin."""
    if level == 0:
        return x
    side = 1 << level
    rows, columns = (range(0, n, side) for n in x.shape)
    out = np.full((len(rows), len(columns)), np.nan)
    for r, i in enumerate(rows):
        for c, j in enumerate(columns):
            part = x[i : i + side, j : j + side]
            if not np.isnan(part).all():
                mass = np.log(np.nan_to_num(np.exp(part)).sum(1).mean())
                out[r, c] = np.nanmax(part) if plane == "max" else mass
    return out


@pytest.mark.parametrize("plane", ["max", "mass"])
@pytest.mark.parametrize(("name", "index", "head"), list(heads()))
def test_tiles_at_every_level_are_bins_of_the_weights(name, index, head, plane):
    whole = logs(name, index, head)
    for level in range(10):
        expected = binned(whole, plane, level)
        for row, column in np.ndindex(*(-(-n // SIDE) for n in expected.shape)):
            where = {"level": level, "row": row, "column": column}
            tile = floats(name, "tile", layer=index, head=head, plane=plane, **where)
            assert tile.size == SIDE * SIDE
            part = expected[row * SIDE :, column * SIDE :][:SIDE, :SIDE]
            beyond = [(0, SIDE - n) for n in part.shape]
            assert_logs(tile.reshape(SIDE, SIDE), np.pad(part, beyond, constant_values=np.nan))


@pytest.mark.parametrize(("name", "index", "head"), list(heads()))
def test_rows_columns_and_pairs_are_those_of_the_weights(name, index, head):
    whole = logs(name, index, head)
    where = {"layer": index, "head": head}
    for query in {0, len(whole) // 2, len(whole) - 1}:
        assert_logs(floats(name, "row", query=query, **where), whole[query])
    for key in {0, whole.shape[1] // 2, whole.shape[1] - 1}:
        assert_logs(floats(name, "column", key=key, **where), whole[:, key])
    visible = floats(name, "visible", **where)
    assert visible.tolist() == (~np.isnan(whole)).sum(1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_is_told_for_every_head_of_every_layer(name):
    layers = range(len(recordings()[name].layers))
    every = [logs(name, n, h) for n in layers for h in range(recordings()[name].layers[n].heads)]
    Lq, Lk = every[0].shape
    for query, key in {(0, 0), (Lq - 1, Lk - 1), (Lq // 2, Lk // 3), (Lq - 1, 0)}:
        found = floats(name, "pair", query=query, key=key)
        assert_logs(found, np.array([whole[query, key] for whole in every]))


@pytest.mark.parametrize(("name", "index", "head"), list(heads()))
def test_links_are_the_strongest_of_a_part(name, index, head):
    whole = logs(name, index, head)
    Lq, Lk = whole.shape
    where = {"layer": index, "head": head, "n": 12}
    seen = (~np.isnan(whole)).sum(1)
    told = whole[seen >= min(8, seen.max() // 2)]
    others = told[:, 1:] if np.isfinite(told[:, 1:]).any() else told
    assert_links(asked(name, "links", **where), whole, others, 12)
    low, left = Lq // 3, Lk // 4
    part = {"rows": f"{low}-{Lq}", "columns": f"{left}-{Lk}"}
    assert_links(asked(name, "links", **where, **part), whole, whole[low:, left:], 12)
    assert_links(asked(name, "links", **where, rows=f"0-{Lq}"), whole, whole, 12)
    assert_links(asked(name, "links", **where, columns="0-1"), whole, whole[:, :1], 12)


def assert_links(found, whole, part, n):
    assert found["coverage"] == 1
    expected = np.sort(part[np.isfinite(part)])[::-1][:n]
    strengths = np.array([strength for *_, strength in found["links"]])
    np.testing.assert_allclose(strengths, expected, atol=5e-5)
    for query, key, strength in found["links"]:
        assert strength == pytest.approx(whole[query, key], abs=5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_regard_steps(name):
    recording = recordings()[name]
    queries = sorted({0, len(recording.query_tokens) // 2, len(recording.query_tokens) - 1})
    keys = sorted({0, len(recording.tokens) // 3, len(recording.tokens) - 1})
    for index, found in enumerate(recording.layers):
        head = found.heads - 1
        expected = recording.steps(index, head)
        told = asked(
            name, "steps", layer=index, head=head,
            queries=",".join(map(str, queries)), keys=",".join(map(str, keys)),
        )  # fmt: skip
        assert (told["queries"], told["keys"]) == (queries, keys)
        assert (told["capped"] is None) == ("softcap" not in found.options)
        assert (told["biased"] is None) == ("bias" not in found.options)
        assert (told["edited"] is None) == ("edits" not in found.options)
        cells = np.ix_(queries, keys)
        for part in ("scores", "scaled", "masked", "weights"):
            assert_numbers(told[part], plain(getattr(expected, part))[cells])
        if told["capped"] is not None:
            assert_numbers(told["capped"], plain(expected.capped)[cells])
        assert_numbers(told["query"], plain(expected.query)[queries])
        for part in ("key", "value"):
            if told[part] is not None:
                assert_numbers(told[part], plain(getattr(expected, part))[keys])
        if found.value is not None and name != "bfloat16":  # which rounds its output
            assert_numbers(told["output"], plain(expected.output)[queries])


def assert_numbers(found, expected):
    """Lists with null for −∞, and words for what else is no number of JSON."""
    assert [len(row) for row in found] == [expected.shape[1]] * expected.shape[0]
    told = np.array([[-np.inf if x is None else float(x) for x in row] for row in found])
    np.testing.assert_allclose(told, expected, rtol=2e-5, atol=2e-5)


def test_steps_tell_nan_from_what_is_invisible():
    q = np.array([[[1.0, 2], [np.nan, 1], [np.inf, 0]]])
    one = Answers([Recording(["a", "b", "c"], [Layer(q, np.ones((1, 3, 2)), causal=True)])])
    found = json.loads(one.answer("steps", "layer=0&head=0&queries=1,2&keys=0,2").body)
    assert found["scores"] == [["NaN", "NaN"], ["Infinity", "Infinity"]]
    assert found["masked"] == [["NaN", None], ["Infinity", "Infinity"]]
    assert found["weights"] == [["NaN", 0.0], ["NaN", "NaN"]]


def test_steps_without_values_have_no_output():
    q = np.eye(3, dtype=np.float32)[None]
    one = Answers([Recording(["a", "b", "c"], [Layer(q, q)])])
    found = json.loads(one.answer("steps", "layer=0&head=0&queries=1&keys=0,2").body)
    assert found["value"] is None
    assert found["output"] is None
    assert found["weights"][0][0] == pytest.approx(np.exp(0) / (2 + np.exp(3**-0.5)))


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_told_by_thumbnails_and_scores(name):
    recording = recordings()[name]
    is_itself = recording.tokens == recording.query_tokens
    for index, found in enumerate(recording.layers):
        told = asked(name, "heads", layer=index)
        size, weights = told["size"], defined(name, index)[0]
        pictures = np.frombuffer(base64.b64decode(told["thumbnails"]), "<f4")
        pictures = pictures.reshape(found.heads, size, size)
        whole = [logs(name, index, head) for head in range(found.heads)]
        for picture, expected in zip(pictures, whole):
            assert np.isnan(picture).all() == np.isnan(expected).all()
            if not np.isnan(expected).all():
                assert np.nanmax(picture) == pytest.approx(np.nanmax(expected), abs=1 / 64)
        safe = np.where(weights > 0, weights, 1)
        entropies = -(weights * np.log(safe)).sum(-1).mean(-1)
        np.testing.assert_allclose(told["entropy"], entropies, atol=1e-4)
        np.testing.assert_allclose(told["distance"], distances(name, index), rtol=1e-4, atol=1e-4)
        for score in ("first", "previous", "induction"):
            assert (told[score] is None) == (not is_itself)
        if is_itself and len(recording.tokens) > 1:
            seen = ~np.isnan(np.array(whole))
            some = seen.sum(-1)[:, 1:] > 1  # of the queries after the first
            before = np.diagonal(weights, -1, 1, 2), np.diagonal(seen, -1, 1, 2)
            places = {"first": (weights[:, 1:, 0], seen[:, 1:, 0]), "previous": before}
            for score, (at, is_seen) in places.items():
                for found_score, w, told_by in zip(told[score], at, some & is_seen):
                    mean = pytest.approx(w[told_by].mean(), abs=1e-4) if told_by.any() else None
                    assert found_score == mean


def test_means_of_a_survey_stand_beside_the_scores_of_the_same_heads():
    recording = made(tokens=20)
    mean = {"entropy": 1.25, "distance": 3.0, "first": 0.5, "previous": float("nan")}
    answers = Answers.of_groups([recording], corpus={(1, 2): mean, (9, 9): mean})
    of_layers = [json.loads(answers.answer("heads", f"layer={n}").body) for n in range(2)]
    alone = json.loads(Answers([recording]).answer("heads", "layer=1").body)
    assert "corpus" not in alone
    corpus = of_layers[1].pop("corpus")
    assert of_layers[1] == alone
    assert corpus["entropy"] == [None, None, 1.25, None]
    assert corpus["first"] == [None, None, 0.5, None]
    assert corpus["previous"] == corpus["induction"] == [None] * 4
    assert of_layers[0]["corpus"]["entropy"] == [None] * 4


def test_roles_of_heads_and_the_head_to_open_are_those_of_the_recording():
    recording = made(tokens=60)
    scores, told = recording.heads(), json.loads(Answers([recording]).answer("roles").body)
    assert told["says"] == [[scores.says(n, h) for h in range(4)] for n in range(2)]
    assert told["roles"] == [[scores.role(n, h) for h in range(4)] for n in range(2)]
    telling = scores.telling()
    assert told["opens"] == {"layer": telling.layer, "head": telling.head}


def distances(name, index):
    weights = defined(name, index)[0]
    Lq, Lk = weights.shape[1:]
    options = recordings()[name].layers[index].options
    start = options.get("query_start", options.get("key_lengths", Lk) - Lq)
    gap = abs(start + np.arange(Lq)[:, None] - np.arange(Lk))
    return (weights * gap).sum(-1).mean(-1)


def test_about_tells_sizes_options_and_places():
    facts = asked("window", "about")
    assert facts["version"] == 1
    (found,) = facts["recordings"]
    assert (found["name"], found["model"], found["boundary"]) == ("window", "", None)
    assert (found["tokens"], found["queries"], found["itself"], found["start"]) == (70, 70, True, 0)
    first, second = found["layers"]
    assert first == {
        "number": 0, "name": "", "heads": 4, "head_numbers": [0, 1, 2, 3], "key_heads": 2,
        "head_size": 6, "value_size": 3, "samples": 1,
        "scale": pytest.approx(6**-0.5), "capped": None,
        "causal": True, "weights_only": False, "effects": [],
        "options": ["causal", "window=(9, 0)"],
    }  # fmt: skip
    assert second["options"] == ["window=(3, 5)"]
    (found,) = asked("everything", "about")["recordings"]
    assert set(found["layers"][0]["options"]) == {
        "causal", "window=(40, 0)", "scale=0.3", "softcap=4", "bias", "segments", "sinks", "mask",
    }  # fmt: skip
    (found,) = asked("cross", "about")["recordings"]
    assert (found["tokens"], found["queries"], found["itself"]) == (300, 37, False)
    (found,) = asked("last queries", "about")["recordings"]
    assert (found["queries"], found["itself"], found["start"]) == (5, True, 65)


def test_about_tells_where_a_model_began_to_write():
    recording = Recording(["a", "b", "c"], [layer(3, 3)], boundary=2)
    facts = json.loads(Answers([recording]).answer("about").body)
    assert facts["recordings"][0]["boundary"] == 2


def test_tokens_of_both_sides():
    assert asked("cross", "tokens", side="key") == list(recordings()["cross"].tokens)
    assert asked("cross", "tokens", side="query") == list(recordings()["cross"].query_tokens)


def test_several_recordings_are_told_apart():
    one, two = made(), made(seed=1)
    both = Answers([one, two], ["one", "two"])
    names = [found["name"] for found in json.loads(both.answer("about").body)["recordings"]]
    assert names == ["one", "two"]
    query = "layer=0&head=0&query=9"
    first, second = (Answers([x]).answer("row", query).body for x in (one, two))
    assert both.answer("row", query).body == both.answer("row", f"recording=0&{query}").body
    assert both.answer("row", query).body == first != second
    assert both.answer("row", f"recording=1&{query}").body == second


def test_what_cannot_be_shown_is_refused():
    with pytest.raises(ValueError, match="no recording to show"):
        Answers([])
    with pytest.raises(ValueError, match="2 names for 1 recording;"):
        Answers([made()], ["a", "b"])
    with pytest.raises(ValueError, match="no queries to show"):
        Answers([of(layer(0, 5))])
    for start in (Answers, Answers.of_groups):
        with pytest.raises(TypeError, match=r"names is one text, 'ab'; a list .*: \['ab'\]"):
            start([made(), made()], "ab")
        with pytest.raises(TypeError, match="names has 3; a text is needed for each recording"):
            start([made(), made()], ["a", 3])
        found = {"a str": "b.safetensors", "an int": 3, "an AttentionWeights": made().weights[0]}
        for name, other in found.items():
            with pytest.raises(TypeError, match=f"viewer: {name} is no Recording"):
                start([made(), other])


def test_nan_and_infinity_in_a_recording_are_answered():
    q = np.random.default_rng(0).standard_normal((2, 9, 4)).astype(np.float32)
    q[:, 4], q[:, 6] = np.nan, np.inf
    found = Answers([Recording(list("abcdefghi"), [Layer(q, q, q, causal=True)])])
    for path, query in VALID.items():
        assert found.answer(path, query).status == 200, path


VALID = {
    "about": "",
    "tokens": "side=key",
    "words": "",
    "tile": "layer=0&head=0&plane=mass&level=0&row=0&column=0",
    "row": "layer=0&head=0&query=4",
    "column": "layer=0&head=0&key=4",
    "sums": "layer=0&head=0",
    "visible": "layer=0&head=0",
    "links": "layer=0&head=0&n=5",
    "heads": "layer=0",
    "roles": "",
    "alignment": "with=0",
    "change": "layer=0&with=0",
    "changed": "layer=0&head=0&with=0&with_layer=0&with_head=1&n=3",
    "pair": "query=6&key=4",
    "steps": "layer=0&head=0&queries=4,6,8&keys=0,4",
}


def test_many_threads_get_the_same_answers():
    recording = made(tokens=64)
    expected = {path: Answers([recording]).answer(path, query) for path, query in VALID.items()}
    shared, wrong = Answers([recording]), []

    def run():
        for path, query in VALID.items():
            if shared.answer(path, query) != expected[path]:
                wrong.append(path)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("path", "query", "sentence"),
    [
        ("row", "", "layer is missing; this endpoint needs it."),
        ("row", "layer=2&head=0&query=0", "layer is 2; there are 2, 0 to 1."),
        ("row", "layer=-1&head=0&query=0", "layer is '-1'; a decimal integer is needed."),
        ("row", "layer=1e0&head=0&query=0", "layer is '1e0'; a decimal integer is needed."),
        ("row", "layer=%D9%A1&head=0&query=0", "layer is '\\u0661'; a decimal integer is needed."),
        ("row", "layer=0&layer=0&head=0&query=0", "'layer' is given twice; give it once."),
        ("row", "layer=0&head=0&query=0&a=1", "'a' is not a parameter of this endpoint."),
        ("row", "recording=1&layer=0&head=0&query=0", "recording is 1; there is 1, number 0."),
        ("column", "layer=0&head=0&key=24", "key is 24; there are 24, 0 to 23."),
        ("tokens", "side=left", "side is 'left'; there are key, query."),
        (
            "tile",
            "layer=0&head=0&plane=sum&level=0&row=0&column=0",
            "plane is 'sum'; there are max, mass.",
        ),
        (
            "tile",
            "layer=0&head=0&plane=max&level=0&row=1&column=0",
            "row is 1; there is 1, number 0.",
        ),
        ("links", "layer=0&head=0&n=513", "n is 513; there are 513, 0 to 512."),
        (
            "links",
            "layer=0&head=0&n=1&rows=5-5",
            "rows is '5-5'; a-b is needed, with 0 ≤ a < b ≤ 24, as in 0-24.",
        ),
        (
            "steps",
            f"layer=0&head=0&keys=1&queries={'1,' * 64}1",
            "queries are 65; request at most 64 at a time.",
        ),
        ("row", "a" * 5000, "the query string is longer than 4096 characters; send a shorter one."),
    ],
)
def test_a_bad_request_gets_a_sentence(path, query, sentence):
    found = shared().answer(path, query)
    assert (found.status, found.body.decode()) == (400, sentence)


def test_an_unknown_endpoint_gets_the_names_there_are():
    found = shared().answer("../secret", "")
    assert found.status == 404
    assert all(name in found.body.decode() for name in VALID)


@functools.cache
def shared():
    return Answers([made()])


PARAMETERS = sorted(
    {"recording", "layer", "head", "plane", "level", "row", "column", "query", "key", "n", "rows"}
    | {"columns", "queries", "keys", "side"}
)
WORDS = st.one_of(
    st.text(max_size=12),
    st.integers(-3, 30).map(str),
    st.integers(-(10**40), 10**40).map(str),
    st.sampled_from(
        ["", "max", "mass", "key", "query", "0-5", "9-2", "1,2", "NaN", "0x1", "٣", "²"]
    ),
    st.lists(st.integers(0, 30), max_size=80).map(lambda found: ",".join(map(str, found))),
)


def escaped(text):
    return quote_plus(text, errors="surrogatepass")


def mostly(known, text):
    """One of what is known, and now and then any text."""
    return st.one_of(*(st.sampled_from(known) for _ in range(6)), text)


PATHS = mostly(sorted(VALID), st.text(max_size=8))
GIVEN = st.tuples(mostly(PARAMETERS, st.text(max_size=5)), WORDS, st.booleans())
CHANGED = st.tuples(
    PATHS,
    st.lists(st.tuples(GIVEN, st.integers(0, 8)), max_size=3),
    st.sampled_from(["whole"] * 4 + ["without its last"]),
)
REQUESTS = st.one_of(
    CHANGED, CHANGED.map(lambda drawn: drawn), st.tuples(PATHS, st.text(max_size=60))
)


def request_of(drawn):
    """Path and query: one that is right, with some parameters more, in place of others, or less."""
    path, given, *end = drawn
    if not end:
        return path, given
    pairs = [pair.split("=") for pair in VALID.get(path, "").split("&") if pair]
    for (name, word, stays), place in given:
        pairs = [pair for pair in pairs if pair[0] != name or stays]
        pairs.insert(place, [escaped(name), escaped(word)])
    if end != ["whole"]:
        pairs = pairs[:-1]
    return path, "&".join("=".join(pair) for pair in pairs)


@settings(max_examples=1000)
@given(request=REQUESTS.map(request_of))
def test_any_request_is_answered_or_refused_in_a_sentence(request):
    path, query = request
    found = shared().answer(path, query)
    assert found.status in ((200, 400) if path in VALID else (404,))
    if found.status == 200:
        assert found.body
        assert 0 <= found.coverage <= 1
        return
    sentence = found.body.decode()
    assert found.media_type == "text/plain; charset=utf-8"
    assert sentence.endswith(".")
    assert sentence.isprintable()
    assert len(sentence) < 200


@settings(max_examples=500)
@given(data=st.data())
def test_whatever_makes_sense_is_answered_with_the_weights(data):
    name = data.draw(st.sampled_from(NAMES))
    found = recordings()[name]
    index = data.draw(st.integers(0, len(found.layers) - 1))
    head = data.draw(st.integers(0, found.layers[index].heads - 1))
    whole = logs(name, index, head)
    query, key = (data.draw(st.integers(0, n - 1)) for n in whole.shape)
    assert_logs(floats(name, "row", layer=index, head=head, query=query), whole[query])
    assert_logs(floats(name, "column", layer=index, head=head, key=key), whole[:, key])
    told = asked(name, "steps", layer=index, head=head, queries=query, keys=key)
    weight = told["weights"][0][0]
    assert weight == pytest.approx(np.nan_to_num(np.exp(whole[query, key])), abs=1e-5)


def test_nothing_that_is_asked_changes_the_recording():
    recording = made()
    before = [x.copy() for x in (recording.layers[0].query, recording.layers[0].key)]
    for path, query in VALID.items():
        Answers([recording]).answer(path, query)
    for x, y in zip(before, (recording.layers[0].query, recording.layers[0].key)):
        assert np.array_equal(x, y)


def test_of_a_long_text_heads_read_a_sample_of_rows(monkeypatch):
    recording = made(tokens=2000, layers=1)
    exact = Heads(recording).of(0)
    assert (exact["coverage"], exact["settled"]) == (1, True)
    monkeypatch.setattr(_heads, "MOST_PRODUCTS", 0)
    sample = Heads(recording).of(0)
    assert 96 / 2000 * 0.9 < sample["coverage"] < 0.06
    assert sample["settled"]
    for name in ("entropy", "distance", "first", "previous", "induction"):
        np.testing.assert_allclose(sample[name], exact[name], rtol=0.3, atol=0.02)


def test_scores_of_heads_are_those_of_regard_heads():
    recording = made(tokens=200)
    expected = head_scores(recording)
    for index in range(2):
        found = Heads(recording).of(index)
        for name in ("entropy", "first", "previous", "induction"):
            np.testing.assert_allclose(found[name], getattr(expected, name)[index], atol=2e-6)


def test_a_pair_reads_no_rows_but_those_computed_with_its_own(monkeypatch):
    read = []
    row_statistics = kernel.Kernel.row_statistics

    def watched(self, call):
        read.append(call.sizes[3])
        return row_statistics(self, call)

    monkeypatch.setattr(kernel.Kernel, "row_statistics", watched)
    answers = Answers([of(layer(500, 500), layer(500, 500, seed=1))])
    answers.answer("pair", "query=9&key=3")
    assert read == [BLOCK, BLOCK]
    for question in ("pair?query=17&key=3", "row?layer=1&head=2&query=9"):
        answers.answer(*question.split("?"))
    assert read == [BLOCK, BLOCK]


class Map:
    """A map of 10 bytes that grows to 30."""

    def __init__(self, recording, layer, head, places, words):
        self.where, self.nbytes, self.stopped = (layer, head), 10, False

    def stop(self):
        self.stopped = True


def test_maps_asked_for_longest_ago_make_room(monkeypatch):
    monkeypatch.setattr(_maps, "HeadMap", Map)
    recordings = [made(), made()]
    maps = Maps(recordings, Alignments(recordings[:1]), max_bytes=50)
    first, second, third = (maps[Where(0, 0, head)] for head in range(3))
    assert maps[Where(0, 0, 0)] is first
    third.nbytes = 30
    fourth = maps[Where(0, 0, 3)]
    assert [found.stopped for found in (first, second, third, fourth)] == [
        False,
        True,
        False,
        False,
    ]
    fourth.nbytes = 100
    assert maps[Where(0, 0, 3)] is fourth
    assert [first.stopped, third.stopped, fourth.stopped] == [True, True, False]
    maps.close()
    assert fourth.stopped
