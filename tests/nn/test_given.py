"""What the layers say about arrays and options that they do not take."""

import numpy as np
import pytest
import torch

import regard
from regard.nn import MultiHeadAttention, SelfAttention

X = torch.randn(1, 4, 8)
LAYERS = {"SelfAttention": SelfAttention(8, 6), "MultiHeadAttention": MultiHeadAttention(8, 2)}
APART = MultiHeadAttention(8, 2, kdim=5, vdim=3)
layers = pytest.mark.parametrize(("name", "layer"), LAYERS.items(), ids=LAYERS)


@layers
def test_arrays_of_numpy_are_told_the_way(name, layer):
    for given in ((X.numpy(),), (X, X.numpy()), ([[1.0]],)):
        kind = "list" if isinstance(given[0], list) else "numpy.ndarray"
        needed = f"{name}: .* is a .*{kind}; a torch tensor is needed, as in torch.as_tensor"
        with pytest.raises(TypeError, match=needed):
            layer(*given)
    assert layer(torch.as_tensor(X.numpy().astype(float)).float()).shape[:2] == (1, 4)


@layers
@pytest.mark.parametrize("mask", [[[True] * 4] * 4, np.ones((4, 4), bool)])
def test_a_mask_that_is_no_tensor_is_told_the_way(name, layer, mask):
    with pytest.raises(TypeError, match=r"attention: .*mask"):
        layer(X, mask=mask)


@layers
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_another_dtype_is_told_the_way(name, layer, dtype):
    found = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"{name}: x is {found} and the parameters are float32"):
        layer(X.to(dtype))
    with pytest.raises(TypeError, match=f"{name}: context is {found}.*context.to\\(torch.float32"):
        layer(X, X.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(X.to(torch.float16)).dtype == torch.bfloat16


def test_a_value_of_its_own_is_checked_too():
    context, value = torch.randn(1, 7, 5), torch.randn(1, 7, 3)
    assert APART(X, context, value=value).shape == X.shape
    with pytest.raises(TypeError, match="value is float64 and the parameters are float32"):
        APART(X, context, value=value.double())
    with pytest.raises(TypeError, match=r"context is a numpy\.ndarray"):
        APART(X, context.numpy(), value=value)


@layers
def test_torchs_way_of_calling_is_told_the_way(name, layer):
    with pytest.raises(TypeError, match=f"{name}: 3 arguments are given in order, .*layer\\(x\\)"):
        layer(X, X, X)
    for option, said in {
        "need_weights": "Here it is return_weights=True",
        "attn_mask": "Here it is mask= of bools",
        "is_causal": "give causal=True where the layer is made",
        "causal": "give causal=True where the layer is made",
        "masks": "Is mask meant",
    }.items():
        with pytest.raises(TypeError, match=f"{name}: there is no option '{option}'. .*{said}"):
            layer(X, **{option: True})


@layers
@pytest.mark.filterwarnings("ignore:.*PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_told_the_way(name, layer, layout):
    x = torch.nested.nested_tensor([torch.rand(n, 8) for n in (3, 5)], layout=layout)
    with pytest.raises(regard.UnsupportedError, match=f"{name}: x is a nested tensor; dense"):
        layer(x)


def test_what_stands_in_the_place_of_a_projection_takes_what_it_takes():
    class Doubled(torch.nn.Module):
        weight = "quantized"

        def forward(self, x):
            return 2 * x.float()

    layer = SelfAttention(8, 8)
    layer.query = layer.key = layer.value = Doubled()
    x = X.half()
    expected = regard.attention(*[2 * x.float()[:, None]] * 3)[:, 0]
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(TypeError, match=r"is a numpy\.ndarray"):
        layer(np.ones((4, 8), np.float32))
