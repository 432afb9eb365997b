"""Models whose queries have sinks of their own: keys before the tokens, under a name of theirs."""

import functools

import pytest
import torch
import transformers as T

import regard
import regard.hf
from models import padding, texts

pytestmark = [
    pytest.mark.skipif(
        not hasattr(T, "Inkling2Config"), reason="the oldest transformers that is tested has none"
    ),
    # Each layer attends to the residuals of those before it too, by torch's operator.
    pytest.mark.filterwarnings("ignore:.*Inkling2BlockAttentionResidual computes its own"),
]


class Words:
    """A tokenizer that says what it was asked."""

    def convert_ids_to_tokens(self, ids):
        return [f"word {number}" for number in ids]


@functools.cache
def inkling(kind):
    torch.manual_seed(0)
    config = T.Inkling2TextConfig(
        vocab_size=97, unpadded_vocab_size=97, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=8, d_rel=4, rel_extent=8,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        n_layers_per_attn_res_block=2, layer_types=[kind] * 2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return T.Inkling2ForCausalLM(config).eval()


def eager(kind, ids, **given):
    found = inkling(kind)
    found.set_attn_implementation("eager")
    with torch.no_grad():
        return found(ids, output_attentions=True, **given).attentions


def assert_recorded(recording, attentions, ids, pads=(0, 0)):
    """Tokens and weights of both texts, at the end; a text's first key is the sink."""
    for b, (one, pad) in enumerate(zip(recording.batch, pads)):
        words = tuple(f"word {number}" for number in ids[b, pad:].tolist())
        assert one.tokens[0] == "<sink>"
        assert one.tokens[-len(words) :] == words == one.query_tokens[-len(words) :]
        assert one.tokens[1:] == one.query_tokens
        for number in one.layer_numbers:
            found = one.weights[number][:]
            torch.testing.assert_close(
                found[:, -len(words) :, -len(words) :], attentions[number][b, :, pad:, pad:],
                atol=1e-6, rtol=0,
            )  # fmt: skip
            assert found[..., 0].min() > 0
            torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))


@pytest.mark.parametrize("kind", ["hybrid", "hybrid_sliding"])
def test_a_query_is_its_token_and_its_sink_is_a_key(kind):
    found, ids = inkling(kind), texts()
    for given, pads in (({}, (0, 0)), ({"attention_mask": padding()}, (5, 0))):
        with torch.no_grad(), regard.hf.record(found, tokenizer=Words()) as recording:
            found(ids, **given)
        assert_recorded(recording, eager(kind, ids, **given), ids, pads)


def test_without_ids_tokens_are_numbered_from_the_first():
    found = inkling("hybrid")
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(inputs_embeds=torch.randn(1, 4, 32))
    assert recording.tokens == ("<sink>", "0", "1", "2", "3")
    assert recording.query_tokens == ("0", "1", "2", "3")


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_generation_is_recorded(cache):
    found = inkling("hybrid")
    settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        regard.hf.record(found, tokenizer=Words()) as recording,
    ):
        ids = found.generate(texts(), **settings)[:, :-1]
    assert [one.boundary for one in recording.batch] == [21, 21]
    assert_recorded(recording, eager("hybrid", ids), ids)


def test_a_cache_that_forgets_keys_is_refused():
    """The sinks of a later step would stand where tokens were."""
    found = inkling("hybrid_sliding")
    refused = pytest.raises(regard.RecordingError, match=r"sinks of their own.*Record one pass")
    with torch.no_grad(), refused, regard.hf.record(found):
        found.generate(texts(), max_new_tokens=4, do_sample=False)


def test_attentions_are_of_the_tokens():
    found, ids = inkling("hybrid"), texts()
    expected = eager("hybrid", ids)
    found.set_attn_implementation("regard")
    with torch.no_grad():
        told = found(ids, output_attentions=True).attentions
    for ours, right in zip(told, expected):
        torch.testing.assert_close(ours + 0.0, right, atol=1e-6, rtol=0)
