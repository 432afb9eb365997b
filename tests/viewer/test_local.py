"""An exported page computes by itself what the server would have answered."""

import base64
import json
import zlib
from urllib.parse import urlencode

import ml_dtypes
import numpy as np
import pytest

from regard import Edit
from regard.recording import Layer, Recording
from regard.viewer._bundle import bundle
from regard.viewer.answer import Answers
from regard.viewer.export import Pack
from viewer.explained import KINDS, close
from viewer.explained import RECORDINGS as EXPLAINED

ASK = """
let ask;
window.holds = (json) => {
  const data = JSON.parse(json);
  ask = overLocal(data, (name) => data.texts[name]);
};
window.asked = async (path, parameters) => {
  let answer = await ask(path, parameters);
  while (answer.coverage < 1) answer = await ask(path, parameters);
  // A tile has 262,144 bytes, which are mostly of keys that are not there.
  const packed = new Blob([answer.body]).stream().pipeThrough(new CompressionStream("deflate"));
  let binary = "";
  for (const byte of new Uint8Array(await new Response(packed).arrayBuffer()))
    binary += String.fromCharCode(byte);
  return btoa(binary);
};
window.askedAll = async (questions) => {
  const answers = [];
  for (const [path, parameters] of questions) answers.push(await asked(path, parameters));
  return answers;
};
window.first = async (path, parameters) => (await ask(path, parameters)).coverage;
"""


def unpacked(answer):
    return zlib.decompress(base64.b64decode(answer))


@pytest.fixture(scope="module")
def file_page(browser, tmp_path_factory):
    """A file with what an exported page computes with; loading it takes as long as many answers."""
    path = tmp_path_factory.mktemp("local") / "local.html"
    path.write_text(
        '<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<script type="module">{bundle("offline/local")}{ASK}</script>'
    )
    page = browser.new_page()
    page.goto(path.as_uri())
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("request", lambda request: page.complaints.append(request.url))
    yield page
    page.close()


@pytest.fixture
def local(file_page):
    """Asks a page that holds the recordings: ``local(*recordings)(path, **parameters)``.

    Many questions at once take less time: ``ask.all([(path, parameters), …])``. ``damage`` is done
    to the texts that hold the numbers.
    """

    def start(*recordings, damage=dict):
        pack = Pack(recordings)
        file_page.evaluate("holds", json.dumps({**pack.data, "texts": damage(pack.texts)}))

        def ask(question, **parameters):
            asked = [question, parameters]
            return unpacked(file_page.evaluate("([path, given]) => asked(path, given)", asked))

        def ask_all(questions):
            return [unpacked(answer) for answer in file_page.evaluate("askedAll", questions)]

        ask.page, ask.all = file_page, ask_all
        return ask

    yield start
    assert not file_page.complaints


def numbers(*shape, seed=0, dtype=np.float32, size=1.5):
    return (size * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def layer(Lq, Lk=None, heads=4, key_heads=2, size=6, dtype=np.float32, spread=1.5, **options):
    """Random query, key and value of 5 numbers."""
    Lk = Lk or Lq
    query = numbers(heads, Lq, size, seed=1, dtype=dtype, size=spread)
    key = numbers(key_heads, Lk, size, seed=2, dtype=dtype, size=spread)
    return Layer(query, key, numbers(key_heads, Lk, 5, seed=3, dtype=dtype), **options)


def texts(count):
    return [("the", " cat", " saw", " that")[n * n % 4] for n in range(count)]


def of_one(found, **more):
    return Recording(texts(found.key.shape[1]), [found], **more)


L = 37
NO_LAST = np.ones((L, L), bool)
NO_LAST[5] = False  # a query that sees nothing
NO_LAST[:, 30] = False
FLOOR = np.where(np.arange(L) % 5 == 1, -np.inf, 0.25).astype(np.float32)
RECORDINGS = {
    "nothing asked": of_one(layer(L)),
    "causal": of_one(layer(L, causal=True)),
    "one token": of_one(layer(1)),
    "later queries": of_one(layer(9, L, causal=True)),
    "fewer keys": of_one(layer(L, 11), query_tokens=texts(L)),
    "windows": of_one(layer(L, window=(3, 2))),
    "causal window": of_one(layer(L, causal=True, window=(4, 0), sinks=numbers(4, seed=4))),
    "padding": of_one(layer(L, causal=True, key_lengths=30, query_start=0)),
    "query start": of_one(layer(L, causal=True, query_start=-3), query_tokens=texts(L)),
    "segments": of_one(layer(L, causal=True, segments=np.arange(L) // 9 - 2**62)),
    "pair of segments": of_one(
        layer(9, L, segments=(np.arange(9) % 3, np.arange(L) % 4)), query_tokens=texts(9)
    ),
    "mask": of_one(layer(L, mask=NO_LAST)),
    "mask of heads": of_one(layer(L, mask=numbers(4, 1, L, seed=5) > 0)),
    "bias": of_one(layer(L, bias=numbers(4, L, L, seed=6), causal=True)),
    "bias of keys": of_one(layer(L, bias=FLOOR, softcap=2.5, scale=0.7)),
    "all at once": of_one(
        layer(
            L, causal=True, window=(9, 0), softcap=4.0, scale=0.3, key_lengths=31,
            query_start=0, segments=np.arange(L) // 20, sinks=numbers(4), mask=NO_LAST,
            bias=numbers(1, L, L, seed=7),
        )
    ),
    "edits": of_one(
        layer(
            L, causal=True, sinks=numbers(4, seed=4),
            edits=[
                Edit(3, slice(4, 20), slice(3)), Edit(None, slice(9, None), 5, 4.0),
                Edit(slice(2), None, slice(10, 20), 0.1), Edit(-1, 30),
            ],
        )
    ),
    "no values": of_one(Layer(numbers(2, L, 3), numbers(1, L, 3, seed=1), causal=True)),
    "float16": of_one(layer(L, dtype=np.float16, causal=True)),
    "bfloat16": of_one(layer(L, dtype=ml_dtypes.bfloat16, causal=True)),
    "float64": of_one(layer(L, dtype=np.float64, causal=True)),
    "several tiles": of_one(layer(530, heads=2, causal=True)),
    "a wide one": of_one(layer(70, 700, heads=1, key_heads=1, causal=True)),
    "layers": Recording(
        texts(20), [layer(20), layer(20, heads=6, key_heads=3, causal=True)], model="two"
    ),
}  # fmt: skip


def broken(name, value, places, **options):
    """A layer with a gradient, whose query or key holds what is no finite number."""
    found = layer(20, gradient=numbers(4, 20, 5, seed=9), **options)
    getattr(found, name)[places] = value
    return of_one(found)


BROKEN = {
    "queries of NaN": broken("query", np.nan, (slice(0, None, 3), [2, 19], 1), causal=True),
    "an infinite query": broken("query", np.inf, (3, 2), causal=True),
    "the first query of NaN": broken("query", np.nan, (3, 0)),
    "a key of NaN": broken("key", np.nan, (1, 13), causal=True, sinks=numbers(4, seed=4)),
    "an infinite key": broken("key", np.inf, (1, 13, 2)),
    "a key of NaN that some see": broken("key", np.nan, (1, 13), mask=np.tri(20, k=3) > 0),
    "an infinite value": broken("value", np.inf, (1, 7, 2), causal=True),
    "a gradient of NaN": broken("gradient", np.nan, (3, 12, 1), window=(9, 0), causal=True),
}
RECORDINGS |= BROKEN | {"a long text with a query of NaN": of_one(layer(130, causal=True))}
RECORDINGS["a long text with a query of NaN"].layers[0].query[:, 100, 1] = np.nan


def floats(body):
    return np.frombuffer(body, "<f4")


def questions(facts):
    """Floats that are asked of the last head of every layer, by tokens and by words."""
    for path, parameters in questions_of_tokens(facts):
        yield path, parameters
        # Sums are of tokens alone; of words some levels of tiles are asked.
        if path != "sums" and parameters.get("level", 0) < 3:
            yield path, {**parameters, "unit": "word"}


def questions_of_tokens(facts):
    Lq, Lk = facts["queries"], facts["tokens"]
    levels = range(max(Lq, Lk).bit_length() + 1)
    for n, found in enumerate(facts["layers"]):
        head = {"layer": n, "head": found["heads"] - 1}
        yield "visible", head
        yield "sums", head
        for i in {0, Lq // 2, Lq - 1}:
            yield "row", {**head, "query": i}
        for j in {0, Lk // 3, Lk - 1}:
            yield "column", {**head, "key": j}
        for level in levels:
            side = 256 << level
            for row in range(-(-Lq // side)):
                for column in range(-(-Lk // side)):
                    at = {"level": level, "row": row, "column": column}
                    for plane in ("max", "mass"):
                        yield "tile", {**head, **at, "plane": plane}
    for i, j in {(0, 0), (Lq - 1, Lk - 1), (Lq // 2, Lk // 3)}:
        yield "pair", {"query": i, "key": j}
        yield "pair", {"query": i, "key": j, "first": "hidden"}
    yield from questions_of_several(facts)
    hidden = {"layer": 0, "head": 0, "first": "hidden"}
    yield "tile", {**hidden, "plane": "mass", "level": 1, "row": 0, "column": 0}
    yield "row", {**hidden, "query": Lq - 1}
    yield "column", {**hidden, "key": 0}
    yield "visible", hidden


def questions_of_several(facts):
    """Means of heads and of queries."""
    Lq, Lk = facts["queries"], facts["tokens"]
    heads = {"layer": 0, "heads": ",".join(map(str, range(0, facts["layers"][0]["heads"], 2)))}
    yield "sums", heads
    yield "sums", {"layer": 0, "head": 0, "first": "hidden"}
    if Lq > 4:
        queries = f"1-3,{Lq - 1}-{Lq}"
        yield "row", {"layer": 0, "head": 0, "queries": queries}
        yield "row", {**heads, "queries": queries}
    yield "row", {**heads, "query": Lq - 1}
    yield "column", {**heads, "key": Lk // 3}
    yield "visible", heads
    for plane, level in (("max", 0), ("max", 2), ("mass", 2)):
        yield "tile", {**heads, "plane": plane, "level": level, "row": 0, "column": 0}


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_page_computes_what_the_server_answers(local, name):
    recording = RECORDINGS[name]
    ask, answers = local(recording), Answers([recording])
    about = json.loads(ask("about"))
    assert about == json.loads(answers.answer("about").body)
    assert json.loads(ask("words")) == json.loads(answers.answer("words").body)
    for side in ("key", "query"):
        expected = answers.answer("tokens", f"side={side}").body
        assert json.loads(ask("tokens", side=side)) == json.loads(expected)
    asked = list(questions(about["recordings"][0]))
    for (path, parameters), found in zip(asked, ask.all(asked), strict=True):
        expected = complete(answers, path, parameters)
        np.testing.assert_allclose(
            floats(found), floats(expected), rtol=1e-5, atol=1e-5, err_msg=f"{path} {parameters}"
        )
    compare_heads(ask, answers, len(recording.layers), len(recording.query_tokens))
    compare_links(ask, answers, about["recordings"][0])
    compare_steps(ask, answers, about["recordings"][0])
    answers.close()


def questions_of_effects(facts, kind):
    """Floats that are asked of the effects of a head, and of several."""
    Lq, Lk = facts["queries"], facts["tokens"]
    head = {"layer": 0, "head": facts["layers"][0]["heads"] - 1, "effect": kind}
    heads = {"layer": 0, "heads": "0,1", "effect": kind}
    for where in (head, heads):
        yield "row", {**where, "query": Lq // 2}
        yield "column", {**where, "key": Lk // 3}
        for level in (0, 2, 5, 9):
            for row in range(-(-Lq // (256 << level))):
                at = {"level": level, "row": row, "column": 0, "plane": "max"}
                yield "tile", {**where, **at}
        if Lq > 4:
            yield "row", {**where, "queries": f"1-3,{Lq - 1}-{Lq}"}
    yield "pair", {"query": Lq - 1, "key": Lk // 2, "effect": kind}


def test_the_page_computes_the_effects_that_the_server_answers(local):
    recordings = list(EXPLAINED.values())
    ask, answers = local(*recordings), Answers(recordings)
    about = json.loads(ask("about"))
    assert about == json.loads(answers.answer("about").body)
    kinds = [(n, kind) for n in range(len(recordings)) for kind in ("knockout", KINDS[1 + n % 4])]
    asked = [
        (path, {"recording": n, **parameters})
        for n, kind in kinds
        for path, parameters in questions_of_effects(about["recordings"][n], kind)
    ]
    links = [
        (path, {"recording": n, "effect": kind, **more})
        for n, kind in kinds
        for path, more in (
            ("links", {"layer": 0, "head": 0, "n": 6}),
            ("links", {"layer": 0, "heads": "0,1", "n": 3, "rows": "0-1", "columns": "0-1"}),
            ("effects", {}),
            ("heads", {"layer": 0}),
        )
    ]
    found = ask.all([*asked, *links])
    for (path, parameters), body in zip(asked, found, strict=False):
        expected = floats(complete(answers, path, parameters))
        layer = recordings[parameters["recording"]].layers[0]
        np.testing.assert_array_equal(np.isnan(floats(body)), np.isnan(expected))
        close(floats(body), expected, layer, parameters["effect"])
    for (path, parameters), body in zip(links, found[len(asked) :], strict=True):
        told, wanted = json.loads(body), json.loads(complete(answers, path, parameters))
        assert told.keys() == wanted.keys()
        layer = recordings[parameters["recording"]].layers[0]
        numbers_of = {
            "links": lambda x: [abs(link[2]) for link in x["links"]],
            "effects": lambda x: x["largest"],
            "heads": lambda x: floats(base64.b64decode(x["thumbnails"])),
        }
        got, expected = map(numbers_of[path], (told, wanted))
        close(got, expected, layer, parameters["effect"])
    answers.close()


@pytest.mark.parametrize("name", BROKEN)
def test_the_page_and_the_server_agree_on_effects_that_are_no_numbers(local, name):
    recording = BROKEN[name]
    ask, answers = local(recording), Answers([recording])
    facts = json.loads(ask("about"))["recordings"][0]
    for kind in KINDS:
        asked = list(questions_of_effects(facts, kind))
        for heads in ({"head": 3}, {"heads": "0,3"}, {"heads": "2,3"}):
            where = {"layer": 0, "effect": kind, **heads}
            asked += [("row", {**where, "query": 19}), ("row", {**where, "queries": "1-3,12-15"})]
        for (path, parameters), found in zip(asked, ask.all(asked), strict=True):
            expected = floats(complete(answers, path, parameters))
            np.testing.assert_allclose(
                floats(found), expected, rtol=1e-4, atol=1e-4, err_msg=f"{path} {parameters}"
            )
        found, expected = (
            np.array(json.loads(x)["largest"][0], float)
            for x in (ask("effects", effect=kind), complete(answers, "effects", {"effect": kind}))
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    answers.close()


def complete(answers, path, parameters):
    answer = answers.answer(path, urlencode(parameters))
    assert answer.status == 200, answer.body
    return answer.body if answer.coverage == 1 else complete(answers, path, parameters)


def compare_heads(ask, answers, layers, queries):
    for n in range(layers):
        found = json.loads(ask("heads", layer=n))
        expected = json.loads(complete(answers, "heads", {"layer": n}))
        assert found.keys() == expected.keys()
        pictures = [floats(base64.b64decode(x.pop("thumbnails"))) for x in (found, expected)]
        np.testing.assert_allclose(*pictures, atol=1 / 64 + 1e-4)  # rounded, each by itself
        for name, value in expected.items():
            assert (value is None) == (found[name] is None), name
            if value is not None:
                value, other = (np.array(x, float) for x in (value, found[name]))
                # The server reads 512 queries for the roles, a file all of them.
                is_sampled = name in ("first", "previous", "induction") and queries > 512
                bound = {"atol": 0.03} if is_sampled else {"rtol": 1e-4, "atol": 2e-6}
                np.testing.assert_allclose(other, value, **bound, err_msg=name)


def compare_links(ask, answers, facts):
    Lq, Lk = facts["queries"], facts["tokens"]
    part = {"rows": f"{Lq // 3}-{Lq}", "columns": f"0-{max(1, Lk // 2)}"}
    words = {"n": 6, "unit": "word"}
    one = ({"n": 5}, {"n": 512}, {"n": 7, **part}, {"n": 0}, words, {**words, **part})
    ends = sorted({0, facts["layers"][0]["heads"] - 1})
    heads = {"heads": ",".join(map(str, ends))}
    several = [{**heads, "n": 5}, {**heads, **part, "n": 7}, {**heads, **part, **words}]
    for more in (*({"head": 0, **asked} for asked in one), *several):
        where = {"layer": 0, **more}
        told = json.loads(ask("links", **where))
        wanted = json.loads(complete(answers, "links", where))
        found, expected = told["links"], wanted["links"]
        assert told["fewest"] == wanted["fewest"]
        assert len(found) == len(expected), where
        np.testing.assert_allclose(
            [link[2] for link in found], [link[2] for link in expected], rtol=1e-5, atol=1e-5
        )
        # Where two weights are equal but for rounding, either may come first.
        others = {tuple(link[:2]) for link in found} ^ {tuple(link[:2]) for link in expected}
        last = expected[-1][2] if expected else 0
        weights = {tuple(link[:2]): link[2] for link in found + expected}
        assert all(abs(weights[place] - last) < 1e-4 for place in others)


def compare_steps(ask, answers, facts):
    Lq, Lk = facts["queries"], facts["tokens"]
    where = {
        "layer": 0,
        "head": facts["layers"][0]["heads"] - 1,
        "queries": ",".join(map(str, dict.fromkeys((Lq - 1, 0, min(5, Lq - 1))))),
        "keys": ",".join(map(str, dict.fromkeys((Lk - 1, 0, Lk // 2)))),
    }
    found = json.loads(ask("steps", **where))
    expected = json.loads(complete(answers, "steps", where))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (value is None) == (found[name] is None), name
        if value is not None:
            value, other = (np.array(x, float) for x in (value, found[name]))
            np.testing.assert_allclose(other, value, rtol=1e-6, atol=1e-6, err_msg=name)


def test_scores_of_a_million_keep_every_digit(local):
    q = np.array([[[1e3, 1.0], [1e3, 2.0]]])
    k = np.array([[[1e3, 1.0], [1e3, 3.0], [1e3 - 1e-3, 0.0]]])
    ask = local(Recording(["a", "b", "c"], [Layer(q, k, scale=1.0)], query_tokens=["x", "y"]))
    scores = q[0].astype(np.longdouble) @ k[0].T.astype(np.longdouble)
    exact = scores - np.log(np.exp(scores - scores.max(1)[:, None]).sum(1))[:, None]
    exact -= scores.max(1)[:, None]
    for i in range(2):
        found = floats(ask("row", layer=0, head=0, query=i))
        np.testing.assert_allclose(found, exact[i].astype(float), rtol=1e-6)


def test_a_row_with_a_nan_is_no_number_and_its_neighbours_are(local):
    found = layer(20, causal=True)
    found.query[0, 7] = np.nan
    ask, answers = local(of_one(found)), Answers([of_one(found)])
    tiles = [
        ("tile", {"plane": plane, "level": level, "row": 0, "column": 0})
        for plane in ("max", "mass")
        for level in range(6)
    ]
    rows = [("row", {"query": 7}), ("row", {"query": 8}), ("column", {"key": 3})]
    for path, more in rows + tiles:
        where = {"layer": 0, "head": 0, **more}
        expected = floats(complete(answers, path, where))
        np.testing.assert_allclose(
            floats(ask(path, **where)), expected, rtol=1e-5, atol=1e-5, err_msg=str(where)
        )


def test_what_is_not_there_is_refused_with_a_sentence(local):
    ask = local(RECORDINGS["causal"])
    wrong = [
        ("tiles", {}),
        ("row", {"layer": 0, "head": 4, "query": 0}),
        ("row", {"layer": 0, "head": 0, "query": "1e1"}),
        ("tile", {"layer": 0, "head": 0, "plane": "min", "level": 0, "row": 0, "column": 0}),
        ("links", {"layer": 0, "head": 0, "n": 5, "rows": "4-4", "columns": "0-1"}),
    ]
    for path, parameters in wrong:
        refused = ask.page.evaluate(
            "([path, given]) => asked(path, given).then(() => '', (error) => error.message)",
            [path, parameters],
        )
        assert refused.endswith("."), (path, parameters)


def test_a_long_text_is_shown_before_it_is_read_and_the_page_stays_awake(local):
    ask = local(of_one(layer(3000, heads=1, key_heads=1, size=64, causal=True)))
    tile = {"layer": 0, "head": 0, "plane": "max", "level": 4, "row": 0, "column": 0}
    turns, coverage = ask.page.evaluate(
        """async (tile) => {
          const now = performance.now.bind(performance);
          performance.now = () => 5 * now(); // no machine reads all of it in a fifth of its time
          let [turns, ended] = [0, false];
          const tick = () => {
            turns++;
            if (!ended) setTimeout(tick, 0);
          };
          tick();
          const coverage = await first("tile", tile);
          await asked("tile", tile);
          ended = true;
          return [turns, coverage];
        }""",
        tile,
    )
    assert 188 / 3000 <= coverage < 1
    assert turns > 5  # it is read in slices; read at once, there would be three


def test_numbers_that_are_damaged_are_told_of(local):
    def damage(texts):
        text = texts["regard-array-0"]
        return {**texts, "regard-array-0": text[:40] + text[44:]}

    ask = local(RECORDINGS["causal"], damage=damage)
    found = ask.page.evaluate(
        "asked('row', {layer: 0, head: 0, query: 3}).then(() => '', (error) => error.message)"
    )
    assert found.startswith("The numbers in this file are damaged")
    assert found.endswith("export it again.")


WORDS = [f" w{n % 9}" for n in range(60)]
OTHERS = ["new", *WORDS[:20], "x", "y", *WORDS[23:40], *WORDS[45:]]


def of_text(tokens, seed, **options):
    """A recording of one layer, whose queries may have a text of their own."""
    own = options.pop("query_tokens", None)
    found = layer(len(own or tokens), len(tokens), **options)
    found.query[...] = numbers(*found.query.shape, seed=seed)
    return Recording(tokens, [found], query_tokens=own)


COMPARED = {
    "texts": (of_text(WORDS, 3, causal=True), of_text(OTHERS, 4, causal=True)),
    "text and window": (of_text(OTHERS, 3, causal=True, window=(9, 0)), of_text(WORDS, 4)),
    "cross-attention": (
        of_text(WORDS, 3, query_tokens=["a", "b", "c"]),
        of_text(OTHERS, 4, query_tokens=["b", "x", "y", "c"]),
    ),
    "other heads": (of_text(WORDS, 3), of_text(WORDS, 4, heads=6, key_heads=3)),
    "a query of NaN": (of_text(WORDS, 3, causal=True), of_text(OTHERS, 4, causal=True)),
    "nothing in common": (of_text(WORDS, 3), of_text([f"z{n}" for n in range(30)], 4)),
}
COMPARED["a query of NaN"][0].layers[0].query[3, 30] = np.nan


def comparing(one, other):
    """Floats that are asked of the last head of two recordings that are compared."""
    head = {"layer": 0, "head": 3}
    for own, there in ((0, 1), (1, 0)):
        facts = (one, other)[own]
        Lq, Lk = len(facts.query_tokens), len(facts.tokens)
        for way in ({"recording": own, "against": there}, {"recording": there, "on": own}):
            for more in ({}, {"first": "hidden"}):
                for i in {0, Lq // 2, Lq - 1}:
                    yield "row", {**head, **way, **more, "query": i}
                for j in {0, Lk // 3, Lk - 1}:
                    yield "column", {**head, **way, **more, "key": j}
                for level in range(max(Lq, Lk).bit_length() + 1):
                    at = {"level": level, "row": 0, "column": 0}
                    for plane in ("max", "mass"):
                        yield "tile", {**head, **way, **more, **at, "plane": plane}


@pytest.mark.parametrize("name", COMPARED)
def test_the_page_compares_as_the_server_does(local, name):
    one, other = COMPARED[name]
    ask, answers = local(one, other), Answers([one, other])
    asked = list(comparing(one, other))
    for (path, parameters), found in zip(asked, ask.all(asked), strict=True):
        expected = complete(answers, path, parameters)
        np.testing.assert_allclose(
            floats(found), floats(expected), rtol=1e-5, atol=1e-5, err_msg=f"{path} {parameters}"
        )
    for own, there in ((0, 1), (1, 0)):
        pair = {"recording": own, "with": there}
        found = json.loads(ask("alignment", **pair))
        assert found == json.loads(complete(answers, "alignment", pair))
        where = {**pair, "layer": 0}
        bodies = ask("change", **where), complete(answers, "change", where)
        changes = [np.array(json.loads(body)["change"], float) for body in bodies]
        np.testing.assert_allclose(*changes, rtol=1e-5, atol=2e-6)
        heads = {"layer": 0, "head": 2, "with_layer": 0, "with_head": 3, "n": 30}
        found = json.loads(ask("changed", **pair, **heads))["links"]
        expected = json.loads(complete(answers, "changed", {**pair, **heads}))["links"]
        np.testing.assert_allclose(
            [abs(x) for *_, x in found], [abs(x) for *_, x in expected], rtol=1e-4, atol=1e-6
        )
    where = {"layer": 0, "head": 1, "recording": 0, "against": 1, "n": 20}
    found, expected = (
        json.loads(x)["links"] for x in (ask("links", **where), complete(answers, "links", where))
    )
    np.testing.assert_allclose(
        [x for *_, x in found], [x for *_, x in expected], rtol=1e-5, atol=1e-5
    )
    answers.close()
