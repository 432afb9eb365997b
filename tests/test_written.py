"""Weights never mix what their tensors hold with what they held: who wrote is told so."""

import copy
import pickle

import numpy as np
import pytest
import torch

import regard
from recordings import numbers
from regard import AttentionWeights
from regard.recording import Layer, Recording

QUESTIONS = {
    "row": lambda w: w[0, 5],
    "whole": np.asarray,
    "entropy": lambda w: w.entropy(),
    "lse": lambda w: w.lse,
    "topk": lambda w: w.topk(2),
    "pool": lambda w: w.pool((3, 3), rows=slice(2, 5)),
    "summary": lambda w: w.summary(),
    "copy": lambda w: w.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "a part": lambda w: w.matrix(1).part(slice(0, None, 2)).entropy(),
}


def tensors():
    """Of two batch elements, by the names of the arguments."""
    return {
        "query": torch.from_numpy(numbers(2, 2, 9, 8)),
        "key": torch.from_numpy(numbers(2, 1, 9, 8, seed=1)),
        "mask": torch.from_numpy(numbers(9, 9, seed=2)) < 1,
        "bias": torch.from_numpy(numbers(2, 9, 9, seed=3)),
        "sinks": torch.from_numpy(numbers(2, seed=4)),
        "key_lengths": torch.tensor([9, 7]),
        "query_start": torch.tensor([0, 1]),
        "segments": torch.arange(9) // 4,
        "intervals": torch.stack([torch.arange(9) - 5, torch.arange(9) + 5]),
    }


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_question_after_a_write_is_an_error_that_names_the_tensor_and_the_way_out(ask):
    q, k = (torch.from_numpy(numbers(2, 9, 8, seed=n)) for n in range(2))
    _, weights = regard.attention(q, k, k, return_weights=True)
    k.mul_(3)
    with pytest.raises(RuntimeError) as caught:
        QUESTIONS[ask](weights)
    assert str(caught.value) == (
        "weights: key was written to after they were made of it, and they are computed when asked "
        "for.\n  Ask before you write, or keep them: kept = weights.copy(), which has its own "
        "query and key."
    )


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("backend", ["kernel", "torch"])
def test_a_write_into_any_tensor_is_found_out(name, backend):
    given = tensors()
    query, key = given.pop("query"), given.pop("key")
    options = given | {"intervals": tuple(given["intervals"])}
    _, weights = regard.attention(query, key, key, **options, return_weights=True, backend=backend)
    weights[0, 1, 3]
    {"query": query, "key": key, **given}[name][..., -1:].zero_()
    with pytest.raises(RuntimeError, match=f"weights: {name} was written to"):
        weights[0, 1, 3]


def test_a_write_through_a_view_or_under_no_grad_is_found_out():
    base = torch.from_numpy(numbers(3, 2, 9, 8)).requires_grad_()
    for n, write in enumerate((lambda x: x[0, 1].fill_(0), lambda x: x.add_(1))):
        weights = AttentionWeights(base[n], base[n + 1])
        with torch.no_grad():
            write(base)
        with pytest.raises(RuntimeError, match="query was written to"):
            weights.entropy()


def test_a_part_taken_after_the_write_knows_of_it():
    q = torch.from_numpy(numbers(2, 9, 8))
    weights = AttentionWeights(q, q)
    q.zero_()
    for part in (weights.matrix(1), weights.part(slice(2, 5))):
        with pytest.raises(RuntimeError, match="query was written to"):
            part.received()


def test_what_was_written_before_does_not_matter():
    q = torch.from_numpy(numbers(2, 9, 8))
    q.mul_(2)
    weights = AttentionWeights(q, q)
    for found in (weights, pickle.loads(pickle.dumps(weights)), copy.deepcopy(weights)):
        assert torch.equal(found[0], weights[0])


def test_tensors_of_inference_mode_cannot_tell_and_give_weights():
    with torch.inference_mode():
        q = torch.from_numpy(numbers(2, 9, 8)) + 0
        weights = AttentionWeights(q, q)
        kept, expected = weights.copy(), AttentionWeights(q.clone(), q.clone()).entropy()
        q.zero_()
    assert torch.equal(kept.entropy(), expected)
    assert not torch.equal(weights.entropy(), expected)


class Named(torch.Tensor):
    """A subclass."""


def test_a_subclass_is_watched_as_any_tensor():
    q = torch.from_numpy(numbers(2, 9, 8)).as_subclass(Named)
    weights = AttentionWeights(q, q)
    weights[0, 3]
    q.zero_()
    with pytest.raises(RuntimeError, match="query was written to"):
        weights[0, 3]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_inside_a_transform_nothing_is_asked_of_weights(transform):
    def function(x):
        AttentionWeights(x, x, causal=True).entropy()
        return x.sum()

    with pytest.raises(regard.UnsupportedError, match="cannot become part of a graph or a trans"):
        transform(function)(torch.from_numpy(numbers(2, 9, 8)))


@pytest.mark.parametrize(
    ("library", "backend"),
    [("numpy", "kernel"), ("torch", "kernel"), ("torch", "torch"), ("numpy", "reference")],
)
def test_a_copy_has_arrays_of_its_own_and_keeps_what_is_known(library, backend):
    given = {name: x if library == "torch" else x.numpy() for name, x in tensors().items()}
    query, key = given.pop("query"), given.pop("key")
    options = given | {"intervals": tuple(given["intervals"])}
    _, weights = regard.attention(query, key, key, **options, return_weights=True, backend=backend)
    part = weights.matrix(1, 1).part(slice(1, None, 2))
    copies = weights.copy(), part.copy()
    expected = weights[...], part.entropy()
    for x in (query, key, *given.values()):
        x[...] = 1
    np.testing.assert_array_equal(copies[0][...], expected[0])
    np.testing.assert_array_equal(copies[1].entropy(), expected[1])
    assert copies[0].shape == weights.shape
    assert type(copies[0][0]) is type(query)


def test_a_copy_takes_no_more_than_its_originals():
    q, mask = numbers(4, 300, 8), np.broadcast_to(numbers(1, 300) < 1, (300, 300))
    for library in ("numpy", "torch"):
        x, m = (q, mask) if library == "numpy" else (torch.from_numpy(q), torch.tensor(mask[:1]))
        x, m = x[:1], m if library == "numpy" else m.expand(300, 300)
        call = AttentionWeights(x, x, mask=m).copy()._call
        held = call.mask if library == "numpy" else call.mask.numpy()
        assert held.strides[-2] == 0
        assert held.shape == (1, 1, 300, 300)
        assert not np.shares_memory(held, mask)


def test_weights_of_a_recording_whose_tensors_were_written_to_say_so():
    q = torch.from_numpy(numbers(2, 5, 8))
    recording = Recording(list("abcde"), [Layer(q, q, causal=True)])
    recording.weights[0][1][2]
    q.zero_()
    with pytest.raises(RuntimeError, match="query was written to"):
        recording.weights[0][1]
