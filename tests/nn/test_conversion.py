from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import regard
from regard.nn import MultiHeadAttention


def assert_near(found, needed, error=1e-6):
    assert found.shape == needed.shape
    assert (found - needed).abs().max() <= error


@settings(max_examples=30)
@given(
    heads=st.sampled_from([(8, 1), (12, 3), (16, 4)]),
    bias=st.booleans(),
    sizes=st.sampled_from([(None, None), (6, None), (None, 5), (6, 5)]),
    lengths=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    batch_first=st.booleans(),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_torchs_layer_moves_over_with_padding(
    heads, bias, sizes, lengths, batch_first, training, seed
):
    torch.manual_seed(seed)
    kdim, vdim = sizes
    other = nn.MultiheadAttention(
        *heads, bias=bias, kdim=kdim, vdim=vdim, batch_first=batch_first
    ).train(training)
    layer = MultiHeadAttention.from_torch(other)
    x = torch.randn(2, 4, heads[0])
    context, value = torch.randn(2, 7, kdim or heads[0]), torch.randn(2, 7, vdim or heads[0])
    padding = torch.arange(7) >= torch.tensor(lengths)[:, None]
    inputs = [z if batch_first else z.transpose(0, 1) for z in (x, context, value)]
    needed, averaged = other(*inputs, key_padding_mask=padding)
    needed = needed if batch_first else needed.transpose(0, 1)
    found, weights = layer(
        x, context, value=value, key_lengths=torch.tensor(lengths), return_weights=True
    )
    assert_near(found, needed)
    assert_near(weights[:].mean(1), averaged)
    assert layer.training == training


@settings(max_examples=15)
@given(density=st.floats(0.2, 1), seed=st.integers(0, 2**31), causal=st.booleans())
def test_torchs_layer_gives_the_same_numbers_and_gradients_under_random_masks(
    density, seed, causal
):
    torch.manual_seed(seed)
    other = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    layer = MultiHeadAttention.from_torch(other, causal=causal)
    mask = (torch.rand(6, 6) < density) | torch.eye(6, dtype=torch.bool)
    hidden = ~mask | torch.ones(6, 6, dtype=torch.bool).triu(1) if causal else ~mask
    x = torch.randn(2, 6, 12, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    needed, _ = other(y, y, y, attn_mask=hidden)
    found = layer(x, mask=mask)
    assert_near(found, needed, 1e-13)
    for result in (found, needed):
        result.square().sum().backward()
    assert_near(x.grad, y.grad, 1e-12)
    theirs = dict(other.named_parameters())
    for name, parameter in layer.named_parameters():
        assert_near(parameter.grad, theirs[name].grad, 1e-12)


def test_state_dicts_of_torchs_layer_and_ours_are_the_same():
    for options in ({}, {"bias": False}, {"kdim": 6, "vdim": 5}):
        other, layer = nn.MultiheadAttention(8, 2, **options), MultiHeadAttention(8, 2, **options)
        layer.load_state_dict(other.state_dict())
        other.load_state_dict(layer.state_dict())


def test_what_is_parametrized_moves_over_as_it_is_computed_with():
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.utils.parametrizations.weight_norm(module.out_proj)
    nn.utils.parametrizations.orthogonal(module, "in_proj_weight")
    layer, x = MultiHeadAttention.from_torch(module), torch.randn(1, 5, 8)
    torch.testing.assert_close(layer(x), module(x, x, x)[0], atol=1e-6, rtol=0)


def test_what_is_moved_is_a_copy_with_dtype_dropout_and_mode():
    other = nn.MultiheadAttention(8, 2, dropout=0.3, dtype=torch.float64).eval()
    before = torch.random.get_rng_state()
    layer = MultiHeadAttention.from_torch(other)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (layer.dropout, layer.training) == (0.3, False)
    assert layer.in_proj_weight.dtype == torch.float64
    other.in_proj_weight.data.zero_()
    assert layer.in_proj_weight.any()
    assert all(p.requires_grad for p in layer.parameters())


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_are_no_token_are_refused(option):
    other = nn.MultiheadAttention(8, 2, **{option: True})
    with pytest.raises(regard.UnsupportedError, match=f"{option}=True, which appends a key"):
        MultiHeadAttention.from_torch(other)


def quantizable():
    """It computes with three linear layers; its ``in_proj_weight`` are other numbers."""
    return torch.ao.nn.quantizable.MultiheadAttention(8, 2)


def pruned():
    module = nn.MultiheadAttention(8, 2)
    prune.l1_unstructured(module, "in_proj_weight", 0.5)
    return module


def adapted():
    module = nn.MultiheadAttention(8, 2)
    module.out_proj = nn.Sequential(module.out_proj)
    return module


def stripped():
    module = nn.MultiheadAttention(8, 2)
    module.in_proj_weight = module.out_proj.bias = None
    return module


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            quantizable,
            r"a torch.ao.nn.quantizable.*MultiheadAttention has linear_Q.weight, .*, which",
        ),
        (pruned, "has in_proj_weight_orig, in_proj_weight_mask, which"),
        (adapted, "has out_proj.0.weight, out_proj.0.bias, which"),
        (stripped, "has no in_proj_weight and no out_proj.bias, and"),
    ],
)
def test_modules_with_other_weights_than_torchs_are_refused(make, found):
    with pytest.raises(regard.UnsupportedError, match=rf"from_torch: .*{found}.* Move the module"):
        MultiHeadAttention.from_torch(make())


def test_only_torchs_own_layer_is_read_by_from_torch():
    with pytest.raises(TypeError, match=r"got a Linear; a torch\.nn\.MultiheadAttention is needed"):
        MultiHeadAttention.from_torch(nn.Linear(2, 2))


class Conv1D(nn.Module):
    """GPT-2's projection, with its weight as (in, out)."""

    def __init__(self, out_size, in_size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_size, out_size) * 0.1)
        self.bias = nn.Parameter(torch.randn(out_size))

    def forward(self, x):
        return x @ self.weight + self.bias


class Gpt2Attention(nn.Module):
    """Fused causal attention on any pair of projections, as in GPT-2 and seed 004."""

    def __init__(self, c_attn, c_proj, num_heads):
        super().__init__()
        self.c_attn, self.c_proj, self.num_heads = c_attn, c_proj, num_heads

    def forward(self, x):
        B, T, E = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        scores = query @ key.mT / query.shape[-1] ** 0.5
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        heads = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        return self.c_proj(heads.transpose(1, 2).reshape(B, T, E))


PROJECTIONS = {
    "conv": lambda: (Conv1D(36, 12), Conv1D(12, 12)),
    "linear": lambda: (nn.Linear(12, 36), nn.Linear(12, 12)),
    "mixed": lambda: (Conv1D(36, 12), nn.Linear(12, 12)),
    "no bias": lambda: (nn.Linear(12, 36, bias=False), nn.Linear(12, 12, bias=False)),
    "one bias": lambda: (nn.Linear(12, 36, bias=False), nn.Linear(12, 12)),
}


@pytest.mark.parametrize("kind", PROJECTIONS)
def test_gpt2_projections_move_over_to_the_same_output(kind):
    torch.manual_seed(0)
    other = Gpt2Attention(*PROJECTIONS[kind](), 3)
    x = torch.randn(2, 7, 12)
    layer = MultiHeadAttention.from_gpt2(other.c_attn, other.c_proj, 3)
    assert_near(layer(x), other(x))


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_gpt2_projections_move_over_to_the_same_gradients(kind):
    torch.manual_seed(0)
    other = Gpt2Attention(*PROJECTIONS[kind](), 3).double()
    layer = MultiHeadAttention.from_gpt2(other.c_attn, other.c_proj, 3)
    x = torch.randn(2, 7, 12, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for result in (layer(x), other(y)):
        result.square().sum().backward()
    assert_near(x.grad, y.grad, 1e-11)
    for mine, theirs in (
        (layer.in_proj_weight, other.c_attn.weight),
        (layer.in_proj_bias, other.c_attn.bias),
        (layer.out_proj.weight, other.c_proj.weight),
    ):
        needed = theirs.grad.mT if kind == "conv" and theirs.ndim == 2 else theirs.grad
        assert_near(mine.grad, needed, 1e-11)


class Adapter(nn.Module):
    """A projection and a low-rank sum, with the weight of the projection, as peft has it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.lora_A = base, nn.Linear(12, 2, bias=False)
        self.lora_B = nn.Linear(2, 12, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_gpt2_projections_that_add_to_their_matrix_are_refused():
    c_attn, c_proj = PROJECTIONS["conv"]()
    with pytest.raises(
        regard.UnsupportedError, match=r"c_proj has .*lora_A.weight.* beside .*Merge"
    ):
        MultiHeadAttention.from_gpt2(c_attn, Adapter(c_proj), 3)


def test_gpt2_projections_that_are_parametrized_move_over():
    c_attn, c_proj = PROJECTIONS["linear"]()
    weight_norm(c_attn)
    prune.l1_unstructured(c_proj, "weight", 0.5)
    layer = MultiHeadAttention.from_gpt2(c_attn, c_proj, 3)
    x = torch.randn(2, 7, 12)
    assert_near(layer(x), Gpt2Attention(c_attn, c_proj, 3)(x))


def test_gpt2_dropout_and_causality_are_told():
    c_attn, c_proj = PROJECTIONS["conv"]()
    layer = MultiHeadAttention.from_gpt2(
        c_attn.eval(), c_proj, 3, causal=False, dropout=0.1, residual_dropout=0.2
    )
    assert (layer.causal, layer.dropout, layer.residual_dropout) == (False, 0.1, 0.2)
    assert not layer.training


def test_gpt2_weights_of_a_wrong_shape_are_refused_with_how_they_were_read():
    linear, conv = PROJECTIONS["linear"](), PROJECTIONS["conv"]()
    stored = SimpleNamespace(weight=linear[0].weight, bias=None, training=True)
    with pytest.raises(
        regard.ShapeError, match=r"c_attn has shape \(36, 12\), read as \(in, out\)"
    ):
        MultiHeadAttention.from_gpt2(stored, conv[1], 3)
    with pytest.raises(
        regard.ShapeError, match=r"c_proj has shape \(36, 12\), read as \(out, in\)"
    ):
        MultiHeadAttention.from_gpt2(linear[0], linear[0], 3)
    with pytest.raises(regard.ShapeError, match="12 cannot be divided among 5 heads"):
        MultiHeadAttention.from_gpt2(*conv, 5)
    with pytest.raises(TypeError, match="c_attn is a ReLU without a matrix"):
        MultiHeadAttention.from_gpt2(nn.ReLU(), conv[1], 3)
