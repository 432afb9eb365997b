"""The table of options: every list of them that is written out says what it says."""

import dataclasses
import inspect
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from recordings import numbers
from regard._backends import BACKENDS, torch_ops
from regard._base import types
from regard._call import hints
from regard._call.call import Call
from regard._call.checks import READERS, read_call
from regard._call.options import ARRAYS, FIELDS, INPUTS, NUMBERS, OPTIONS, Options, WeightsOptions
from regard._operator.attention import attention

ROOT = Path(__file__).parent.parent
NAMES = {option.name for option in OPTIONS}
OF_WEIGHTS = {option.name for option in OPTIONS if option.of_weights}


def keywords(function):
    return {
        p.name: p
        for p in inspect.signature(function).parameters.values()
        if p.kind == p.KEYWORD_ONLY
    }


def test_the_signature_of_attention_has_every_option():
    written = keywords(attention)
    assert written.keys() == NAMES | {"return_weights", "return_statistics", "backend"}
    for option in OPTIONS:
        default = written[option.name].default
        assert default == option.default
        assert type(default) is type(option.default)


def test_the_signature_of_weights_has_those_that_weights_follow_from():
    assert keywords(regard.AttentionWeights).keys() == OF_WEIGHTS | {"statistics", "backend"}


def test_the_names_that_type_checkers_know_are_these():
    assert WeightsOptions.__annotations__.keys() == OF_WEIGHTS
    assert Options.__annotations__.keys() == NAMES
    known = {backend.name for backend in BACKENDS}
    assert set(typing.get_args(types.BackendName)) == known | {"auto"}


def test_a_call_has_a_field_for_each():
    fields = {field.name: field for field in dataclasses.fields(Call)}
    assert fields.keys() >= {field.name for field in FIELDS}
    for option in OPTIONS:
        for field in option.fields:
            assert fields[field.name].default == {"float": 1.0}.get(field.type, option.default) or (
                field.name == "dropout"
            )


def test_every_option_is_read_and_its_kind_is_known():
    assert {option.kind for option in OPTIONS} - READERS.keys() == {"seed"}  # drawn where it is not
    with pytest.raises(KeyError):
        read_call(np.eye(2), np.eye(2), None, causl=True)


def test_the_schema_of_the_operators_is_packed_by_name():
    x = torch.zeros(2, 4, 3, 8)
    given = {
        "mask": torch.ones(3, 3, dtype=torch.bool), "bias": torch.zeros(3, 3), "causal": True,
        "window": (1, 2), "key_lengths": 3, "segments": torch.zeros(2, 3, dtype=torch.long),
        "intervals": (torch.zeros(3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)),
        "query_start": 0, "sinks": torch.zeros(4), "scale": 0.5, "softcap": 2.0, "dropout": 0.1,
        "seed": 3, "edits": [regard.Edit(1, 2, 0, 3.0)], "query_step": 2, "key_start": 5,
        "key_step": 3, "output_dtype": "float32",
    }  # fmt: skip
    assert given.keys() == NAMES
    call = read_call(x, x, x, **given)
    packed = torch_ops.pack(call)
    again = torch_ops.unpack(*packed)
    for field in FIELDS:
        assert getattr(again, field.name) is getattr(call, field.name)
    schema = torch.ops.regard.attention.default._schema
    assert [a.name for a in schema.arguments] == [f.name for f in (*ARRAYS, *NUMBERS)]


@pytest.mark.parametrize(
    "field",
    [f for f in ARRAYS if f not in INPUTS and not f.name.startswith("edit")],
    ids=lambda f: f.name,
)
def test_arrays_are_cut_along_the_axes_that_the_table_gives(field):
    sizes = {"B": 2, "H": 4, "G": 2, "Q": 6, "K": 9, "D": 8}
    shape = [sizes[axis.upper()] for axis in field.axes]
    x = np.arange(np.prod(shape)).reshape(shape)
    q, k = np.zeros((2, 4, 6, 8)), np.zeros((2, 2, 9, 8))
    call = Call(query=q, key=k, value=None, leading=(2,), heads=True, **{field.name: x})
    cut = {
        "B": slice(1, 2),
        "H": slice(2, 4),
        "G": slice(1, 2),
        "Q": slice(1, 6, 2),
        "K": slice(3, 8),
    }
    part = call.of_heads(range(1, 2), range(2, 4)).rows(cut["Q"]).columns(cut["K"])
    expected = x[tuple(cut.get(axis.upper(), slice(None)) for axis in field.axes)]
    told_anew = ("query_start", "key_lengths", "interval_first", "interval_last")
    if field.name not in told_anew:
        np.testing.assert_array_equal(getattr(part, field.name), expected)
    assert getattr(part, field.name).shape == expected.shape
    one = x[tuple(slice(0, 1) if axis.islower() else slice(None) for axis in field.axes)]
    shared = dataclasses.replace(call, **{field.name: one})
    kept = getattr(shared.rows(cut["Q"]).columns(cut["K"]), field.name)
    for n, axis in zip(kept.shape, field.axes):
        if axis.islower():
            assert n == 1


def test_what_is_given_is_named():
    x = np.zeros((2, 4, 3, 8))
    assert read_call(x, x, x).given == {"scale"}
    some = read_call(x, x, x, causal=True, dropout=0.0, window=(None, 2), bias=np.zeros(3))
    assert some.given == {"scale", "causal", "window_right", "bias"}


def test_torchs_operator_is_not_asked_for_what_it_does_not_know():
    x = torch.zeros(2, 4, 32, 8)
    arrays = {
        "mask": torch.ones(32, 32, dtype=torch.bool), "bias": torch.zeros(32, 32), "key_lengths": 3,
        "segments": torch.zeros(2, 32, dtype=torch.long), "query_start": 0, "sinks": torch.zeros(4),
    }  # fmt: skip
    others = {"window": (1, 2), "softcap": 2.0, "dropout": 0.1, "edits": [regard.Edit(keys=0)]}
    for name, value in (arrays | others).items():
        call = read_call(x, x, x, **{name: value})
        assert torch_ops.may_fuse(call) == (name in ("mask", "bias", "key_lengths")), name


def test_options_of_an_element_are_those_of_a_layer():
    q, k = numbers(2, 4, 6, 8), numbers(2, 2, 9, 8, seed=1)
    given = {
        "causal": True, "window": (4, None), "key_lengths": np.array([9, 7]), "softcap": 3.0,
        "segments": (np.arange(6) // 2, np.arange(9) // 3), "sinks": numbers(4, seed=2),
        "bias": numbers(2, 4, 6, 9, seed=3), "mask": np.arange(54).reshape(1, 1, 6, 9) % 7 > 0,
        "edits": [regard.Edit(1, slice(4), slice(2, None), 3.0), regard.Edit(keys=1)],
    }  # fmt: skip
    call = read_call(q, k, None, **given)
    whole = np.asarray(regard.AttentionWeights(q, k, **given))
    for b in range(2):
        options = call.options_of(b)
        layer = regard.recording.Layer(q[b], k[b], **options)
        found = regard.AttentionWeights(layer.query, layer.key, **layer.options)
        np.testing.assert_allclose(np.asarray(found), whole[b], rtol=1e-6)


def test_an_option_of_the_scores_stands_in_the_files_that_contributing_names():
    said = (ROOT / "CONTRIBUTING.md").read_text().split("\n## An option\n")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/-]+\.(?:py|h|js))`", said)) - {"tests/test_options.py"}
    files = [*(ROOT / "src" / "regard").rglob("*"), *(ROOT / "kernels").rglob("*")]
    found = {
        file.relative_to(ROOT).as_posix()
        for file in files
        if file.suffix in (".py", ".h", ".cpp", ".js") and "softcap" in file.read_text()
    }
    found -= {"src/regard/nn/multi_head.py", "src/regard/hf/_attention.py"}  # their own arguments
    assert len(found) == len(named) == 8
    assert all(any(file.endswith(f"/{name}") for name in named) for file in found)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("is_causal", r"Here it is causal=True, and with query_start=0 as in torch"),
        ("attn_mask", "Here it is mask= of bools, True = may attend, or bias= of numbers"),
        ("key_padding_mask", "Here it is key_lengths=, or mask=, which is False where"),
        ("dropout_p", r"Here it is dropout=\."),
        ("softmax_scale", r"Here it is scale=\."),
        ("window_size", r"Here it is window=\(left, right\)\."),
        ("need_weights", r"Here it is return_weights=True, for \(output, weights\)"),
        ("alibi_slopes", "Here it is bias= of numbers that are added, −slope · distance"),
        ("cache_seqlens", r"Here it is key_lengths=\."),
        ("p", r"Here it is dropout=\."),
        ("op", r"Here it is backend=\."),
        ("return_aux", r"Here it is return_statistics=True, for \(output, statistics\)"),
        ("enable_gqa", "Leave it out"),
        ("deterministic", "Leave it out: equal input gives equal bits"),
        ("casual", r"Is causal meant\?"),
        (
            "temperature",
            "There are causal, window, mask, .*, return_weights, return_statistics, backend",
        ),
    ],
)
def test_an_option_by_another_name_is_told_its_name_here(name, said):
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=f"^attention: there is no option '{name}'. {said}"):
        regard.attention(x, x, x, **{name: True})
    with pytest.raises(
        TypeError, match=f"AttentionWeights: there is no option '{name}'. "
    ) as error:
        regard.AttentionWeights(x, x, **{name: True})
    only_output = name in ("dropout_p", "p", "need_weights", "return_aux", "temperature")
    assert bool(re.search(said, str(error.value))) != only_output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("causal", "Here it is is_causal=True, as in torch"),
        ("mask", "Here it is attn_mask=, as in torch"),
        ("segments", "regard.attention has it"),
        ("is_casual", r"Is is_causal meant\?"),
    ],
)
def test_torchs_function_tells_torchs_names(name, said):
    x = np.ones((2, 3))
    with pytest.raises(TypeError, match=f"scaled_dot_product_attention: .*'{name}'. {said}"):
        regard.scaled_dot_product_attention(x, x, x, **{name: True})


def test_every_name_elsewhere_leads_to_an_option():
    options = {*keywords(attention)}
    assert all(options & here.keys() for here in hints.ELSEWHERE.values())
    assert {name for here in hints.ELSEWHERE.values() for name in here} <= options
    assert not options & hints.ELSEWHERE.keys()
