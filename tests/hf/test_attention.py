"""Models of transformers give eager's numbers when regard computes their attention."""

import sys
import types

import pytest
import torch
import transformers
from transformers import masking_utils

import regard
import regard.hf
from models import model, padding, texts
from regard.hf import _masks
from regard.hf._attention import _named, _unknown, attention_function

DECODERS = ["llama", "mistral", "gpt_oss", "gemma2", "gpt2"]


def both(run):
    """What two implementations give: eager's, and regard's."""
    with torch.no_grad():
        return run("eager"), run("regard")


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_a_model_has_eagers_numbers(kind):
    ids, mask = texts(), padding()
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask.flip(-1)}):
        real = given.get("attention_mask", torch.ones_like(ids)).bool()
        eager, ours = both(lambda name, given=given: model(kind, name)(ids, **given)[0])
        torch.testing.assert_close(ours[real], eager[real], atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_an_encoder_and_a_decoder_have_eagers_numbers(kind):
    ids, mask = texts(), padding().flip(-1)
    given = {"attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    eager, ours = both(lambda name: model(kind, name)(ids, **given).logits)
    torch.testing.assert_close(ours, eager, atol=2e-5, rtol=0)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_generation_gives_eagers_tokens(kind, cache):
    settings = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache}

    def run(name):
        with torch.compiler.set_stance("force_eager"):
            return model(kind, name).generate(texts(), attention_mask=padding(), **settings)

    assert torch.equal(*both(run))


def test_a_chunk_behind_a_static_cache_is_causal():
    ids = texts(1)

    def run(name):
        found = model("llama", name)
        cache = transformers.StaticCache(config=found.config, max_cache_len=32)
        parts = [found(part, past_key_values=cache).logits for part in ids.split([9, 8, 3], 1)]
        return torch.cat(parts, 1)

    eager, ours = both(run)
    torch.testing.assert_close(ours, eager, atol=2e-5, rtol=0)


def test_checkpoints_drop_the_same_weights_again():
    found, ids = model("gpt2").train(), texts()
    assert found.config.attn_pdrop == 0.1

    def gradients(checkpoints):
        chosen = "enable" if checkpoints else "disable"
        checkpointing(found, chosen)
        found.zero_grad()
        torch.manual_seed(7)
        found(ids, labels=ids, use_cache=False).loss.backward()
        return [x.grad.clone() for x in found.parameters()]

    try:
        plain, again, other = gradients(False), gradients(True), gradients(False)
    finally:
        checkpointing(found, "disable")
        found.eval().zero_grad()
    for ours, recomputed, repeated in zip(plain, again, other):
        assert torch.equal(ours, recomputed)
        assert torch.equal(ours, repeated)


def checkpointing(found, what):
    """Enables or disables it, by the name that this transformers has for it."""
    name = f"activation_checkpointing_{what}"
    getattr(found, name if hasattr(found, name) else f"gradient_checkpointing_{what}")()


def test_gradients_are_eagers_and_checkpoints_change_no_bit():
    ids, mask = texts(), padding()
    labels = torch.where(mask.bool(), ids, -100)
    labels[0, 5] = -100  # what padding predicts

    def gradients(name, checkpoints=False):
        found = model("llama", name).train()
        if checkpoints:
            checkpointing(found, "enable")
        try:
            found.zero_grad()
            found(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
            return [x.grad.clone() for x in found.parameters()]
        finally:
            checkpointing(found, "disable")
            found.eval().zero_grad()

    plain = gradients("regard")
    for ours, eager in zip(plain, gradients("eager")):
        torch.testing.assert_close(ours, eager, atol=1e-6, rtol=1e-4)
    for ours, again in zip(plain, gradients("regard", checkpoints=True)):
        assert torch.equal(ours, again)


def test_a_compiled_model_is_one_graph():
    ids, mask = texts(), padding()
    config = model("gpt2").config.__class__(vocab_size=97, n_embd=16, n_layer=1, n_head=2)
    found = transformers.GPT2Model(config).eval()
    found.set_attn_implementation("regard")
    torch.compiler.reset()
    with torch.inference_mode():
        compiled = torch.compile(found, fullgraph=True, backend="eager")
        ours = compiled(ids, attention_mask=mask)[0][mask.bool()]
        expected = found(ids, attention_mask=mask)[0][mask.bool()]
    torch.testing.assert_close(ours, expected)


def test_a_compiled_forward_takes_the_masks_of_a_generation():
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    found = transformers.LlamaForCausalLM(config).eval()
    expected = found.generate(texts(), attention_mask=padding(), **settings)
    found.set_attn_implementation("regard")
    torch.compiler.reset()
    found.forward = torch.compile(found.forward, fullgraph=True, backend="eager")
    assert torch.equal(found.generate(texts(), attention_mask=padding(), **settings), expected)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = numbers(2, 4, 6, 8), numbers(2, 2, 9, 8, seed=1), numbers(2, 2, 9, 5, seed=2)
MODULE = torch.nn.Module()


def plain(q=Q, k=K, v=V, hidden=None, bias=0.0, scale=8**-0.5, extra=None):
    """The formula, in float64, with heads repeated."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    if extra is not None:
        scores = torch.cat([scores, extra.double().expand(*scores.shape[:3], -1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def computed(mask=None, module=MODULE, q=Q, k=K, v=V, **options):
    output, weights = attention_function(module, q, k, v, mask, **options)
    assert weights is None
    assert output.is_contiguous()
    return output.double()


def test_what_models_say_by_keywords():
    bias, sinks = numbers(1, 4, 6, 9, seed=3), numbers(4, seed=4)
    of_queries = numbers(2, 4, 6, 2, seed=5)
    later = torch.arange(9) > torch.arange(6)[:, None]
    close = {"atol": 1e-6, "rtol": 1e-5}
    for given, expected in (
        ({}, {}),
        ({"scaling": 0.3}, {"scale": 0.3}),
        ({"is_causal": True}, {"hidden": later}),
        ({"is_causal": False}, {}),
        ({"position_bias": bias}, {"bias": bias}),
        ({"position_bias": bias, "is_causal": True}, {"bias": bias, "hidden": later}),
        ({"s_aux": sinks}, {"extra": sinks[:, None, None]}),
        ({"sinks": of_queries}, {"extra": of_queries}),
        ({"sinks": of_queries, "is_causal": True}, {"extra": of_queries, "hidden": later}),
        ({"sinks": of_queries, "scaling": 0.3}, {"extra": of_queries, "scale": 0.3}),
        (
            {"sinks": of_queries, "position_bias": bias[..., :1]},
            {"extra": of_queries, "bias": bias[..., :1]},
        ),
    ):
        torch.testing.assert_close(computed(**given), plain(**expected), **close)
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(sinks)
    found = computed(module=module).detach()
    torch.testing.assert_close(found, plain(extra=sinks[:, None, None]), **close)


def test_selected_keys_and_blocks():
    indices = torch.tensor([0, 3, 7, -1]).expand(2, 6, 4)
    hidden = ~torch.isin(torch.arange(9), torch.tensor([0, 3, 7]))
    close = {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(computed(indices=indices), plain(hidden=hidden), **close)
    module = torch.nn.Module()
    module.indexer = types.SimpleNamespace(block_size=4)
    blocks = torch.tensor([2, 0, -1]).expand(2, 2, 6, 3)
    hidden = (torch.arange(9) >= 4) & (torch.arange(9) < 8)
    found = computed(module=module, block_indices=blocks)
    torch.testing.assert_close(found, plain(hidden=hidden), **close)


def test_packed_documents_see_themselves_alone():
    q, k, v = Q[:1], numbers(1, 2, 6, 8, seed=1), numbers(1, 2, 6, 8, seed=2)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    given = {"q": q, "k": k, "v": v, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    other = torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)) == 0
    later, near = torch.ones(6, 6).triu(1) > 0, torch.ones(6, 6).tril(-3) > 0
    windows = masking_utils.sliding_window_causal_mask_function(3)
    for mask, hidden in (
        (None, other),
        (_masks.mask_function(1, 6, 6), other | later),
        (_masks.mask_function(1, 6, 6, mask_function=windows), other | later | near),
        (~later[None, None], other | later),
    ):
        found = computed(mask, **given)
        torch.testing.assert_close(found, plain(q, k, v, hidden=hidden), atol=1e-6, rtol=1e-5)
    few = torch.tensor([0, 3, 6]), torch.tensor([0, 1, 9])
    found = computed(q=q, k=K[:1], v=V[:1], cu_seq_lens_q=few[0], cu_seq_lens_k=few[1])
    other = (torch.arange(6)[:, None] < 3) != (torch.arange(9) < 1)
    right = plain(q, K[:1], V[:1], hidden=other)
    torch.testing.assert_close(found, right, atol=1e-6, rtol=1e-5)
    with pytest.raises(regard.ShapeError, match="cu_seq_lens end at 6 queries"):
        computed(cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_one_query_of_a_batch_serves_all_keys():
    found = computed(q=Q[:1])
    torch.testing.assert_close(found, plain(Q[:1].expand(2, -1, -1, -1)), atol=1e-6, rtol=1e-5)


def test_dropout_is_for_training():
    assert torch.equal(computed(dropout=0.5, module=torch.nn.Module().eval()), computed())
    assert not torch.equal(computed(dropout=0.5, module=torch.nn.Module().train()), computed())


def test_autocast_rounds_as_eager_does():
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = attention_function(MODULE, Q, K, V, None)
    assert output.dtype == torch.bfloat16


def test_tensors_on_meta_give_shapes():
    q, k, v = (x.to("meta") for x in (Q, K, V))
    output, _ = attention_function(MODULE, q, k, v, None)
    assert output.is_meta
    assert output.shape == attention_function(MODULE, Q, K, V, None)[0].shape
    mixed, _ = attention_function(MODULE, q, k, v.double(), None)
    assert mixed.dtype == torch.float64


def test_a_keyword_that_changes_the_numbers_and_is_not_known_is_refused():
    found = type(model("llama").model.layers[0].self_attn)
    module = found.__new__(found)
    torch.nn.Module.__init__(module)
    assert torch.equal(computed(module=module, use_cache=True, position_ids=texts()), computed())
    source = sys.modules[found.__module__]
    kept = source.eager_attention_forward

    def changed(module, query, key, value, attention_mask, scaling, temper=None, **kwargs): ...

    source.eager_attention_forward = changed
    try:
        _named.cache_clear()
        assert torch.equal(computed(module=module, temper=None), computed())
        with pytest.raises(regard.UnsupportedError, match="gives attention temper"):
            computed(module=module, temper=2.0)
        assert _unknown(found.__module__, ("temper", "use_cache")) == ("temper",)
    finally:
        source.eager_attention_forward = kept
        _named.cache_clear()


def test_a_model_says_which_attention_is_its_own():
    found = regard.hf.check(model("llama"))
    assert found
    assert found.served == tuple(f"model.layers.{n}.self_attn" for n in range(3))
    assert "3 modules" in str(found)
    assert "attention of 1 module." in str(found._replace(served=found.served[:1]))
    rembert = transformers.RemBertModel(
        transformers.RemBertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, input_embedding_size=8,
        )
    )  # fmt: skip
    found = regard.hf.check(rembert)
    assert not found
    assert found.own[0] == ("encoder.layer.0.attention.self", "RemBertSelfAttention")
    assert "1 computes its own, and nothing" in str(found)
    assert "RemBertSelfAttention" in str(found)
    with pytest.raises(TypeError, match="Linear is no model of transformers"):
        regard.hf.check(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("version", ["5.9.3", "5.24.0", "6.0.1.dev0"])
def test_another_version_of_transformers_is_named(version):
    with pytest.warns(UserWarning, match=f"5.10 to 5.23, and this is {version}"):
        regard.hf._warn_of(version)
    regard.hf._warn_of("5.10.0")
    regard.hf._warn_of(transformers.__version__)
