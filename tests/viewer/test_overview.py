"""The map of one head against its definition, small and in rounds."""

import threading
import time

import numpy as np
import pytest
import torch

from recordings import numbers
from regard.recording import Layer, Recording
from regard.viewer import _collected, overview
from regard.viewer.overview import TILE, HeadMap

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, 0)},
    "padding": {"causal": True, "key_lengths": 700},
    "documents": {"segments": np.arange(1000) // 150, "causal": True},
    "sinks and bias": {"sinks": numbers(2, seed=4), "bias": numbers(2, 1000, 1000, seed=5)},
}


def made(Lq=1000, Lk=1000, library="numpy", **options):
    q, k = numbers(2, Lq, 8), numbers(1, Lk, 8, seed=1)
    if library == "torch":
        q, k = torch.from_numpy(q), torch.from_numpy(k)
    queries = None if Lq == Lk else [str(i) for i in range(Lq)]
    tokens = [str(j) for j in range(Lk)]
    return Recording(tokens, [Layer(q, k, **options)], query_tokens=queries)


def whole_logs(recording, head):
    """ln of every weight; NaN where the query does not see the key."""
    weights = recording.weights[0]
    visible = ~np.isnan(np.asarray(weights.pool(weights.shape[1:]))[head])
    with np.errstate(divide="ignore"):
        logs = np.log(np.asarray(weights, np.float64)[head])
    return np.where(visible, logs, np.nan)


def expected(logs, plane, level, row, column):
    """One tile: bins of ``2^level`` queries and keys each, as far as there are any."""
    side = 1 << level
    part = logs[row * TILE * side : (row + 1) * TILE * side]
    part = part[:, column * TILE * side : (column + 1) * TILE * side]
    room = [(0, -n % side) for n in part.shape]
    bins = np.pad(part, room, constant_values=np.nan)
    bins = bins.reshape(bins.shape[0] // side, side, bins.shape[1] // side, side)
    picture = np.fmax.reduce(np.fmax.reduce(bins, 1), 2)
    if plane == "mass":
        heights = np.pad(np.ones(len(part)), room[0]).reshape(-1, side).sum(1)
        mass = np.exp(np.nan_to_num(bins, nan=-np.inf)).sum((1, 3)) / heights[:, None]
        with np.errstate(divide="ignore"):
            picture = np.where(np.isnan(picture), np.nan, np.log(mass))
    out = np.full((TILE, TILE), np.nan)
    out[: picture.shape[0], : picture.shape[1]] = picture
    return out


def assert_tile(tile, logs, *where):
    exact = expected(logs, *where)
    np.testing.assert_array_equal(np.isnan(tile), np.isnan(exact))
    np.testing.assert_allclose(np.exp(tile), np.exp(exact), rtol=2e-5, atol=1e-9)


def finished(head):
    """The map after its last round."""
    head.tile("max", 9, 0, 0)
    while head.coverage < 1:
        time.sleep(0.01)
    return head


@pytest.fixture
def small_is_large(monkeypatch):
    """Matrices of these tests are read in rounds."""
    monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    monkeypatch.setattr(overview, "WORK_SLICE", 2**20)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("level", [0, 2, 3, 10])
def test_tiles_are_the_definition(options, level):
    recording = made(**options)
    logs = whole_logs(recording, 1)
    head = HeadMap(recording, 0, 1)
    for plane in ("max", "mass"):
        for row, column in {(0, 0), (1 if level < 3 else 0, 0)}:
            tile, coverage = head.tile(plane, level, row, column)
            assert coverage == 1
            assert tile.dtype == np.float32
            assert_tile(tile, logs, plane, level, row, column)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_after_its_last_round_a_collected_picture_is_the_definition(options, small_is_large):
    recording = made(**options)
    logs = whole_logs(recording, 1)
    head = finished(HeadMap(recording, 0, 1))
    for plane in ("max", "mass"):
        for level in (4, 5, 6, 8, 10):
            assert_tile(head.tile(plane, level, 0, 0)[0], logs, plane, level, 0, 0)


@pytest.mark.parametrize("plane", ["max", "mass"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_fine_tile_of_many_rows_is_read_in_rounds_and_says_how_far_it_is(
    options, plane, monkeypatch
):
    recording = made(**options)
    logs = whole_logs(recording, 1)
    head = HeadMap(recording, 0, 1)
    # The second tile is a part of one, with rows for only some of its bins and rounds.
    for rounds, level, row in ((4, 3, 0), (2, 1, 1)):
        rows = range(row * TILE << level, min(1000, (row + 1) * TILE << level))
        monkeypatch.setattr(overview, "TILE_WORK", -(-len(rows) * 1000 * 8 // rounds))
        order, seen = _collected.spread(rounds), np.full_like(logs, np.nan)
        for count in range(1, rounds + 1):
            tile, coverage = head.tile(plane, level, row, 0)
            part = slice(rows.start + order[count - 1], rows.stop, rounds)
            seen[part] = logs[part]
            done = sum(len(rows[start::rounds]) for start in order[:count])
            assert coverage == done / len(rows)
            np.testing.assert_array_equal(
                np.isnan(tile), np.isnan(expected(seen, plane, level, row, 0))
            )
        assert_tile(tile, logs, plane, level, row, 0)
        again, coverage = head.tile(plane, level, row, 0)  # is kept
        np.testing.assert_array_equal(again, tile)
        assert coverage == 1
    assert head.nbytes > 2 * tile.nbytes


def test_tiles_that_are_read_in_rounds_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(overview, "TILE_WORK", 1000)
    monkeypatch.setattr(overview, "SAMPLED_TILES", 2)
    head = HeadMap(made(), 0, 0)
    coverages = [head.tile("max", 1, 0, column)[1] for column in (0, 1, 0, 1, 0)]
    assert coverages == [0.5, 0.5, 1, 1, 1]
    head.tile("mass", 1, 0, 0)
    assert head.tile("max", 1, 0, 1)[1] == 0.5  # forgotten
    assert head.tile("max", 1, 0, 0)[1] == 0.5


@pytest.mark.parametrize("count", [1, 2, 32, 256])
def test_rows_that_were_read_are_few_slices(count):
    whole = _collected.Collected((3000, 3000), count, 1)
    for done in range(count + 1):
        whole._rounds, whole._done = [], done
        whole._first.set()
        parts = whole.parts_read(slice(0, 3000))
        assert len(parts) <= 1 + count.bit_length()
        rows = sorted(row for part in parts for row in range(3000)[part])
        assert rows == sorted(r for start in _collected.spread(count)[:done]
                              for r in range(start, 3000, count))  # fmt: skip


def test_the_first_round_of_a_larger_matrix_is_no_larger():
    for size in (2**14, 2**17, 2**20, 2**23):
        rounds = overview.samples_of(size, size, 64)
        rows = size // rounds
        assert rows * size * 64 <= overview.FIRST_ROUND or rows == overview.FEWEST_ROWS
        assert rounds == 32 or 2 * rows * size * 64 > overview.FIRST_ROUND
    assert overview.samples_of(100, 100, 64) == 1


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_more_queries_than_keys_and_fewer(library, small_is_large):
    for sizes in ((300, 77), (77, 300)):
        recording = made(*sizes, library=library)
        logs = whole_logs(recording, 0)
        head = finished(HeadMap(recording, 0, 0))
        for level in (0, 5, 6):
            assert_tile(head.tile("mass", level, 0, 0)[0], logs, "mass", level, 0, 0)


def test_a_picture_is_whole_after_the_first_round_and_says_what_it_has_read(
    small_is_large, monkeypatch
):
    monkeypatch.setattr(_collected, "IDLE_TIMEOUT_S", 0.0)  # rests after every round
    recording = made(causal=True)
    logs = whole_logs(recording, 0)
    head = HeadMap(recording, 0, 0)
    seen = [head.tile("max", 5, 0, 0)]
    while seen[-1][1] < 1:
        time.sleep(0.02)
        seen.append(head.tile("max", 5, 0, 0))
    first, coverage = seen[0]
    assert 0 < coverage < 0.5
    exact = expected(logs, "max", 5, 0, 0)
    diagonal = np.arange(1000 // 32)
    assert not np.isnan(first[diagonal[1:], diagonal[1:] - 1]).any()
    assert (np.nan_to_num(first, nan=-99) <= np.nan_to_num(exact, nan=-99) + 1e-4).all()
    assert [c for _, c in seen] == sorted(c for _, c in seen)
    assert_tile(seen[-1][0], logs, "max", 5, 0, 0)


@pytest.mark.parametrize("large", [False, True])
def test_rows_columns_and_links_are_those_of_the_matrix(large, monkeypatch):
    if large:
        monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    recording = made(causal=True, window=(200, 0))
    logs = whole_logs(recording, 1)
    head = HeadMap(recording, 0, 1)
    np.testing.assert_allclose(head.row(317), logs[317], rtol=1e-4)
    column, _ = head.column(64)
    if large:
        column, coverage = finished(head).column(64)
        assert coverage == 1
    np.testing.assert_allclose(column, logs[:, 64], rtol=1e-4)
    rows, columns = slice(300, 420), slice(250, 390)
    links, _ = head.links(5, rows, columns)
    part = logs[rows, columns]
    strongest = np.sort(part[~np.isnan(part)])[::-1][:5]
    np.testing.assert_allclose([ln for *_, ln in links], strongest, rtol=1e-4)
    assert all(logs[q, k] == pytest.approx(ln, rel=1e-4) for q, k, ln in links)


@pytest.mark.parametrize("large", [False, True])
def test_the_strongest_links_leave_the_first_key_out_unless_there_is_no_other(large, monkeypatch):
    if large:
        monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1000, 8)).astype(np.float32)
    q[..., 6], q[..., 7], k[..., 6], k[..., 7] = 0, 5, 0, 0
    k[0, 0, 7] = 5  # where the head rests
    q[0, 900, 6] = k[0, 100, 6] = 15  # a lone link over most of the text
    recording = Recording([str(i) for i in range(1000)], [Layer(q, k, causal=True)])
    head = HeadMap(recording, 0, 0)
    links, _ = (finished(head) if large else head).links(8)
    assert (900, 100) in [link[:2] for link in links]
    assert all(key for _, key, _ in links)
    alone = Recording(["a"], [Layer(q[:, :1], k[:, :1])])
    assert HeadMap(alone, 0, 0).links(3)[0] == [(0, 0, 0.0)]


@pytest.mark.parametrize("large", [False, True])
def test_the_strongest_links_leave_out_queries_of_few_keys(large, monkeypatch):
    if large:
        monkeypatch.setattr(overview, "DIRECT_WORK", 1000)
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1000, 8)).astype(np.float32)
    segments = np.arange(1000) // 500  # the eighth query of each sees 8 keys
    layer = Layer(q, k, causal=True, segments=segments)
    head = HeadMap(Recording([str(i) for i in range(1000)], [layer]), 0, 0)
    links, _ = (finished(head) if large else head).links(256)
    assert head.fewest == 8
    assert min(query % 500 for query, *_ in links) >= 7
    assert {query // 500 for query, *_ in links} == {0, 1}


@pytest.mark.parametrize(("tokens", "fewest"), [(1, 0), (2, 0), (3, 0), (6, 3), (40, 8)])
def test_in_a_short_text_few_keys_are_less_than_half_of_the_most(tokens, fewest):
    q = np.ones((1, tokens, 2), np.float32)
    texts = [str(i) for i in range(tokens)]
    causal = HeadMap(Recording(texts, [Layer(q, q, causal=True)]), 0, 0)
    assert causal.fewest == fewest
    assert causal.links(3)[0]
    assert HeadMap(Recording(texts, [Layer(q, q)]), 0, 0).fewest == 0


def test_a_worker_that_is_stopped_goes_on_when_it_is_asked_again(small_is_large):
    head = HeadMap(made(causal=True), 0, 0)
    head.tile("max", 5, 0, 0)
    head.stop()
    before = head.coverage
    assert finished(head).coverage == 1 >= before


def test_a_failure_of_the_worker_reaches_who_asks(small_is_large, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(overview, "bins", fail)
    head = HeadMap(made(), 0, 0)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            head.tile("max", 5, 0, 0)


def test_who_waits_for_the_first_round_is_let_go_when_the_map_is_stopped(
    small_is_large, monkeypatch
):
    head, stopped = HeadMap(made(), 0, 0), threading.Event()
    wait = lambda *_: stopped.wait() and False  # noqa: E731
    monkeypatch.setattr(_collected.Collected, "_read_round", wait)
    told = []
    asking = threading.Thread(target=lambda: told.append(head.tile("max", 5, 0, 0)), daemon=True)
    asking.start()
    while not head._collected._worker:
        time.sleep(0.01)
    stopped.set()
    head.stop()
    asking.join(10)
    assert told[0][1] == 0
    monkeypatch.undo()
    assert finished(head).coverage == 1


def test_links_of_a_large_head_leave_out_key_0_alone(small_is_large):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1000, 8)).astype(np.float32)
    q[..., 6:], k[..., 6:] = 0, 0
    q[0, :, 7], k[0, 0, 7] = 5, 5  # where the head rests
    q[0, 800, 6] = k[0, 5, 6] = 15
    tokens = [str(i) for i in range(1000)]
    head = finished(HeadMap(Recording(tokens, [Layer(q, k, causal=True)]), 0, 0))
    links, coverage = head.links(8)
    assert coverage == 1
    assert links[0][:2] == (800, 5)
    assert all(key for _, key, _ in links)


def test_links_of_a_very_large_head_are_of_the_rows_that_were_read(small_is_large, monkeypatch):
    monkeypatch.setattr(_collected, "IDLE_TIMEOUT_S", 0.0)  # rests after every round
    recording = made(causal=True)
    logs = whole_logs(recording, 0)
    head = HeadMap(recording, 0, 0)
    head.tile("max", 5, 0, 0)
    head.stop()
    head._collected._rounds.clear()
    read = sorted(q for p in head._collected.parts_read(slice(0, 1000)) for q in range(1000)[p])
    best, _ = head.links(20)
    monkeypatch.setattr(overview, "TILE_WORK", 0)
    found, coverage = head.links(20)
    assert coverage == len(read) / 1000 < 0.5
    assert len(found) == len(best) == 20
    side = 1 << head._collected.level
    for query, key, log in found:
        assert query in read
        rows = [q for q in read if q // side == query // side]
        columns = slice(max(1, key // side * side), (key // side + 1) * side)
        assert log == pytest.approx(np.nanmax(logs[rows, columns]), abs=1e-5)
        assert log == pytest.approx(logs[query, key], abs=1e-5)
    assert sum(log for *_, log in found) <= sum(log for *_, log in best) + 1e-4


def test_a_column_says_which_rows_it_has_read(small_is_large, monkeypatch):
    head = HeadMap(made(causal=True), 0, 0)
    parts = [slice(0, 1000, 32), slice(16, 1000, 32)]
    finished(head)
    monkeypatch.setattr(head._collected, "parts_read", lambda rows: parts)
    column, coverage = head.column(0)
    assert coverage == np.isfinite(column).mean() == sum(len(range(1000)[p]) for p in parts) / 1000
