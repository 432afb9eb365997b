"""Masks of transformers are read as what queries see, and are eager's to whoever uses one."""

import copy
import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import masking_utils as M

from regard.hf import _masks
from regard.hf._attention import visible_bools
from regard.hf._visible import UnreadableError, read

B, L = 3, 24
LEFT = torch.arange(L) >= torch.tensor([5, 2, 0])[:, None]
RIGHT = torch.arange(L) < torch.tensor([24, 9, 1])[:, None]
HOLES = LEFT & (torch.arange(L) % 7 != 3)
PADDINGS = {"none": None, "left": LEFT, "right": RIGHT, "holes": HOLES}
PLACES = torch.tensor([[*range(10), *range(5), *range(9)]] * B)
PACKED = M.find_packed_sequence_indices(PLACES)


def packed(function):
    """The function within each of the documents of ``PLACES``, as transformers 5.23 has it."""
    return M.and_masks(
        M.packed_sequence_mask_function(PACKED),
        lambda b, h, q, k: function(b, h, PLACES[b, q], PLACES[b, k]),
    )


BLOCKS = torch.full((B, L), -1)
BLOCKS[:, 3:7], BLOCKS[1:, 9:14], BLOCKS[2, 20:] = 0, 1, 2
FUNCTIONS = {
    "causal": M.causal_mask_function,
    "everything": M.bidirectional_mask_function,
    "window": M.sliding_window_causal_mask_function(4),
    "two-way window": M.sliding_window_bidirectional_mask_function(3),
    "chunks": M.chunked_causal_mask_function(5, torch.tensor([5, 2, 0])),
    "blocks": M.or_masks(M.causal_mask_function, M.blockwise_overlay(BLOCKS)),
    "packed": packed(M.causal_mask_function),
    "packed window": packed(M.sliding_window_causal_mask_function(4)),
    "prefix": M.or_masks(M.causal_mask_function, lambda b, h, q, k: k < 6),
}


def content(function, padding=None, queries=L, keys=L, start=0, first_key=0, **more):
    arguments = {"mask_function": function, "attention_mask": padding, **more}
    mask = _masks.mask_function(B, queries, keys, start, first_key, **arguments)
    eager = M.eager_mask(B, queries, keys, start, first_key, **arguments)
    return mask, eager


def shown(options, queries, keys):
    """The bools of some options, expanded."""
    bools = visible_bools(dict(options), torch.zeros(1, 1, queries, 1), keys)
    if bools is None:
        bools = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return bools.expand(B, 1, queries, keys)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_function_is_read_without_being_evaluated(name, padding, monkeypatch):
    monkeypatch.setattr(_masks, "SMALL", 0)
    monkeypatch.setattr(_masks.Content, "bools", None)  # nor scanned
    monkeypatch.setattr(_masks.Content, "_scanned", None)
    mask, eager = content(FUNCTIONS[name], PADDINGS[padding])
    options = mask.options()
    assert torch.equal(shown(options, L, L), eager == 0)
    if padding != "holes":
        assert "mask" not in options
    elif "mask" in options:
        assert options["mask"].shape == (B, 1, 1, L)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "packed" not in name])
@pytest.mark.parametrize("small", [0, 2**15])
def test_queries_behind_a_cache_see_what_they_see_in_eager(name, small, monkeypatch):
    monkeypatch.setattr(_masks, "SMALL", small)
    for queries, keys, start, first_key in ((3, 11, 10, 2), (1, L, L - 1, 0), (4, L, 5, 0)):
        mask, eager = content(FUNCTIONS[name], LEFT, queries, keys, start, first_key)
        options = mask.options()
        assert torch.equal(shown(options, queries, keys), eager == 0)
        assert options.get("query_start", keys - queries) == start - first_key


def test_plain_masks_are_known_without_looking():
    everything = torch.ones(B, L, dtype=torch.bool)
    for padding in (None, everything):
        assert content(M.causal_mask_function, padding)[0].options() == {"causal": True}
        assert content(M.bidirectional_mask_function, padding)[0].options() == {}
    static = content(M.causal_mask_function, everything, queries=4, start=6)[0]
    assert static.options() == {"causal": True, "query_start": 6}


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (k % 3 == 0) & (q >= k),
        lambda b, h, q, k: torch.where(q > 5, k <= q, k < 3),
        lambda b, h, q, k: (k == q) | (k == 0),
        lambda b, h, q, k: ~(k > q),
        lambda b, h, q, k: (k <= q) & (h >= 0),
    ],
)
def test_what_no_interval_says_is_evaluated(function, monkeypatch):
    batch, queries = torch.arange(B), torch.arange(L)
    with pytest.raises(UnreadableError):
        read(function, batch, queries, L, 0)
    for band in (7 * B * L, 2**22):
        monkeypatch.setattr(_masks, "SMALL", 0)
        monkeypatch.setattr(_masks, "BAND", band)
        mask, eager = content(function, use_vmap=True)
        assert torch.equal(shown(mask.options(), L, L), eager == 0)
    is_interval = bool((shown(mask.options(), L, L).sum(-1) == L).all())
    assert not is_interval


def test_a_union_within_packed_documents(monkeypatch):
    monkeypatch.setattr(_masks, "SMALL", 0)
    both = M.or_masks(M.causal_mask_function, M.sliding_window_causal_mask_function(4))
    function = packed(both)
    mask, eager = content(function)
    assert torch.equal(shown(mask.options(), L, L), eager == 0)


def test_tables_that_fall_are_evaluated(monkeypatch):
    monkeypatch.setattr(_masks, "SMALL", 0)
    falling = torch.cat([torch.arange(8, L), torch.arange(8)]).expand(B, L)
    for function in (
        lambda b, h, q, k: falling[b, k] < 6,
        lambda b, h, q, k: (falling[b, k] >= 3) | (k <= q),
        lambda b, h, q, k: (falling[b, k] <= falling[b, q]) & (k <= q),
    ):
        mask, eager = content(function)
        assert torch.equal(shown(mask.options(), L, L), eager == 0)


def test_a_function_of_all_queries_is_evaluated_one_by_one(monkeypatch):
    monkeypatch.setattr(_masks, "SMALL", 0)
    table = torch.arange(L).expand(B, L) - 9
    mask, eager = content(lambda b, h, q, k: (k <= q) & (table[b, q] > 0).any(), use_vmap=True)
    assert torch.equal(shown(mask.options(), L, L), eager == 0)


def test_what_is_written_into_a_mask_is_seen():
    least = torch.finfo(torch.float32).min

    def cut(mask):
        mask[:, :, :, :5] = least

    def view(mask):
        mask[:, 0, 3].fill_(0.0)

    def masked(mask):
        mask.masked_fill_(torch.eye(L, dtype=torch.bool), least)

    for write in (cut, masked, view):
        mask, eager = content(FUNCTIONS["causal"], LEFT)
        mask.options()
        write(mask)
        write(eager)
        assert torch.equal(mask + 0.0, eager)
        found = _masks.options_of(mask, L, L)
        assert torch.equal(shown(found, L, L), eager == 0)


def test_numbers_that_keys_are_compared_with():
    for bound in (7.0, float("inf"), float("-inf"), 7):
        mask, eager = content(lambda b, h, q, k, n=bound: k < n)
        found = read(lambda b, h, q, k, n=bound: k < n, torch.arange(B), torch.arange(L), L, 0)
        ends = tuple(x.expand(B, L) for x in (found.first, found.last))
        assert torch.equal(shown({"intervals": ends}, L, L), eager == 0)
        assert torch.equal(shown(mask.options(), L, L), eager == 0)
    with pytest.raises(UnreadableError):
        read(lambda b, h, q, k: k < 3.5, torch.arange(B), torch.arange(L), L, 0)


def test_a_mask_that_needs_vmap_is_evaluated_where_it_can_be():
    mask, eager = content(lambda b, h, q, k: (k <= q) & (h >= 0), use_vmap=True)
    assert torch.equal(mask == 0.0, eager == 0.0)
    mask, eager = content(lambda b, h, q, k: (k <= q) & (h >= 0), use_vmap=True)
    assert torch.equal(mask[:, 0, 3], eager[:, 0, 3])


def test_random_intervals_are_read_as_they_are():
    generator = torch.Generator().manual_seed(0)

    def drawn(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(60):
        window, shift, size = drawn(1, 9), drawn(-4, 5), drawn(1, 7)
        ids = torch.randint(-1, 3, (B, L), generator=generator).sort(-1)[0]
        parts = [
            lambda b, h, q, k, w=window: k > q - w,
            lambda b, h, q, k, s=shift: s + k <= q,
            lambda b, h, q, k, n=size: (k + n) // n == q // n,
            lambda b, h, q, k, ids=ids: ids[b, q] == ids[b, k],
            lambda b, h, q, k, w=window: abs(k - q) < w,
        ]
        chosen = [parts[drawn(0, len(parts))] for _ in range(2)]
        function = (M.and_masks, M.or_masks)[drawn(0, 2)](*chosen)
        evaluated = function(
            torch.arange(B)[:, None, None, None], torch.zeros(1, 1, 1, 1),
            torch.arange(L)[None, None, :, None], torch.arange(L)[None, None, None],
        ).expand(B, 1, L, L)  # fmt: skip
        try:
            found = read(function, torch.arange(B), torch.arange(L), L, 0)
        except UnreadableError:
            continue
        ends = tuple(x.expand(B, L) for x in (found.first, found.last))
        assert torch.equal(shown({"intervals": ends}, L, L), evaluated)


def test_a_mask_is_eagers_tensor_to_whoever_computes_with_it():
    mask, eager = content(FUNCTIONS["window"], LEFT)
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype, mask.device) == (eager.shape, eager.dtype, eager.device)
    for compute in (
        lambda x: x + 1.0,
        lambda x: torch.zeros(B, 2, L, L) + x,
        lambda x: x[:, 0, :3],
        lambda x: (x == 0).sum(),
        lambda x: x.to(torch.float64),
        lambda x: x.to(torch.bool),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.masked_fill(x < 0, -1.0),
        lambda x: x.expand(-1, 4, -1, -1).contiguous(),
        lambda x: x.clone().mul_(2.0),
    ):
        found = compute(mask)
        assert type(found) is torch.Tensor
        assert torch.equal(found, compute(eager))
    assert torch.equal(copy.deepcopy(mask), eager)
    assert torch.equal(pickle.loads(pickle.dumps(mask)), eager)
    assert "read" in repr(mask)


def test_the_first_keys_of_a_mask_are_a_mask():
    mask, eager = content(FUNCTIONS["blocks"], LEFT)
    for cut in (mask[:, :, :, :9], mask[..., :9], mask.detach()[:, :, :, :9].to(torch.float32)):
        assert type(cut) is _masks.Mask
        assert torch.equal(shown(cut.options(), L, 9), eager[..., :9] == 0)
        assert torch.equal(cut + 0.0, eager[..., :9])
    assert type(mask[:, :, 3:]) is torch.Tensor


def test_a_mask_of_one_query_is_that_of_them_all():
    mask, eager = content(M.causal_mask_function, LEFT, queries=1, start=9)
    options = _masks.options_of(mask, 5, L)
    assert torch.equal(shown(options, 5, L), (eager == 0).expand(B, 1, 5, L))


def test_a_mask_in_a_recorded_graph_reads_no_place():
    """Where the first query is may differ in another run of the graph."""
    padding = torch.arange(9)[None] >= 2

    def bools(place):
        evaluate = _masks.Evaluated(
            1, 1, 9, place, 0, M.causal_mask_function, padding, False, "cpu"
        )
        return _masks.Content(evaluate, padding).bools()

    graph = make_fx(bools)(torch.tensor(8))
    for place in (8, 3):
        seen = padding & (torch.arange(9) <= place)
        torch.testing.assert_close(graph(torch.tensor(place)), seen[None, None])


def test_there_is_no_mask_where_eager_has_none():
    two_way = M.bidirectional_mask_function
    for function, padding, allowed in (
        (two_way, None, True), (two_way, LEFT, True), (two_way, None, False),
        (two_way, torch.ones(B, L, dtype=torch.bool), True), (M.causal_mask_function, None, False),
    ):  # fmt: skip
        ours, eager = content(function, padding, allow_is_bidirectional_skip=allowed)
        assert (ours is None) == (eager is None)


def test_a_mask_knows_the_place_of_its_queries_when_it_was_made():
    place = torch.tensor(6)
    mask = _masks.mask_function(B, 4, L, place, 0, M.causal_mask_function)
    place += 4  # as a static cache does before attention is computed
    assert mask.options() == {"causal": True, "query_start": 6}


def test_masks_of_numbers():
    least = torch.finfo(torch.float32).min
    bools = torch.rand(B, 1, L, L) > 0.4
    assert torch.equal(_masks.options_of(bools, L, L)["mask"], bools)
    for hidden in (least, -torch.inf):
        numbers = torch.where(bools, 0.0, hidden)
        assert torch.equal(_masks.options_of(numbers, L, L)["mask"], bools)
        assert torch.equal(_masks.options_of(numbers[..., :9], L, 9)["mask"], bools[..., :9])
        numbers[0, 0, 0, 0] = 0.5  # the mask that was looked at has changed
        assert _masks.options_of(numbers, L, L)["bias"] is numbers
    assert _masks.options_of(bools[..., :1], L, L)["mask"].shape[-1] == 1
    with pytest.raises(TypeError, match="int64 reached attention"):
        _masks.options_of(bools.long(), L, L)
