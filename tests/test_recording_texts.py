"""Texts of many tokens lie in arrays of the file, and are made when they are first used."""

import copy
import json
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import regard
from recordings import TOKENS, assert_same, layer, sample
from regard.recording import Layer, Recording, Writer, _saving, _texts, _writer
from regard.recording._texts import Texts

HOSTILE = [
    "\ud83d",
    "\ude00",
    "",
    "\x00\x1b[31m",
    "🙂\u202e",
    "é" * 10_000,
    "</script>",
    "\udfff",
    "",
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


def long_text(count=20_000, **options):
    """More texts than the header takes: some of them hostile."""
    tokens = [HOSTILE[n % 9] if n % 100 < 9 and n < 1000 else f" to{n % 500}" for n in range(count)]
    x = np.arange(2 * count, dtype=np.float16).reshape(1, count, 2)
    return Recording(tokens, [Layer(x, x, causal=True)], **options)


def header_of(path):
    with path.open("rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))


def test_many_tokens_are_arrays_and_come_back(path):
    recording = long_text(model="m", boundary=7)
    recording.save(path)
    assert_same(Recording.load(path), recording)
    assert_same(Recording.load(path, mapped=False), recording)
    found = safe_open(path, "np")
    assert found.metadata()["version"] == "4"
    assert "tokens" not in found.metadata()
    data, offsets = load_file(path)["tokens.bytes"], load_file(path)["tokens.offsets"]
    assert (data.dtype, offsets.dtype) == (np.uint8, np.int64)
    for n in (0, 5, 19_999):
        text = data[offsets[n] : offsets[n + 1]].tobytes()
        assert text.decode("utf-8", "surrogatepass") == recording.tokens[n]
    assert len(json.dumps(header_of(path))) < 1000


def test_the_safetensors_library_writes_what_is_read(path):
    long_text().save(path)
    save_file(load_file(path), path, safe_open(path, "np").metadata())
    assert_same(Recording.load(path), long_text())


@pytest.mark.parametrize("characters", [65_536, 65_537])
def test_a_list_is_in_the_header_up_to_65536_characters_and_tokens(path, characters):
    x = np.ones((1, 2, 1), np.float32)
    recording = Recording(["é" * (characters - 3), "b"], [Layer(x, x)])
    recording.save(path)
    assert header_of(path)["__metadata__"]["version"] == ("1" if characters == 65_536 else "4")
    assert_same(Recording.load(path), recording)


def test_each_list_of_each_group_by_itself(path):
    words, patches = [f" {n}" * 3 for n in range(9000)], ["p"] * 4
    cross = Recording(patches, [layer(Lq=9000)], query_tokens=words)
    recording = Recording(
        words, [layer(1, 1, 9000, 9000, causal=True)], group="decoder", others={"cross": cross}
    )
    recording.save(path)
    found = Recording.load(path)
    for name, group in recording.groups.items():
        assert_same(found.groups[name], group)
    told = header_of(path)
    assert {name for name in told if name.endswith("bytes")} == {
        "tokens.bytes", "others.0.query_tokens.bytes",
    }  # fmt: skip
    (other,) = json.loads(told["__metadata__"]["others"])
    assert other["tokens"] == patches
    assert "query_tokens" not in other


@pytest.mark.parametrize("pair", ["\ud83d\ude00", "a\ud800\udfffb"])
def test_two_surrogates_stay_two(path, pair):
    """JSON would join them into one character."""
    words, patches = [pair, "é", "\ud83d"], ["\ude00", "b"]
    cross = Recording(patches, [layer(Lq=3, Lk=2)], query_tokens=words)
    recording = Recording(words, [layer(Lq=3, Lk=3)], group="decoder", others={"cross": cross})
    recording.save(path)
    for name, group in recording.groups.items():
        assert_same(Recording.load(path).groups[name], group)
    told = header_of(path)
    assert told["__metadata__"]["version"] == "4"
    assert {name for name in told if name.endswith("bytes")} == {
        "tokens.bytes", "others.0.query_tokens.bytes",
    }  # fmt: skip
    write(path, Recording(words, [layer(Lq=3, Lk=3)]))
    assert Recording.load(path).tokens == tuple(words)


def test_a_pair_in_two_texts_stays_in_the_header(path):
    tokens = ["\ud83d", "\ude00", "🙂", "\ude00\ud83d"]
    Recording(tokens, [layer()]).save(path)
    assert header_of(path)["__metadata__"]["version"] == "1"
    assert Recording.load(path).tokens == tuple(tokens)


def test_texts_are_made_when_they_are_first_used(path):
    count = 100_000
    x = np.zeros((1, count, 1), np.float16)
    made = Recording([f" to{n % 500}" for n in range(count)], [Layer(x, x, causal=True)])
    made.save(path)
    Recording.load(path)
    tracemalloc.start()
    found = Recording.load(path)
    assert str(found) == str(made)
    assert found.weights[0].head(0).part(slice(0, 3)).shape == (3, count)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 7 * count  # they are 4.9 bytes a token; a str has more than 50
    assert isinstance(found._tokens, Texts)
    assert found.tokens == made.tokens
    assert found.tokens is found.tokens
    assert found.query_tokens is found.tokens
    assert len({id(token) for token in found.tokens}) == 500  # equal texts are one object
    assert found.weights[0]._origin.tokens[-2:] == made.tokens[-2:]


def test_queries_are_the_last_of_many_tokens(path):
    made = long_text()
    last = Layer(made.layers[0].query[:, -5:], made.layers[0].key, causal=True)
    Recording(made.tokens, [last]).save(path)
    found = Recording.load(path)
    assert found.query_tokens == made.tokens[-5:]
    assert found.tokens == made.tokens


def test_what_has_not_been_read_can_be_copied_and_saved_again(path):
    long_text().save(path)
    written = path.read_bytes()
    for copied in (copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))):
        assert_same(copied(Recording.load(path)), long_text())
    Recording.load(path).save(path)
    assert path.read_bytes() == written


def test_texts_of_a_file_that_was_cut_say_so(path):
    long_text().save(path)
    found = Recording.load(path)
    os.truncate(path, 100)
    with pytest.raises(regard.RecordingError, match="was cut to 100 bytes"):
        found.tokens  # noqa: B018


@settings(deadline=None)
@given(st.lists(st.text(st.characters(), max_size=5) | st.sampled_from(HOSTILE), max_size=8))
def test_any_texts_come_back_from_their_arrays(texts):
    data, offsets = _texts.arrays_of(texts)
    pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
    assert data.tobytes() == b"".join(pieces)
    np.testing.assert_array_equal(np.diff(offsets), [*map(len, pieces)])
    found = Texts("tokens", data, offsets)
    found.check()
    assert (found.all(), len(found), [*found]) == ((*texts,), len(texts), texts)
    assert [found[n] for n in range(len(texts))] == texts
    assert tuple(found[1:]) == tuple(texts[1:])


# A writer.


def write(path, recording, **options):
    with Writer(path, **options) as writer:
        for found in recording.layers:
            writer.add(found)
        told = {"tokens": recording.tokens, "boundary": recording.boundary}
        writer.finish({"": told}, model=recording.model)


@pytest.mark.parametrize("options", [{}, {"tokens": 20_000}, {"tokens": 10**12}])
def test_a_writer_writes_many_tokens_as_arrays(path, options):
    write(path, long_text(), **options)
    assert_same(Recording.load(path), long_text())
    assert {*load_file(path)} == {
        "tokens.bytes", "tokens.offsets", "layers.0.query", "layers.0.key",
    }  # fmt: skip
    assert Recording.load(path)._tokens._offsets.flags.aligned
    assert path.stat().st_size < 5_000_000


@pytest.mark.parametrize("count", [0, 3000])
def test_texts_that_outgrow_the_room_of_a_writer_are_arrays(path, monkeypatch, count):
    """Nothing moves, whether or not it was told how many there are."""
    monkeypatch.setattr(_saving, "ROOM_BYTES", 4096)
    monkeypatch.setattr(_saving, "_spare", [])
    monkeypatch.setattr(_writer, "_move", None)
    x = np.ones((1, 3000, 3), np.float32)
    made = Recording(["e" * 18] * 3000, [Layer(x, x)])
    write(path, made, tokens=count)
    assert_same(Recording.load(path), made)
    assert header_of(path)["__metadata__"]["version"] == ("1" if count else "4")


def test_arrays_set_aside_lie_between_those_of_texts(path):
    count = 20_001
    x = np.ones((1, count, 1), np.float16)
    made = Recording(["abc"] * count, [Layer(x, x, mask=np.ones((count, 1), bool))])
    write(path, made)
    assert_same(Recording.load(path), made)
    begins = {n: one["data_offsets"][0] for n, one in header_of(path).items() if n[0] != "_"}
    assert sorted(begins, key=begins.get) == [
        "tokens.offsets", "layers.0.query", "layers.0.key", "layers.0.mask", "tokens.bytes",
    ]  # fmt: skip


# Damage.


def changed(path, change):
    """A small file with texts in arrays, and one thing in it changed."""
    arrays = {"layers.0.query": np.ones((1, 4, 2), np.float32)}
    arrays["layers.0.key"] = arrays["layers.0.query"]
    arrays["tokens.bytes"], arrays["tokens.offsets"] = _texts.arrays_of(["a", "é", "", "🙂"])
    told = {"format": "regard-recording", "version": "4", "model": '""', "options": "[{}]"}
    change(arrays, told)
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, path, told)


def put(name, value):
    return lambda arrays, told: arrays.update({name: value})


OFFSETS = np.array([0, 1, 3, 3, 7])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, told: None, None),
        (put("tokens.offsets", OFFSETS.astype(np.int32)), "tokens.offsets is int32 of shape (5,)"),
        (put("tokens.offsets", OFFSETS.astype(np.uint64)), "tokens.offsets is uint64"),
        (put("tokens.offsets", OFFSETS[None]), "tokens.offsets is int64 of shape (1, 5)"),
        (put("tokens.offsets", OFFSETS[:0]), "tokens.offsets is empty; one more than there are"),
        (put("tokens.offsets", OFFSETS[:-1]), "tokens.offsets do not rise from 0 to 7"),
        (put("tokens.offsets", OFFSETS + 1), "tokens.offsets do not rise from 0 to 7"),
        (put("tokens.offsets", np.array([0, 3, 1, 3, 7])), "tokens.offsets do not rise"),
        (put("tokens.offsets", np.array([0, 2**62, -(2**62), 3, 7])), "offsets do not rise"),
        (put("tokens.offsets", np.array([0, 2, 3, 3, 7])), "has 2, which is inside of a character"),
        (put("tokens.offsets", np.array([0, 7, 7, 7])), "3 tokens, but layer 0 has 4 keys"),
        (put("tokens.offsets", np.array([0])), "tokens.offsets do not rise from 0 to 7"),
        (put("tokens.bytes", np.zeros(7, np.int8)), "tokens.bytes is int8 of shape (7,); uint8"),
        (put("tokens.bytes", np.full(7, 255, np.uint8)), "tokens.bytes are no UTF-8 at byte 0"),
        (put("tokens.bytes", np.full(7, 0xC3, np.uint8)), "no UTF-8 at byte 0 (invalid continu"),
        (lambda arrays, told: arrays.pop("tokens.bytes"), "tokens.bytes is missing; uint8 of one"),
        (lambda arrays, told: arrays.pop("tokens.offsets"), "tokens.offsets is missing; int64 of"),
        (
            lambda arrays, told: told.update(tokens='["a", "b", "c", "d"]'),
            "tokens are in the header, and in arrays too",
        ),
        (
            lambda arrays, told: [arrays.pop(f"tokens.{x}") for x in ("bytes", "offsets")],
            "it has no tokens",
        ),
        (lambda arrays, told: told.pop("model"), "its header has no model"),
        (
            lambda arrays, told: arrays.update(
                zip(("query_tokens.bytes", "query_tokens.offsets"), _texts.arrays_of(["a"]))
            ),
            "1 query_tokens, but 4 queries",
        ),
        (put("others.0.tokens.bytes", np.zeros(1, np.uint8)), "'others.0.tokens.bytes' belongs to"),
    ],
)  # fmt: skip
def test_damaged_texts_are_a_recording_error(path, change, message):
    changed(path, change)
    if message is None:
        assert Recording.load(path).tokens == ("a", "é", "", "🙂")
        return
    for mapped in (True, False):
        with pytest.raises(regard.RecordingError) as caught:
            Recording.load(path, mapped=mapped)
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{path} is a damaged recording: ")


def test_no_texts_are_no_recording(path):
    def change(arrays, told):
        arrays["tokens.bytes"], arrays["tokens.offsets"] = _texts.arrays_of([])

    changed(path, change)
    with pytest.raises(regard.RecordingError, match="no tokens; at least one is needed"):
        Recording.load(path)


def test_a_small_recording_is_what_it_was(path):
    sample().save(path)
    assert json.loads(header_of(path)["__metadata__"]["tokens"]) == TOKENS
    assert header_of(path)["__metadata__"]["version"] == "1"
