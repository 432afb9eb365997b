"""The decoder in NumPy."""

import fractions
import itertools
import json

import numpy as np
import pytest
import safetensors.numpy

import regard.lm.memory
from regard import MaterializeError
from regard._base.rotary import rotate
from regard._base.words import spelled
from regard.lm.config import Config
from regard.lm.model import LanguageModel

PROMPT = "def run(self):\n    return "


def test_reading_with_a_cache_is_reading_without(tiny):
    ids = tiny.tokenizer.encode("def run(self): import os, sys  # and more of it", bos=True)
    whole = tiny.hidden(ids)
    for cuts in ([1], [1, 2, 3], [9], [5, 20]):
        caches = tiny.new_caches()
        edges = [0, *cuts, len(ids)]
        parts = [tiny.hidden(ids[a:b], caches) for a, b in itertools.pairwise(edges)]
        assert [cache.length for cache in caches] == [len(ids)] * len(caches)
        np.testing.assert_allclose(np.concatenate(parts), whole, atol=2e-5)


def test_each_layer_needs_a_cache_of_its_own(tiny):
    layers = len(tiny.config.layers)
    for caches in (tiny.new_caches()[:1], tiny.new_caches() * 2):
        with pytest.raises(
            ValueError, match=rf"{len(caches)} caches for {layers} layers; each needs"
        ):
            tiny.hidden([1, 2], caches)


def test_a_pass_that_was_ended_leaves_the_caches_as_they_were(tiny):
    ids = tiny.tokenizer.encode("def run(self): import os, sys", bos=True)
    caches, layers = tiny.new_caches(), []
    tiny.hidden(ids[:4], caches)

    def end(layer):
        layers.append(layer)
        if len(layers) == len(caches):
            raise StopIteration

    with pytest.raises(StopIteration):
        tiny.hidden(ids[4:7], caches, record=end)
    assert [cache.length for cache in caches] == [4] * len(caches)
    found = tiny.hidden(ids[4:], caches)
    np.testing.assert_allclose(found, tiny.hidden(ids)[4:], atol=2e-5)


def test_generation_with_the_cache_is_generation_without(tiny):
    written = tiny.generate(PROMPT, 12)
    ids = tiny.tokenizer.encode(PROMPT, bos=True)
    *ids, last = ids
    fits = [tiny.tokenizer.bytes(i).startswith(b" ") for i in range(len(tiny.tokenizer))]
    assert tiny.tokenizer.bytes(last) == b" "
    for n in range(13):
        logits = tiny.logits(tiny.hidden(ids))[-1]
        ids.append(int((np.where(fits, logits, -np.inf) if n == 0 else logits).argmax()))
    assert PROMPT + written == tiny.tokenizer.decode(ids)


def test_a_token_does_not_depend_on_those_after_it(tiny):
    ids = tiny.tokenizer.encode("import os; import sys", bos=True)
    np.testing.assert_allclose(tiny.hidden(ids[:5]), tiny.hidden(ids)[:5], atol=2e-5)


def test_loss_is_the_mean_of_minus_ln_p(tiny):
    text = "import os"
    ids = tiny.tokenizer.encode(text, bos=True)
    logits = tiny.logits(tiny.hidden(ids[:-1])).astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(p[np.arange(len(ids) - 1), ids[1:]])
    np.testing.assert_allclose(tiny.losses(text), expected, rtol=1e-5)
    assert tiny.loss(text) == pytest.approx(expected.mean())


def test_losses_in_several_blocks_are_those_in_one(tiny, monkeypatch):
    whole = tiny.losses("import os; import sys; import re")
    monkeypatch.setattr("regard.lm.model.ROWS_AT_ONCE", 3)
    np.testing.assert_allclose(tiny.losses("import os; import sys; import re"), whole, rtol=1e-6)


def test_a_model_prints_its_sizes(tiny):
    config = tiny.config
    sizes = f"{len(config.layers)} layers, {config.num_heads} heads of {config.head_dim}"
    name = tiny.name or "no name"
    assert repr(tiny) == f"LanguageModel({name}: {sizes}, {config.vocab_size} ids)"


def test_a_recording_names_its_tokens_and_model(tiny):
    recording = tiny.record("import os")
    ids = tiny.tokenizer.encode("import os", bos=True)
    assert list(recording.tokens) == tiny.tokenizer.tokens(ids)
    assert recording.tokens[0] == "<bos>"
    assert recording.model == "tiny"
    assert [layer.query.shape for layer in recording.layers] == [(4, len(ids), 8)] * 2


def test_a_recording_tells_how_far_it_is(tiny):
    told = []
    tiny.record("abc", progress=lambda done, layers: told.append((done, layers)))
    count = len(tiny.config.layers)
    assert told == [(n, count) for n in range(count)]


def test_a_recording_holds_what_entered_attention(tiny):
    """The second layer's query follows from the first layer's recorded weights and values."""
    recording = tiny.record("import os")
    first = {n.split(".")[-1]: w for n, w in tiny.weights.items() if n.startswith("layers.0")}
    x = norm(tiny.weights["embedding"][tiny.tokenizer.encode("import os", bos=True)])
    attended = np.asarray(recording.weights[0]) @ recording.layers[0].value
    x = x + joined(attended) @ first["out"].T
    x = x + np.maximum(norm(x) * first["mlp_norm"] @ first["up"].T, 0) ** 2 @ first["down"].T
    x = norm(x) * tiny.weights["layers.1.attention_norm"]
    query = x @ tiny.weights["layers.1.qkv"][:32].T
    np.testing.assert_allclose(joined(recording.layers[1].query), query, rtol=1e-4, atol=1e-4)


def norm(x):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)


def joined(heads):
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def test_recorded_weights_see_only_the_window(tiny):
    recording = tiny.record("import os; import sys; import re")
    i, j = np.indices(recording.weights[0].shape[1:])
    narrow, wide = (np.asarray(weights) for weights in recording.weights)
    visible = (j <= i) & (i - j <= 7)
    assert not narrow[:, ~visible].any()
    assert (narrow[:, visible] > 0).all()
    assert (wide[:, j <= i] > 0).all()


def test_rotary_scores_depend_on_distance_alone(tiny):
    base = tiny.config.layers[0].rope
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 8))
    near = rotate(q, 5, base) @ rotate(k, 2, base).swapaxes(-1, -2)
    far = rotate(q, 100_005, base) @ rotate(k, 100_002, base).swapaxes(-1, -2)
    np.testing.assert_allclose(near, far, rtol=1e-9)
    assert abs(near - q @ k.swapaxes(-1, -2)).item() > 1e-3


def test_greedy_generation_is_the_default_and_the_same_every_time(tiny):
    assert tiny.generate(PROMPT, 9) == tiny.generate(PROMPT, 9, temperature=0.0, seed=5)


def test_sampling_is_decided_by_the_seed(tiny):
    texts = [tiny.generate(PROMPT, 20, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_sampling_draws_from_the_softmax():
    from regard.lm.model import _choose

    random, p = np.random.default_rng(0), np.array([0.5, 0.3, 0.2])
    draws = [_choose(np.log(p) * 2, 2.0, random) for _ in range(4000)]
    np.testing.assert_allclose(np.bincount(draws) / 4000, p, atol=0.03)


@pytest.mark.parametrize("temperature", [1e-320, 1e-46, 1e-40, 1e-9])
def test_the_coldest_draws_are_the_likeliest_tokens(tiny, temperature):
    assert tiny.generate(PROMPT, 9, temperature=temperature) == tiny.generate(PROMPT, 9)


def test_a_temperature_is_a_number_of_any_kind(tiny):
    exact = tiny.generate(PROMPT, 5, temperature=0.5)
    for kind in (np.float16, np.float64, fractions.Fraction):
        assert tiny.generate(PROMPT, 5, temperature=kind(0.5)) == exact


def test_the_hottest_draws_keep_to_what_continues_the_text(tiny):
    hot = [tiny.generate(PROMPT, 9, temperature=t) for t in (1e30, 1e38, 1e300)]
    assert len({*hot}) == 1


def test_streamed_pieces_are_the_generated_text(tiny):
    pieces = list(tiny.stream(PROMPT, 30, temperature=1.5, seed=3))
    assert "".join(pieces) == tiny.generate(PROMPT, 30, temperature=1.5, seed=3)
    assert len(pieces) > 1


def test_a_text_that_ends_inside_a_token_is_continued_as_if_it_did_not(tiny):
    assert tiny.tokenizer.tokens(tiny.tokenizer.encode("impo"))[-1] != "import"
    assert ("impo" + tiny.generate("impo", 1)).startswith("impo")


@pytest.mark.parametrize(
    "text", ["def ", "def  ", "    return ", "a\n\n", "a\r\n", "x \n", "\t\t", " ", "é", "a\u00a0"]
)
def test_a_text_stays_as_it_is_whatever_it_ends_in(builtin, text):
    written = [builtin.generate(text, tokens, temperature=1.0, seed=3) for tokens in range(4)]
    assert written[0] == ""
    for less, more in itertools.pairwise(part for part in written[1:] if "\ufffd" not in part):
        assert more.startswith(less)
    assert "".join(spelled(builtin.record(text + written[-1]).tokens[1:])).startswith(text)


def test_indentation_is_continued_by_what_is_indented(builtin):
    written = builtin.generate("def size(self):\n    ", 3)
    assert written.startswith(("return", "self", '"""', "if", "for"))


def test_no_tokens_are_no_text(tiny):
    assert tiny.generate(PROMPT, 0) == ""


def test_generation_stops_where_the_text_ends(tiny, monkeypatch):
    def only_bos(hidden):
        return np.where(np.arange(len(tiny.tokenizer)) == tiny.tokenizer.bos, 1.0, 0.0)

    monkeypatch.setattr(tiny, "logits", only_bos, raising=False)
    assert len(tiny.generate("import", 50)) < 10


def test_a_saved_model_is_loaded_with_the_same_numbers(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    loaded = LanguageModel.load(tmp_path / "model")
    assert loaded.config == tiny.config
    assert loaded.loss(PROMPT) == tiny.loss(PROMPT)


@pytest.mark.parametrize("value", [65520.0, -1e9, np.inf, np.nan])
def test_weights_that_float16_cannot_hold_are_not_saved(tiny, tmp_path, value):
    weights = {name: weight.copy() for name, weight in tiny.weights.items()}
    weights["layers.1.up"][3, 4:6] = value
    model = LanguageModel(tiny.config, tiny.tokenizer, weights)
    with pytest.raises(ValueError, match=r"layers.1.up: 2 of 2048 weights are .* float16"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_the_largest_number_of_float16_is_saved(tiny, tmp_path):
    weights = tiny.weights | {"norm": np.full(32, 65504, np.float32)}
    LanguageModel(tiny.config, tiny.tokenizer, weights).save(tmp_path)
    np.testing.assert_array_equal(LanguageModel.load(tmp_path).weights["norm"], weights["norm"])


@pytest.mark.parametrize("method", ["hidden", "losses_ids", "record_ids"])
@pytest.mark.parametrize(
    "ids", [[-1, 5, 6], [5, -1, 6], [5, 6, -1], [5, 6, 300], np.array([5, -1])]
)
def test_ids_outside_the_vocabulary_are_refused_before_the_pass(tiny, monkeypatch, method, ids):
    monkeypatch.setattr("regard.lm.model._norm", None)
    with pytest.raises(ValueError, match=r"id (-1|300) is outside the vocabulary, 0 to \d+"):
        getattr(tiny, method)(ids)


def test_ids_are_checked_before_the_gradients_are_computed(tiny):
    with pytest.raises(ValueError, match="id -1 is outside the vocabulary"):
        tiny.record_ids([5, -1, 6], explain=-1)
    for position in ("a", 1.5, True):
        with pytest.raises(
            TypeError, match=f"explain is a {type(position).__name__}; the position"
        ):
            tiny.record_ids([5, 6], explain=position)


@pytest.mark.parametrize(
    ("method", "ids", "least"),
    [
        ("hidden", [], 1),
        ("record_ids", [], 1),
        ("losses_ids", [], 2),
        ("losses_ids", [5], 2),
    ],
)
def test_too_few_ids_are_an_error_that_says_how_many_are_needed(tiny, method, ids, least):
    message = rf"Token ids: {len(ids)} given, at least {least} needed"
    with pytest.raises(ValueError, match=message):
        getattr(tiny, method)(ids)


@pytest.mark.parametrize("method", ["record", "losses", "loss"])
def test_an_empty_text_is_an_error(tiny, method):
    with pytest.raises(ValueError, match="text is empty; at least one character"):
        getattr(tiny, method)("")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (5, "is of type int; a str is needed"),
        (None, "is of type NoneType; a str is needed"),
        (b"abc", r"is of type bytes; a str is needed\. Decode it: text\.decode\(\)"),
        (b"", "is of type bytes"),
        ([1, 2], "is of type list"),
    ],
)
def test_what_is_no_text_is_an_error_that_says_what_is_needed(tiny, text, said):
    for method in (tiny.record, tiny.losses, lambda x: tiny.generate(x, 3)):
        with pytest.raises(TypeError, match=f"The text {said}"):
            method(text)


def test_an_empty_prompt_is_an_error(tiny):
    with pytest.raises(ValueError, match="text is empty"):
        tiny.generate("", 3)


@pytest.mark.parametrize(
    ("tokens", "temperature"), [(-1, 0.0), (3, -0.5), (3, float("nan")), (3, float("inf"))]
)
def test_negative_tokens_or_temperature_are_errors(tiny, tokens, temperature):
    with pytest.raises(ValueError, match=f"tokens is {tokens} and temperature {temperature}"):
        tiny.generate("a", tokens, temperature=temperature)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"tokens": 2.5}, TypeError, r"tokens 2\.5 is a float; an int is needed"),
        ({"tokens": "3"}, TypeError, "tokens '3' is a str; an int is needed"),
        ({"temperature": "a"}, TypeError, "temperature is a str; a number is needed"),
        ({"seed": 1.5}, TypeError, r"seed 1\.5 is a float; an int is needed"),
        ({"seed": -1}, ValueError, "seed is -1; it must not be negative"),
    ],
    ids=str,
)
def test_what_cannot_be_generated_is_told_at_once(tiny, options, error, said):
    with pytest.raises(error, match=f"^generate: {said}"):
        tiny.stream("a", **{"tokens": 3} | options)
    assert tiny.generate("a", np.int64(3), temperature=np.float32(0)) == tiny.generate("a", 3)
    assert len({tiny.generate("a", 9, temperature=9.0, seed=None) for _ in range(3)}) > 1


def test_token_ids_that_are_no_list_are_an_error(tiny):
    with pytest.raises(TypeError, match="Token ids are an int; a list of ints is needed"):
        tiny.record_ids(5)


def test_a_text_longer_than_memory_allows_says_how_long_it_may_be(tiny, monkeypatch):
    monkeypatch.setattr(regard.lm.memory, "free_bytes", lambda: 1_000_000)
    message = r"has 1,\d{3} tokens; reading them needs 0.0 GB.*\n  Give at most \d+ tokens"
    with pytest.raises(MaterializeError, match=message):
        tiny.record("\0" * 1500)
    tiny.record("\0" * 100)


def test_what_will_be_generated_counts_as_text(tiny, monkeypatch):
    monkeypatch.setattr(regard.lm.memory, "free_bytes", lambda: 1_000_000)
    with pytest.raises(MaterializeError, match="Give at most"):
        tiny.generate("a", 10**6)


def test_free_memory_is_known_or_not_asked_for(tiny, monkeypatch):
    assert regard.lm.memory.free_bytes() > 0
    monkeypatch.setattr(regard.lm.memory, "free_bytes", lambda: None)
    assert tiny.record("abc").tokens


def test_an_unknown_folder_names_the_builtin_model(tmp_path):
    said = r"no language model there.*'builtin' is the one.*regard\.hf"
    with pytest.raises(FileNotFoundError, match=said):
        LanguageModel.load(tmp_path / "nothing")


@pytest.mark.parametrize("content", [b"", b"junk", b"\xff" * 100])
def test_a_foreign_weights_file_is_an_error(tiny, tmp_path, content):
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a weights file \(.*\)\. Put back the file"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("place", [0.0, 0.3, 0.999])
def test_a_changed_bit_of_the_weights_is_told(tiny, tmp_path, place):
    tiny.save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + int(place * (len(data) - start))] ^= 1
    path.write_bytes(data)
    message = r"not a weights file \(its checksum is another: .*\)\. Put back the file"
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


def test_a_changed_bit_of_what_is_said_of_the_weights_is_told(tiny, tmp_path):
    tiny.save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for place in range(data.index(b'"__metadata__"'), data.index(b"}") + 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"not a weights file \(.*\)\. Put back the file"):
            LanguageModel.load(tmp_path)


def test_weights_that_were_saved_without_a_checksum_are_read(tiny, tmp_path):
    tiny.save(tmp_path)
    path = tmp_path / "model.safetensors"
    needed = LanguageModel.load(tmp_path).weights
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, {"format": "np"})
    found = LanguageModel.load(tmp_path).weights
    assert all(np.array_equal(found[name], needed[name]) for name in needed)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, np.float16, r"model.safetensors: 1 of 32 weights of norm are not finite"),
        (1e300, np.float64, r"1 of 32 weights of norm are not finite"),
        (1, np.int8, r"norm is int8; one of float16, bfloat16, float32, float64 is needed"),
    ],
)
def test_weights_that_are_no_numbers_are_an_error(tiny, tmp_path, value, dtype, message):
    tiny.save(tmp_path)
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    stored["norm"] = stored["norm"].astype(dtype)
    stored["norm"][3] = value
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


def test_weights_in_bfloat16_are_read_or_told(tiny, tmp_path):
    """NumPy has the dtype where a package has brought it."""
    tiny.save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"F16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    try:
        np.dtype("bfloat16")
    except TypeError:
        with pytest.raises(ValueError, match=r"model.safetensors: not a weights file \(.*bfloat16"):
            LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 3}, "embed_dim 32 cannot be 3 heads"),
        ({"num_heads": 32}, "embed_dim 32 cannot be 32 heads of even size"),
        ({"num_heads": 0}, "num_heads is 0; at least 1"),
        ({"num_heads": "4"}, "num_heads is '4'; an int"),
        ({"embed_dim": None}, "embed_dim is None; an int"),
        ({"layers": [{"window": -3}]}, "window is -3; at least 0"),
        ({"layers": [{"window": 2**53 + 1}]}, f"window is {2**53 + 1}; at most {2**53} is"),
        ({"layers": [{"window": "x"}]}, "window is 'x'; an int"),
        ({"layers": [{"rope": -3.0}]}, "rope is -3.0; it must be positive and finite"),
        ({"layers": [{"rope": "x"}]}, "rope is 'x'; a number"),
    ],
)
def test_a_config_of_no_model_is_an_error(tiny, tmp_path, changed, message):
    tiny.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ValueError, match=rf"not the config.json of a regard model \(.*{message}"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"\(a list was found; an object is needed\). Put back the file"),
        ("{}", r"\(it has no vocab_size\). Put back the file"),
        ("{", r"\(.*\). Put back the file"),
        ('{"model_type": "gpt2"}', r"\(.*\). It is of a model of transformers, .*regard.hf.load"),
        ({"layers": 3}, r"\(layers is an int; a list is needed\). Put back"),
        ({"layers": [{}, 3]}, r"\(layer 1: an int was found; an object is needed\). Put back"),
        ({"layers": [{"width": 3}]}, r"\(layer 0: it has 'width', which .*; upgrade regard"),
        ({"bias": True}, r"\(it has 'bias', which this version of regard does not know; upgrade"),
    ],
)
def test_a_config_that_cannot_be_read_is_told_with_the_way_out(tiny, tmp_path, content, message):
    path = tmp_path / "config.json"
    tiny.save(tmp_path)
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.write_text(content)
    with pytest.raises(ValueError, match=f"config.json of a regard model {message}"):
        LanguageModel.load(tmp_path)


def test_a_model_of_hugging_face_is_told_whatever_its_other_files_are(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"a model of transformers, which regard\.hf\.load reads"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_missing_file_of_a_model_is_told_with_the_way_out(tiny, tmp_path, name):
    tiny.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}: no such file. Put back the file"):
        LanguageModel.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file. Put back the file"):
        Config.load(tmp_path / "none" / "config.json")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (lambda x: x.astype(np.float16), "float16"),
        (lambda x: x.astype(np.float64), "float64"),
        (lambda x: x.tolist(), "a list"),
    ],
)
def test_weights_that_are_no_float32_arrays_are_an_error(tiny, changed, found):
    weights = tiny.weights | {"norm": changed(tiny.weights["norm"])}
    with pytest.raises(TypeError, match=f"norm is {found}; .*float32 arrays of NumPy"):
        LanguageModel(tiny.config, tiny.tokenizer, weights)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"layers": [{"width": 3}]}', '{"layers": 3}', "[" * 100_000],
    ids=range(6),
)
def test_a_foreign_config_is_an_error(tiny, tmp_path, content):
    tiny.save(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"not the config.json of a regard model"):
        LanguageModel.load(tmp_path)


def test_weights_of_another_model_are_an_error(tiny, tmp_path):
    tiny.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_dim": 48}))
    with pytest.raises(ValueError, match=r"layers.0.up is \(64, 32\), needed \(48, 32\)"):
        LanguageModel.load(tmp_path)


def test_a_tokenizer_of_another_model_is_an_error(tiny, builtin, tmp_path):
    tiny.save(tmp_path)
    builtin.tokenizer.save(tmp_path / "tokenizer.json")
    ids = len(builtin.tokenizer)
    with pytest.raises(ValueError, match=rf"tokenizer has {ids} ids and config.json says"):
        LanguageModel.load(tmp_path)
