import pytest
import torch
from torch import nn

import regard
from regard.nn import SelfAttention

# "Your journey starts with one step", as in seed 001.
INPUTS = torch.tensor(
    [
        [0.43, 0.15, 0.89],
        [0.55, 0.87, 0.66],
        [0.57, 0.85, 0.64],
        [0.22, 0.58, 0.33],
        [0.77, 0.25, 0.10],
        [0.05, 0.80, 0.55],
    ]
)


class Matrices(nn.Module):
    """Projections as in seed 001: parameters (d_in, d_out), drawn as query, key, value."""

    def __init__(self, d_in, d_out):
        super().__init__()
        for name in ("W_query", "W_key", "W_value"):
            self.register_parameter(name, nn.Parameter(torch.rand(d_in, d_out)))

    def forward(self, x):
        return plain(x @ self.W_query, x @ self.W_key, x @ self.W_value)


class Linears(nn.Module):
    """Projections as in seed 004: layers with a bias."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.Q, self.K, self.V = (nn.Linear(d_in, d_out) for _ in range(3))

    def forward(self, x):
        return plain(self.Q(x), self.K(x), self.V(x))


class Adapted(nn.Linear):
    """A projection and a low-rank sum, as loralib has it."""

    def __init__(self, d_in, d_out):
        super().__init__(d_in, d_out)
        self.lora_A = nn.Parameter(torch.rand(2, d_in))
        self.lora_B = nn.Parameter(torch.rand(d_out, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.mT @ self.lora_B.mT


def plain(query, key, value):
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value


def assert_near(found, needed, error=1e-6):
    assert found.shape == needed.shape
    assert (found - needed).abs().max() <= error


def test_the_printed_context_vectors_of_seed_001_come_out():
    torch.manual_seed(123)
    layer = SelfAttention.from_module(Matrices(3, 2))
    printed = [
        [0.2996, 0.8053],
        [0.3061, 0.8210],
        [0.3058, 0.8203],
        [0.2948, 0.7939],
        [0.2927, 0.7891],
        [0.2990, 0.8040],
    ]
    assert layer(INPUTS).round(decimals=4).tolist() == torch.tensor(printed).tolist()


def test_the_printed_weights_of_seed_001_come_out():
    torch.manual_seed(123)
    query, key, value = (torch.rand(3, 2) for _ in range(3))
    layer = SelfAttention.from_projections(query, key, value)
    output, weights = layer(INPUTS[2:3], INPUTS, return_weights=True)
    printed = torch.tensor([0.1503, 0.2256, 0.2192, 0.1315, 0.0914, 0.1819])
    assert weights.shape == (1, 1, 6)
    assert torch.equal(weights[0, 0].round(decimals=4), printed)
    assert torch.equal(output.round(decimals=4), torch.tensor([[0.3058, 0.8203]]))


@pytest.mark.parametrize("kind", [Matrices, Linears])
def test_weights_move_over_to_the_same_output(kind):
    torch.manual_seed(0)
    other = kind(12, 8)
    x = torch.randn(2, 5, 12)
    assert_near(SelfAttention.from_module(other)(x), other(x))


@pytest.mark.parametrize("kind", [Matrices, Linears])
def test_weights_move_over_to_the_same_gradients(kind):
    torch.manual_seed(0)
    other = kind(12, 8).double()
    layer = SelfAttention.from_module(other)
    x = torch.randn(2, 5, 12, dtype=torch.float64).requires_grad_()
    y = x.detach().clone().requires_grad_()
    for result in (layer(x), other(y)):
        result.square().sum().backward()
    assert_near(x.grad, y.grad, 1e-12)
    names = ("W_query", "W_key", "W_value") if kind is Matrices else ("Q", "K", "V")
    for mine, name in zip((layer.query, layer.key, layer.value), names):
        theirs = getattr(other, name)
        needed = theirs.grad.mT if kind is Matrices else theirs.weight.grad
        assert_near(mine.weight.grad, needed, 1e-12)
        if kind is Linears:
            assert_near(mine.bias.grad, theirs.bias.grad, 1e-12)


def test_moved_weights_are_copies_with_the_mode_and_dtype_of_the_original():
    other = Linears(4, 4).double().eval()
    before = torch.random.get_rng_state()
    layer = SelfAttention.from_module(other, causal=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not layer.training
    assert layer.causal
    assert layer.query.weight.dtype == torch.float64
    other.Q.weight.data.zero_()
    assert layer.query.weight.any()
    assert all(p.requires_grad for p in layer.parameters())


def test_a_projection_without_bias_among_others_gets_a_bias_of_zero():
    query, key, value = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), torch.rand(4, 3)
    layer = SelfAttention.from_projections(query, key, value)
    x = torch.randn(6, 4)
    assert_near(layer(x), plain(query(x), key(x), x @ value))
    assert not layer.key.bias.any()


def test_the_layer_is_softmax_of_its_projections_for_any_leading_axes():
    layer = SelfAttention(5, 3, bias=True)
    for shape in [(7, 5), (2, 7, 5), (2, 3, 7, 5)]:
        x = torch.randn(shape)
        assert_near(layer(x), plain(layer.query(x), layer.key(x), layer.value(x)))


def test_causal_hides_later_tokens():
    layer = SelfAttention(5, 3, causal=True)
    x = torch.randn(2, 6, 5)
    whole = layer(x)
    for length in range(1, 7):
        assert_near(whole[:, :length], layer(x[:, :length]))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing_and_keeps_tokens_in_place(causal):
    layer = SelfAttention(5, 3, causal=causal)
    x = torch.randn(2, 6, 5)
    x[0, 4:] = torch.nan
    output, weights = layer(x, key_lengths=torch.tensor([4, 6]), return_weights=True)
    assert_near(output[0, :4], layer(x[0, :4]))
    assert_near(output[1], layer(x[1]))
    assert not weights[0, 0, :4, 4:].any()


def test_a_mask_hides_pairs_with_or_without_a_batch():
    layer = SelfAttention(5, 3)
    x = torch.randn(2, 6, 5)
    mask = torch.rand(2, 6, 6) < 0.5
    mask[..., 0] = True
    scores = layer.query(x) @ layer.key(x).mT / 3**0.5
    needed = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ layer.value(x)
    assert_near(layer(x, mask=mask), needed)
    assert_near(layer(x[0], mask=mask[0]), needed[0])
    assert_near(layer(x, mask=mask[0, 0]), layer(x, mask=mask[0, :1].expand(6, 6)))


def test_context_gives_keys_and_values():
    layer = SelfAttention(5, 3)
    x, context = torch.randn(2, 4, 5), torch.randn(2, 7, 5)
    output, weights = layer(x, context, return_weights=True)
    needed = plain(layer.query(x), layer.key(context), layer.value(context))
    assert_near(output, needed)
    assert weights.shape == (2, 1, 4, 7)
    assert_near((weights[:, 0] @ layer.value(context)), needed)


def test_a_wrong_last_axis_is_named_with_what_is_needed():
    layer = SelfAttention(5, 3)
    with pytest.raises(regard.ShapeError, match=r"x has shape \(4, 3\).*d_in = 5 is needed"):
        layer(torch.rand(4, 3))
    with pytest.raises(regard.ShapeError, match=r"context has shape \(2, 6\)"):
        layer(torch.rand(4, 5), torch.rand(2, 6))
    with pytest.raises(regard.ShapeError, match=r"x has shape \(5,\)"):
        layer(torch.rand(5))


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="d_in is 0 and d_out 3; both must be positive"):
        SelfAttention(0, 3)
    with pytest.raises(TypeError, match=r"SelfAttention: d_in is 3\.0, a float; an int is needed"):
        SelfAttention(3.0, 2)
    with pytest.raises(TypeError, match="SelfAttention: d_out is '2', a str; an int is needed"):
        SelfAttention(3, "2")


def test_a_module_without_known_projections_is_refused_by_its_names():
    with pytest.raises(TypeError, match=r"Linear has no projections.*weight, bias\. Name them"):
        SelfAttention.from_module(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="its parameters: none"):
        SelfAttention.from_module(nn.ReLU())


def test_a_module_of_several_heads_is_refused():
    other = Linears(4, 4)
    other.num_attention_heads = 1
    assert SelfAttention.from_module(other).d_in == 4
    other.num_attention_heads = 2
    with pytest.raises(
        regard.UnsupportedError, match=r"Linears has num_attention_heads = 2; .*one"
    ):
        SelfAttention.from_module(other)


def test_a_projection_that_adds_to_its_matrix_is_refused():
    query, key = Adapted(3, 3), nn.Linear(3, 3)
    with pytest.raises(regard.UnsupportedError, match=r"query has lora_A, lora_B beside .* Merge"):
        SelfAttention.from_projections(query, key, key)


def test_projections_must_be_three_matrices_of_one_shape():
    square = torch.rand(3, 3)
    with pytest.raises(TypeError, match="key is a list; a torch"):
        SelfAttention.from_projections(square, [[1.0]], square)
    with pytest.raises(regard.ShapeError, match=r"query \(3, 3\)  key \(3, 3\)  value \(4, 2\)"):
        SelfAttention.from_projections(square, square, nn.Linear(4, 2))


def test_the_layer_shows_its_options():
    text = str(SelfAttention(5, 3, causal=True))
    assert "causal=True" in text
    assert "in_features=5, out_features=3, bias=False" in text
