import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.nn import MultiHeadAttention


def plain(layer, x, visible=None):
    """The layer by its formula, on the whole matrix: self-attention of (B, L, embed_dim)."""
    H, Hkv, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
    rows = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    q, k, v = (
        part.reshape(*x.shape[:2], -1, D).transpose(1, 2)
        for part in rows.split([H * D, Hkv * D, Hkv * D], -1)
    )
    if layer.rope is not None:
        q, k = turned(q, layer.rope), turned(k, layer.rope)
    k, v = (z.repeat_interleave(H // Hkv, 1) for z in (k, v))
    scores = q @ k.mT / D**0.5
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    i, j = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    if layer.causal:
        seen &= j <= i
    left, right = layer.window or (None, None)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    if visible is not None:
        seen = seen & visible
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(-2)), weights


def turned(x, base):
    """Rotary positions in complex numbers: z · e^(i p θ)."""
    D = x.shape[-1]
    z = torch.complex(x[..., : D // 2], x[..., D // 2 :])
    angle = torch.arange(x.shape[-2])[:, None] / base ** (torch.arange(0, D, 2).double() / D)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


OPTIONS = [
    {},
    {"causal": True},
    {"num_kv_heads": 2},
    {"num_kv_heads": 1, "head_dim": 6, "bias": False},
    {"window": (2, 3)},
    {"causal": True, "window": (3, 0), "softcap": 2.0},
    {"causal": True, "rope": 100.0, "num_kv_heads": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_layer_is_its_formula(options):
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, **options, dtype=torch.float64)
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    output, weights = layer(x, return_weights=True)
    needed, whole = plain(layer, x)
    torch.testing.assert_close(output, needed, rtol=0, atol=1e-13)
    torch.testing.assert_close(weights[:], whole, rtol=0, atol=1e-13)


@settings(max_examples=20)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    length=st.integers(1, 12),
    causal=st.booleans(),
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    rope=st.sampled_from([None, 50.0]),
)
def test_padding_is_as_if_it_were_not_there(heads, length, causal, lengths, rope):
    layer = MultiHeadAttention(8 * heads[0], *heads, causal=causal, rope=rope)
    x = torch.randn(2, length, layer.embed_dim)
    lengths = [min(n, length) for n in lengths]
    for b, n in enumerate(lengths):
        x[b, n:] = torch.nan
    output = layer(x, key_lengths=torch.tensor(lengths))
    for b, n in enumerate(lengths):
        torch.testing.assert_close(output[b, :n], layer(x[b, :n]), rtol=0, atol=1e-6)


def test_the_weights_sum_to_one_and_give_the_output():
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, causal=True)
    x = torch.randn(2, 9, 16)
    output, weights = layer(x, return_weights=True)
    assert weights.shape == (2, 4, 9, 9)
    torch.testing.assert_close(weights[:].sum(-1), torch.ones(2, 4, 9), rtol=0, atol=1e-6)
    value = F.linear(x, layer.in_proj_weight[24:], layer.in_proj_bias[24:])
    value = value.reshape(2, 9, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
    heads = weights[:] @ value
    needed = layer.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(output, needed, rtol=0, atol=1e-6)


def test_all_leading_axes_are_a_batch():
    layer = MultiHeadAttention(8, 2, causal=True, rope=10.0)
    x = torch.randn(2, 3, 5, 8)
    output, weights = layer(x, return_weights=True)
    assert weights.shape == (2, 3, 2, 5, 5)
    torch.testing.assert_close(output[1, 2], layer(x[1, 2]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 6}, {"kdim": 6, "vdim": 4}], ids=str)
def test_context_and_value_give_keys_and_values(sizes):
    layer = MultiHeadAttention(8, 2, num_kv_heads=1, **sizes, dtype=torch.float64)
    x, context, value = (
        torch.randn(2, n, size, dtype=torch.float64)
        for n, size in ((3, 8), (5, layer.kdim), (5, layer.vdim))
    )
    rows = [8, 4, 4]
    if layer.in_proj_weight is None:
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        assert [tuple(w.shape) for w in weights] == [(8, 8), (4, layer.kdim), (4, layer.vdim)]
    else:
        weights = layer.in_proj_weight.split(rows)
    inputs = x, context, value
    biases = layer.in_proj_bias.split(rows)
    q, k, v = (F.linear(z, w, b) for z, w, b in zip(inputs, weights, biases))
    q = q.reshape(2, 3, 2, 4).transpose(1, 2)
    heads = (q @ k[:, None].mT / 2).softmax(-1) @ v[:, None]
    needed = layer.out_proj(heads.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(layer(x, context, value=value), needed, rtol=0, atol=1e-13)
    if layer.kdim == layer.vdim:
        torch.testing.assert_close(layer(x, context), layer(x, context, value=context))


def test_value_alone_leaves_the_keys_to_x():
    layer = MultiHeadAttention(8, 2)
    x, value = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x, value=value), layer(x, x, value=value))


def test_queries_of_a_causal_layer_stand_at_the_end_of_the_context():
    layer = MultiHeadAttention(8, 2, causal=True)
    x = torch.randn(2, 6, 8)
    torch.testing.assert_close(layer(x[:, 4:], x), layer(x)[:, 4:], rtol=0, atol=1e-6)


def test_mask_bias_and_segments_pass_through():
    layer = MultiHeadAttention(8, 2, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5) < 0.6
    mask |= torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(layer(x, mask=mask), plain(layer, x, mask)[0])
    hidden = torch.zeros(2, 1, 5, 5, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(layer(x, bias=hidden), plain(layer, x, mask)[0])
    ids = torch.tensor([0, 0, 1, 1, 1])
    same = ids[:, None] == ids
    torch.testing.assert_close(layer(x, segments=ids.expand(2, 5)), plain(layer, x, same)[0])


def test_a_token_that_sees_nothing_gives_the_bias_of_the_output():
    layer = MultiHeadAttention(8, 2)
    torch.nn.init.normal_(layer.out_proj.bias)
    output = layer(torch.randn(2, 3, 8), key_lengths=torch.tensor([0, 3]))
    assert torch.equal(output[0], layer.out_proj.bias.expand(3, 8))


@pytest.mark.parametrize("kdim", [None, 6])
def test_gradients_reach_every_parameter(kdim):
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, kdim=kdim, causal=True, softcap=5.0)
    context = None if kdim is None else torch.randn(2, 7, 6)
    value = None if kdim is None else torch.randn(2, 7, 8)
    layer(torch.randn(2, 5, 8), context, value=value).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_window_longer_than_the_text_changes_nothing():
    torch.manual_seed(0)
    windowed = MultiHeadAttention(8, 2, causal=True, window=(127, 0), bias=False, rope=10000.0)
    whole = MultiHeadAttention(8, 2, causal=True, bias=False, rope=10000.0)
    whole.load_state_dict(windowed.state_dict())
    x = torch.randn(1, 20, 8)
    torch.testing.assert_close(windowed(x), whole(x), rtol=0, atol=1e-6)


def test_rotary_outputs_do_not_depend_on_where_the_text_starts():
    # Angles in float32 alone would be wrong by 0.06 at place 1,000,000.
    from regard._base.rotary import rotate

    q, k = torch.randn(5, 16), torch.randn(5, 16)
    near = rotate(q, 0, 10000.0) @ rotate(k, 0, 10000.0).mT
    far = rotate(q, 1_000_000, 10000.0) @ rotate(k, 1_000_000, 10000.0).mT
    torch.testing.assert_close(near, far, rtol=0, atol=1e-5)


def test_dropout_works_in_training_alone_and_by_torchs_seed():
    layer = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(2, 9, 8)

    def run(seed):
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    layer.eval()
    undropped = MultiHeadAttention(8, 2)
    undropped.load_state_dict(layer.state_dict())
    assert torch.equal(run(1), undropped(x))


def test_residual_dropout_drops_output_numbers_in_training_alone():
    layer = MultiHeadAttention(8, 2, residual_dropout=0.25)
    x = torch.randn(2, 50, 8)
    dropped = layer(x)
    share = (dropped == 0).float().mean()
    assert 0.1 < share < 0.4
    whole = layer.eval()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)


def test_the_weights_given_back_are_those_before_dropout():
    layer = MultiHeadAttention(8, 2, dropout=0.5)
    _, weights = layer(torch.randn(1, 6, 8), return_weights=True)
    torch.testing.assert_close(weights[:].sum(-1), torch.ones(1, 2, 6))


def test_bfloat16_gives_the_float32_output_to_its_own_precision():
    layer = MultiHeadAttention(16, 4, num_kv_heads=2, causal=True, rope=100.0)
    x = torch.randn(2, 9, 16)
    needed = layer(x)
    output = layer.to(torch.bfloat16)(x.bfloat16())
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), needed, rtol=0.05, atol=0.05)


def test_autocast_computes_in_bfloat16():
    layer = MultiHeadAttention(16, 4, causal=True, rope=100.0)
    x = torch.randn(2, 9, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), rtol=0.05, atol=0.05)


def test_the_layer_compiles_into_one_graph():
    layer = MultiHeadAttention(8, 2, causal=True, window=(3, 0), rope=100.0, dropout=0.1).eval()
    x = torch.randn(1, 6, 8)
    # aot_eager traces forward and backward as inductor does, and needs no C++ compiler.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-6)
    compiled(x).sum().backward()
    assert layer.in_proj_weight.grad.any()
    layer.train()
    assert compiled(x).shape == x.shape


def test_a_state_dict_goes_there_and_back():
    torch.manual_seed(0)
    options = {"num_kv_heads": 2, "kdim": 6, "vdim": 6}
    first, second = (MultiHeadAttention(16, 4, **options) for _ in range(2))
    assert list(first.state_dict()) == [
        "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias",
        "out_proj.weight", "out_proj.bias",
    ]  # fmt: skip
    assert list(MultiHeadAttention(16, 4, bias=False).state_dict()) == [
        "in_proj_weight", "out_proj.weight",
    ]  # fmt: skip
    x, context = torch.randn(1, 3, 16), torch.randn(1, 5, 6)
    assert not torch.equal(first(x, context), second(x, context))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x, context), second(x, context))


@pytest.mark.parametrize("sizes", [{}, {"kdim": 6, "vdim": 4}, {"bias": False}], ids=str)
def test_the_same_seed_starts_where_torchs_layer_starts(sizes):
    torch.manual_seed(5)
    torchs = torch.nn.MultiheadAttention(16, 4, **sizes).state_dict()
    torch.manual_seed(5)
    layer = MultiHeadAttention(16, 4, **sizes)
    mine = layer.state_dict()
    assert mine.keys() == torchs.keys()
    assert all(torch.equal(mine[name], torchs[name]) for name in torchs)
    before = {name: x.clone() for name, x in mine.items()}
    torch.manual_seed(5)
    layer.reset_parameters()
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


def test_the_layer_shows_what_is_not_the_default():
    assert MultiHeadAttention(8, 2).extra_repr() == "8, 2"
    layer = MultiHeadAttention(
        8, 4, 2, 6, 5, 7, False, True, (3, 0), 2.0, 100.0, dropout=0.1, residual_dropout=0.2
    )
    assert layer.extra_repr() == (
        "8, 4, num_kv_heads=2, head_dim=6, kdim=5, vdim=7, bias=False, causal=True, "
        "window=(3, 0), softcap=2.0, rope=100.0, dropout=0.1, residual_dropout=0.2"
    )


def test_factory_arguments_place_the_parameters():
    layer = MultiHeadAttention(8, 2, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}
    assert layer(torch.rand(1, 3, 8, device="meta", dtype=torch.float16)).shape == (1, 3, 8)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_heads": 3}, regard.ShapeError, "embed_dim 8 cannot be divided among 3 heads"),
        ({"num_heads": 0}, regard.ShapeError, "num_heads 0.*all must be positive"),
        ({"head_dim": 0}, regard.ShapeError, "head_dim 0; all must be positive"),
        ({"num_heads": 4.0}, TypeError, "num_heads is 4.0, a float; an int is needed"),
        ({"num_kv_heads": True}, TypeError, "num_kv_heads is True, a bool; an int"),
        ({"kdim": "8"}, TypeError, "kdim is '8', a str; an int"),
        ({"residual_dropout": "a"}, TypeError, "residual_dropout is 'a'; a number is needed"),
        ({"num_kv_heads": 3}, regard.ShapeError, "4 query heads cannot share 3 key heads"),
        ({"num_kv_heads": 0}, regard.ShapeError, "4 query heads cannot share 0 key heads"),
        ({"dropout": 1.0}, ValueError, "dropout is 1.0; it must be at least 0 and less than 1"),
        ({"dropout": -0.1}, ValueError, "dropout is -0.1"),
        ({"residual_dropout": 1.0}, ValueError, "residual_dropout is 1.0; it must be at least 0"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0; it must be positive"),
        ({"window": 3}, TypeError, r"window is 3; a pair \(left, right\)"),
        ({"window": (-1, 0)}, ValueError, "its sides must not be negative"),
        ({"rope": True}, TypeError, "rope is True; it is the base of the angles"),
        ({"rope": "10000"}, TypeError, "rope is '10000'"),
        ({"rope": 0.0}, ValueError, "rope is 0.0; it must be positive and finite"),
        ({"rope": float("inf")}, ValueError, "rope is inf"),
        ({"rope": 10.0, "head_dim": 3}, regard.ShapeError, "head_dim is 3; it must be even"),
    ],
)
def test_options_that_cannot_be_are_refused_when_the_layer_is_made(options, error, text):
    with pytest.raises(error, match=text):
        MultiHeadAttention(**{"embed_dim": 8, "num_heads": 4} | options)


def test_a_wrong_last_axis_is_named_with_what_is_needed():
    layer = MultiHeadAttention(8, 2, kdim=6, vdim=4)
    x, context, value = torch.rand(3, 8), torch.rand(5, 6), torch.rand(5, 4)
    with pytest.raises(regard.ShapeError, match=r"x has shape \(3, 7\).*embed_dim = 8 is needed"):
        layer(torch.rand(3, 7), context, value=value)
    with pytest.raises(regard.ShapeError, match=r"x has shape \(8,\)"):
        layer(torch.rand(8), context, value=value)
    with pytest.raises(regard.ShapeError, match=r"x has shape \(3, 8\).*kdim = 6 is needed"):
        layer(x)
    with pytest.raises(regard.ShapeError, match=r"context has shape \(5, 6\).*vdim = 4 is needed"):
        layer(x, context)
    with pytest.raises(regard.ShapeError, match=r"value has shape \(5, 6\).*vdim = 4 is needed"):
        layer(x, context, value=context)
    with pytest.raises(regard.ShapeError, match="5 keys and 4 values"):
        layer(x, context, value=value[:4])


def test_a_context_has_no_rotary_positions():
    layer = MultiHeadAttention(8, 2, rope=10000.0)
    with pytest.raises(regard.UnsupportedError, match="those of one sequence"):
        layer(torch.rand(3, 8), torch.rand(5, 8))
