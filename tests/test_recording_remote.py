"""Recordings at an address: only what is asked for is fetched, from a server of this machine."""

import copy
import pickle
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import regard
from range_server import Server
from recordings import assert_same, layer, numbers, sample
from regard._base.deferred import DeferredArray, fetched
from regard.heads import place_to_open
from regard.recording import Layer, Recording, _remote
from regard.viewer.answer import Answers
from traced import peak_bytes

pytest.importorskip("fsspec", reason="an extra")
pytest.importorskip("aiohttp", reason="an extra")


@pytest.fixture(scope="module")
def running():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server(running):
    running.requests, running.headers = [], []
    running.has_ranges, running.cut, running.etag, running.status = True, False, '"1"', 200
    return running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.safetensors"


def large(n=6000, D=16, **options):
    """Three layers of 4 query heads and 2 key heads; a head of keys is 384 kB."""
    layers = [
        Layer(
            numbers(4, n, D, seed=i), numbers(2, n, D, seed=i + 9), numbers(2, n, 3, seed=i + 5),
            causal=True, number=5 + i, **options,
        )
        for i in range(3)
    ]  # fmt: skip
    return Recording([f" to{i % 99}" for i in range(n)], layers, model="m")


HEAD = 6000 * 16 * 4


def test_what_is_at_an_address_is_loaded(server, path):
    expected = sample()
    found = Recording.load(server.serve(expected, path))
    assert_same(found, expected)
    for a, b in zip(found.layers, Recording.load(path).layers):
        assert type(a.query) is np.ndarray
        assert not a.query.flags.writeable
        assert a.nbytes == b.nbytes
        assert repr(a) == repr(b)
    np.testing.assert_array_equal(found.weights[1][:], expected.weights[1][:])


def test_a_bucket_of_s3_is_read_by_ranges(server, path, monkeypatch):
    pytest.importorskip("s3fs", reason="an extra of fsspec")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    expected = large()
    server.serve(expected, path)
    where = {"endpoint_url": server.address.rpartition("/")[0], "skip_instance_cache": True}
    found = Recording.load("s3://bucket/r.safetensors", storage_options=where)
    assert len(server.requests) == 2
    assert server.sent < 150_000
    np.testing.assert_array_equal(found.weights[6][2, 5000], expected.weights[6][2, 5000])
    assert len(server.data) / 5 > server.sent > HEAD
    with pytest.raises(regard.RecordingError, match="s3://bucket/none cannot be read"):
        Recording.load("s3://bucket/none", storage_options=where)


def test_opening_fetches_the_header_alone(server, path):
    found = Recording.load(server.serve(large(), path))
    assert len(server.data) > 4_000_000
    assert len(server.requests) == 2
    assert server.sent < 150_000  # 6,000 tokens are in it
    assert str(found) == str(large())
    assert (found.layers[2].heads, found.layers[2].key_heads, found.layers[2].query_start) == (
        4,
        2,
        0,
    )
    assert found.weights[5].shape == (4, 6000, 6000)
    assert found.weights[5].head(1).part(slice(3, 9)).shape == (6, 6000)
    assert found.layers[1].head(3).nbytes == 2 * HEAD + 6000 * 12
    assert server.sent == 0


def test_a_row_fetches_the_keys_of_one_head_once(server, path):
    made = large()
    found = Recording.load(server.serve(made, path))
    server.sent  # noqa: B018
    np.testing.assert_array_equal(found.weights[5][3, 17], made.weights[5][3, 17])
    first = server.sent
    assert HEAD < first <= HEAD + _remote.BLOCK_BYTES
    np.testing.assert_array_equal(found.weights[5][3, 40], made.weights[5][3, 40])
    np.testing.assert_array_equal(found.weights[5][2, 17], made.weights[5][2, 17])  # same keys
    assert server.sent <= _remote.BLOCK_BYTES
    np.testing.assert_array_equal(
        found.weights[5].head(3).part(slice(5990, 6000))[...],
        made.weights[5].head(3).part(slice(5990, 6000))[...],
    )
    assert server.sent <= _remote.BLOCK_BYTES


def answers(recording, number):
    """Whatever is asked of a layer's weights, by all ways to the arrays."""
    weights = recording.weights[number]
    one = weights.head(1)
    yield from (weights[1, 3], weights[..., 2:9, ::2], weights[::-1, 5], one[4, 2])
    yield from (one.entropy(), one.lse, *one.statistics, one.max_score, one.distance())
    yield from weights.summary(topk=2, strongest=3, pool=(3, 3))[:4]
    yield from (weights.topk(2).values, weights.strongest(3).weight, weights.received())
    yield from (one.pool((4, 4)), one.part(slice(1, 9, 3), slice(2, 9, 2))[...])
    yield from (weights @ np.ones((12, 2)), one.T @ np.ones(12), one.at([3, 4], [1, 2]))
    yield from (one.mass([0, 3]), one.blocks(np.arange(12) // 3, np.arange(12) // 4))
    yield from (
        weights.mix()[...],
        weights.mix([0, 1], [0.5, 2])[3],
        weights.mix().pool((3, 3)),
    )
    yield regard.divergence(weights.head(0), one)
    yield regard.compare(weights.head(0), one)[...]
    yield regard.divergence(one, regard.AttentionWeights(numbers(12, 6), numbers(12, 6)))
    yield from (
        weights.copy()[2],
        one.copy()[...],
        weights.layer().key,
        one.part(slice(3, 6)).copy()[...],
    )
    yield recording.effects(number, 2)[...]
    yield recording.effects(number, kind="contribution").received()
    yield recording.steps(number, 1).output
    yield recording.in_words().weights[number].head(2)[...]
    yield recording.heads().entropy
    yield recording.heads().scores
    layer = recording.layers[-1]
    yield from (layer.query, layer.key, layer.value, layer.gradient, layer.head(2).key)
    yield from (layer.head(3).query * 2, np.concatenate([layer.key, layer.value], -1))
    if number == 0:
        yield regard.rollout(recording)[3]
        yield regard.rollout(recording)[:, 2]


@pytest.mark.parametrize(
    ("dtype", "statistics"),
    [(np.float64, False), (ml_dtypes.bfloat16, True)],
)
def test_every_answer_is_that_of_the_file(server, path, dtype, statistics):
    words = [" a", "b", " c", "d", "e", " f", ".", " g", "h", "i", " j", "k"]
    layers = [
        Layer(
            numbers(4, 12, 6, dtype=dtype, seed=n), numbers(2, 12, 6, dtype=dtype, seed=n + 3),
            numbers(2, 12, 3, dtype=dtype, seed=n + 6), causal=True,
            gradient=numbers(4, 12, 3, dtype=dtype, seed=n + 9),
        )
        for n in range(2)
    ]  # fmt: skip
    address = server.serve(Recording(words, layers), path, statistics=statistics)
    for n in range(2):
        pairs = zip(
            answers(Recording.load(address), n), answers(Recording.load(path), n), strict=True
        )
        for a, b in pairs:
            assert not isinstance(a, DeferredArray)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_every_backend_gets_the_numbers(server, path, backend, monkeypatch):
    from regard._weights import attention_weights

    made = Recording(list("abcdef"), [layer(4, 2, 6, 6, causal=True)])
    found = Recording.load(server.serve(made, path))
    plain = attention_weights.choose
    monkeypatch.setattr(attention_weights, "choose", lambda call, _: plain(call, backend))
    weights, expected = found.weights[0], made.weights[0]
    assert weights._statistics.backend.name == backend
    for a, b in (
        (weights[...], expected[...]),
        (weights.head(2)[1:3], expected.head(2)[1:3]),
        (weights.topk(2).values, expected.topk(2).values),
        (weights.at([1], [0]), expected.at([1], [0])),
        (weights.pool((2, 2)), expected.pool((2, 2))),
        (weights @ np.ones(6), expected @ np.ones(6)),
        (weights.mix()[2], expected.mix()[2]),
    ):
        np.testing.assert_array_equal(a, b)


def test_groups_long_texts_masks_and_all_options(server, path):
    n = 20_000
    x = numbers(1, n, 2, dtype=np.float16)
    text = Recording([f" é{i % 9}" for i in range(n)], [Layer(x, x, causal=True)], group="text")
    whole = Recording(
        text.tokens, text.layers, group="text", others={"small": sample()}, boundary=3
    )
    found = Recording.load(server.serve(whole, path))
    assert server.sent < 20_000
    assert_same(found.groups["small"], whole.groups["small"])
    server.sent  # noqa: B018
    assert found.tokens == text.tokens
    assert server.sent < n * 14
    assert found.query_tokens is found.tokens
    assert_same(found, whole)


def test_all_of_it_at_once(server, path):
    made = large(300)
    found = Recording.load(server.serve(made, path), mapped=False)
    assert server.sent == len(server.data)
    assert_same(found, made)
    assert server.sent == 0
    assert type(found.layers[0]._query) is np.ndarray


def test_copies_and_files_have_the_numbers(server, path, tmp_path):
    made = large(300)
    for again in (copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))):
        copied = again(Recording.load(server.serve(made, path)))
        server.status = 500
        assert_same(copied, made)
        np.testing.assert_array_equal(copied.weights[6][1, 5], made.weights[6][1, 5])
        server.status = 200
    Recording.load(server.address).save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == server.data


def test_several_threads_fetch_each_block_once(server, path):
    made = large()
    found = Recording.load(server.serve(made, path))
    server.sent  # noqa: B018
    rows = [None] * 8

    def ask(n):
        rows[n] = found.weights[5].head(n % 4)[17 + n]

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.sent <= 2 * HEAD + 4 * _remote.BLOCK_BYTES
    for n, row in enumerate(rows):
        np.testing.assert_array_equal(row, made.weights[5].head(n % 4)[17 + n])


def test_what_is_kept_is_bounded(server, path, monkeypatch):
    monkeypatch.setattr(_remote, "CACHE_BYTES", 3 * HEAD)
    made = large()
    found = Recording.load(server.serve(made, path))
    rows = {}
    for number in (5, 6, 7, 5):
        for h in range(4):
            rows[number, h] = found.weights[number][h, 17]
            kept = sum(head.nbytes for head in found._file._kept.values())
            assert kept <= 4 * HEAD
    for (number, h), row in rows.items():
        np.testing.assert_array_equal(row, made.weights[number][h, 17])
    for a, b in zip(found.layers, made.layers):
        np.testing.assert_array_equal(a.query, b.query)


def test_a_mix_of_layers_has_the_heads_in_memory_that_it_is_at(server, path, monkeypatch):
    monkeypatch.setattr(_remote, "CACHE_BYTES", 0)
    found = Recording.load(server.serve(large(), path))
    mix = regard.mix([found.weights[number] for number in (5, 6, 7)])
    mix.received()  # and the statistics, of all heads of a layer at once
    assert peak_bytes(mix.received) < 12 * HEAD  # query and key of one of 4 heads, of 3 layers


# What can go wrong.


def refusal(address, **options):
    with pytest.raises(regard.RecordingError) as caught:
        Recording.load(address, **options)
    assert address in str(caught.value)
    return str(caught.value)


def test_an_address_without_a_recording_says_what_is_there(server):
    server.data = b"short"
    assert "it has 5 bytes" in refusal(server.address)
    server.data = b"PK\x03\x04" + b"\xff" * 100
    assert "a zip archive" in refusal(server.address)
    server.data = (2).to_bytes(8, "little") + b"{}"
    assert "its format is None" in refusal(server.address)
    server.data = b""
    assert "0 bytes" in refusal(server.address)


def test_a_damaged_recording_is_said(server, path):
    address = server.serve(sample(), path)
    server.data = server.data[:-1]
    assert "truncated recording" in refusal(address)
    server.data = path.read_bytes().replace(b'"causal\\"', b'"cassal\\"')
    assert "is a damaged recording: layer 0 has options" in refusal(address)


def test_damaged_texts_are_said_when_they_are_read(server, path):
    x = numbers(1, 20_000, 1)
    address = server.serve(Recording([" abc"] * 20_000, [Layer(x, x)]), path)
    server.data = server.data[:-1] + b"\xff"
    found = Recording.load(address)
    with pytest.raises(regard.RecordingError, match=r"tokens\.bytes are no UTF-8") as caught:
        found.tokens  # noqa: B018
    assert str(caught.value).startswith(f"{address} is a damaged recording: ")


@pytest.mark.parametrize("status", [404, 403, 500])
def test_an_address_that_cannot_be_read_says_why(server, status):
    server.data, server.status = b"x", status
    assert f"cannot be read (HTTP {status}" in refusal(server.address)


def test_a_server_that_is_not_there_is_said():
    with Server() as gone:
        pass
    assert "cannot be read (" in refusal(gone.address)
    assert "Check the address, the connection" in refusal(gone.address)


def test_a_server_without_ranges_is_said_at_once(server, path):
    address = server.serve(large(), path)
    server.has_ranges = False
    assert "sends whole files only" in refusal(address)
    assert "Download it" in refusal(address)


@pytest.mark.parametrize("change", ["etag", "size"])
def test_a_file_that_changes_meanwhile_is_said(server, path, change):
    found = Recording.load(server.serve(large(), path))
    if change == "etag":
        server.etag = '"2"'
    else:
        server.data += b"more"
        server.etag = ""
    with pytest.raises(regard.RecordingError, match="was changed while it was open") as caught:
        found.weights[5][3, 17]
    assert server.address in str(caught.value)
    with pytest.raises(regard.RecordingError, match="Load it again"):
        found.layers[0].query  # noqa: B018


def test_a_connection_that_is_lost_is_said_and_taken_up_again(server, path):
    made = large()
    found = Recording.load(server.serve(made, path))
    server.cut = True
    with pytest.raises(regard.RecordingError, match=r"could not be fetched .*; ask again"):
        found.weights[5][3, 17]
    server.cut = False
    server.status = 503
    with pytest.raises(regard.RecordingError, match=r"HTTP 503"):
        found.weights[5][3, 17]
    server.status = 200
    np.testing.assert_array_equal(found.weights[5][3, 17], made.weights[5][3, 17])


def test_other_addresses(path):
    import fsspec

    made = sample()
    made.save(path)
    assert_same(Recording.load(path.as_uri()), made)
    with fsspec.open("memory://a/r.safetensors", "wb") as file:
        file.write(path.read_bytes())
    assert_same(Recording.load("memory://a/r.safetensors"), made)
    assert "cannot be read (" in refusal("memory://a/none.safetensors")
    assert "is a folder" in refusal("memory://a")
    assert "another address that fsspec reads, or download" in refusal("nonsense://a/b")
    with pytest.raises(TypeError, match="storage_options are of an address"):
        Recording.load(path, storage_options={})
    with pytest.raises(FileNotFoundError, match="no such file"):
        Recording.load("no such://file")


def test_storage_options_are_those_of_the_file_system(server, path):
    address = server.serve(sample(), path)
    assert_same(Recording.load(address, storage_options={"headers": {"X-A": "1"}}), sample())
    assert {headers["X-A"] for headers in server.headers} == {"1"}
    assert {headers["Accept-Encoding"] for headers in server.headers} == {"identity"}


def test_what_cannot_be_read_says_how_to_give_a_password(server, monkeypatch):
    server.data, server.status = b"x", 401
    needed = r"in Python: Recording.load(address, storage_options={...}), with what fsspec takes"
    assert needed in refusal(server.address)
    for wrong in ("anon", [("anon", True)]):
        with pytest.raises(TypeError, match=r"storage_options is a .*; a dict is needed"):
            Recording.load(server.address, storage_options=wrong)
    with pytest.raises(regard.RecordingError, match=r"cannot be read \(TypeError"):
        Recording.load(server.address, storage_options={"headers": 3})

    def unreachable(*_, **__):
        raise ConnectionError("no such host")

    monkeypatch.setattr("fsspec.core.url_to_fs", unreachable)  # as that of github:// connects
    assert "cannot be read (ConnectionError: no such host)" in refusal("github://a:b@c/d")


def test_an_address_whose_package_is_missing_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ModuleNotFoundError, match=r"gs://a/b needs a package.*gcsfs"):
        Recording.load("gs://a/b")


# What reads recordings.


def test_the_viewer_shows_it(server, path):
    server.serve(large(300), path, statistics=True)
    here, there = (Answers([Recording.load(x)]) for x in (path, server.address))
    opening = server.sent
    assert opening < 15_000
    for name, query in (
        ("about", ""), ("tokens", "side=key"), ("row", "layer=1&head=2&query=17"),
        ("tile", "layer=1&head=2&level=0&row=0&column=0&plane=max"), ("heads", "layer=0"),
        ("links", "layer=1&head=2&n=5"), ("sums", "layer=2&head=0"), ("roles", ""),
        ("column", "layer=1&head=2&key=3"), ("row", "layer=1&head=2&query=17&first=hidden"),
        ("steps", "layer=0&head=1&queries=3,5&keys=2,4"),
    ):  # fmt: skip
        one, other = (answers.answer(name, query) for answers in (here, there))
        assert one.status == 200, one.body
        assert (one.status, one.body) == (other.status, other.body), name
    for answers in (here, there):
        answers.close()


def test_the_head_to_open_is_the_first(server, path):
    found = Recording.load(server.serve(large(), path))
    server.sent  # noqa: B018
    assert place_to_open(found) == (5, 0)
    assert place_to_open(found, [(6, 3), (7, 1)]) == (6, 3)
    assert server.sent == 0


# The arrays.


class Numbers:
    """A source that counts what is read."""

    def __init__(self, x):
        self.x, self.asked = x, []

    def read(self, heads, rows):
        self.asked.append((heads, rows))
        return self.x[heads.start : heads.stop : heads.step, rows.start : rows.stop : rows.step]


def test_a_part_of_a_deferred_array_is_that_of_the_numbers():
    x = numbers(5, 30, 4)
    source = Numbers(x)
    whole = DeferredArray.of(source, x.shape, x.dtype)
    assert np.isnan(whole.view(np.ndarray)).all()
    cuts = (
        np.s_[:], np.s_[2:3], np.s_[1:5:2, 3:20:4], np.s_[None, :, 29:], np.s_[None, 4:, 7:8],
        np.s_[0], np.s_[3, 5:9], np.s_[3, 5], np.s_[:, 3:3], np.s_[None, None, 1:2],
    )  # fmt: skip
    for cut in cuts:
        np.testing.assert_array_equal(fetched(whole[cut]), x[cut])
    assert source.asked[1] == (range(2, 3), range(30))
    for function in (np.sum, np.square, lambda x: x @ x.swapaxes(1, 2), lambda x: 2 * x.copy()):
        np.testing.assert_array_equal(function(whole), function(x))
    np.testing.assert_array_equal(whole.astype(np.float64), x.astype(np.float64))
    assert (whole.shape, whole.dtype, whole.nbytes) == (x.shape, x.dtype, x.nbytes)
    table = DeferredArray.of(Numbers(x[..., 0]), (5, 30), x.dtype)
    np.testing.assert_array_equal(fetched(table[None][0:1, 2:4, 5:9]), x[None, 2:4, 5:9, 0])


def test_what_was_copied_before_it_was_fetched_is_never_taken_for_numbers():
    whole = DeferredArray.of(Numbers(numbers(2, 9, 4)), (2, 9, 4), np.float32)
    table = DeferredArray.of(Numbers(numbers(2, 9)), (2, 9), np.float32)
    with pytest.raises(RuntimeError, match="was copied or reshaped before"):
        fetched(np.ndarray.copy(table))
    with pytest.raises(RuntimeError, match="was copied or reshaped before"):
        fetched(whole[:, ::-1])
    with pytest.raises(RuntimeError, match="was copied or reshaped before"):
        fetched(whole[..., :2])
    taken = whole[[0, 1]]
    with pytest.raises(RuntimeError, match="was copied or reshaped before"):
        fetched(taken)
    assert np.isnan(np.asarray(taken)).all()
