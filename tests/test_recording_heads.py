"""recording.heads(): what every head does, by number, without a matrix of all weights."""

import numpy as np
import pytest
import torch

from recordings import TOKENS, layer, numbers
from regard.heads import HeadScores, head_scores
from regard.recording import Layer, Recording
from traced import peak_bytes


def test_means_are_those_of_the_whole_weights():
    recording = Recording(
        ["a", "b", "a", "b"],
        [layer(causal=True, number=5), layer(2, 1, number=9, head_numbers=(3, 7))],
    )
    found = recording.heads(receivers=3)
    assert isinstance(found, HeadScores)
    assert (found.queries, found.layers) == (4, (5, 9))
    assert found.head_numbers == ((0, 1, 2, 3), (3, 7))
    for at, weights in enumerate(recording.weights):
        whole = np.asarray(weights, np.float64)
        heads = len(whole)
        ahead = abs(np.arange(4)[:, None] - np.arange(4))
        expected = {
            "entropy": -(whole * np.log(np.where(whole, whole, 1))).sum(-1).mean(-1),
            "distance": (whole * ahead).sum(-1).mean(-1),
            "first": whole[:, 1:, 0].mean(-1),
            "previous": whole[:, [1, 2, 3], [0, 1, 2]].mean(-1),
        }
        for name in ("entropy", "distance", "first", "previous"):
            np.testing.assert_allclose(getattr(found, name)[at, :heads], expected[name], rtol=1e-5)
        order = np.argsort(-whole.mean(-2), -1)[:, :3]
        np.testing.assert_array_equal(found.receivers[at, :heads], order)
        received = np.take_along_axis(whole.mean(-2), order, -1)
        np.testing.assert_allclose(found.received[at, :heads], received, rtol=1e-5)
    assert np.isnan(found.entropy[1, 2:]).all()
    assert np.isnan(found.received[1, 2:]).all()
    assert (found.receivers[1, 2:] == -1).all()


def test_it_is_what_head_scores_gives():
    recording = Recording([str(n % 7) for n in range(300)], [layer(Lq=300, Lk=300, causal=True)])
    one, other = recording.heads(queries=100), head_scores(recording, 100)
    assert one.queries == other.queries <= 100
    for name in ("scores", "even", "overlap", "entropy", "distance", "receivers", "received"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_roles_are_found_by_number():
    previous = np.eye(4)[[0, 0, 1, 2]]
    first = np.eye(4)[[0, 0, 0, 0]]
    q = 50 * np.stack([previous, first]).astype(np.float32)
    k = np.broadcast_to(np.eye(4, dtype=np.float32), (2, 4, 4)).copy()
    found = Recording(TOKENS, [Layer(q, k, causal=True, number=4, head_numbers=(2, 6))]).heads()
    assert (found.role(4, 2), found.role(4, 6)) == ("previous token", "first token")
    assert found.role(-1, -1) == "first token"
    with pytest.raises(IndexError, match="layer 0 was not recorded; there are 4"):
        found.role(0, 2)
    with pytest.raises(IndexError, match="head 0 was not recorded; there are 2, 6"):
        found.role(4, 0)
    assert (found.receivers[0, 1, 0], found.received[0, 1, 0]) == (0, 1)


def test_a_table_has_a_line_for_each_head():
    recording = Recording(
        ["a", "\x1b[31m", "\u202eb", "a very long token"],
        [layer(causal=True, number=5, head_numbers=(0, 2, 4, 11)), layer()],
    )
    found = recording.heads()
    lines = found.table().splitlines()
    assert [line.split()[0] for line in lines] == [
        "head", "L5H0", "L5H2", "L5H4", "L5H11", "L1H0", "L1H1", "L1H2", "L1H3",
    ]  # fmt: skip
    assert "received most" in lines[0]
    names, *rows = recording.heads(receivers=0).table().splitlines()
    assert names == lines[0].removesuffix("  received most")
    assert all(line.startswith(row) and row == row.rstrip() for row, line in zip(rows, lines[1:]))
    assert f"{found.entropy[0, 3]:.3f}" in lines[4]
    assert "–" in lines[1]  # no token repeats: there is no induction
    assert "\x1b" not in found.table()
    assert "\u202e" not in found.table()
    assert repr(found) == f"HeadScores, heads: 8, means over queries: 4\n{found.table()}"
    many = Recording(TOKENS, [layer(number=n) for n in range(9)]).heads()
    assert len(repr(many).splitlines()) == 35
    assert repr(many).endswith("... and 4 more: print(scores.table())")
    assert len(many.table().splitlines()) == 37


def test_cross_attention_has_entropy_distance_and_receivers():
    recording = Recording(TOKENS, [layer(Lq=3)], query_tokens=["x", "y", "z"])
    found = recording.heads(receivers=99)
    whole = np.asarray(recording.weights[0])
    assert np.isnan(found.first).all()
    np.testing.assert_allclose(found.received[0].sum(-1), 1, rtol=1e-5)
    np.testing.assert_array_equal(found.receivers[0, :, 0], whole.mean(-2).argmax(-1))
    assert not {*found.roles[:-1]} & {found.role(0, head) for head in range(4)}


def test_tensors_are_scored_as_arrays_are():
    x = numbers(2, 4, 3)
    found = Recording(TOKENS, [Layer(torch.from_numpy(x), torch.from_numpy(x))]).heads()
    expected = Recording(TOKENS, [Layer(x, x)]).heads()
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=1e-6)
    assert isinstance(found.received, np.ndarray)


def test_memory_is_that_of_a_block():
    x = numbers(4, 3000, 8)
    recording = Recording([""] * 3000, [Layer(x, x, causal=True)])
    assert recording.heads(queries=3000).queries == 3000
    assert peak_bytes(lambda: recording.heads(queries=3000)) < 30e6  # all weights would take 144 MB


def test_what_cannot_be_scored_is_said():
    recording = Recording(TOKENS, [layer()])
    with pytest.raises(ValueError, match="queries is 0; at least 1"):
        recording.heads(queries=0)
    with pytest.raises(ValueError, match="receivers is -1; it must not be negative"):
        recording.heads(receivers=-1)
    assert recording.heads(receivers=0).receivers.shape == (1, 4, 0)
    nothing = Recording(TOKENS, [layer(Lq=0)])
    with pytest.raises(ValueError, match="no queries to score"):
        nothing.heads()
