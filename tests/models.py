"""Tiny models of transformers, with random weights."""

import functools

import pytest
import torch
import transformers as T

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
BART = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 3, "forced_eos_token_id": None,
}  # fmt: skip
KINDS = {
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**GROUPED)),
    "mistral": lambda: T.MistralForCausalLM(T.MistralConfig(**GROUPED, sliding_window=8)),
    "gpt_oss": lambda: T.GptOssForCausalLM(
        T.GptOssConfig(**GROUPED, sliding_window=8, num_local_experts=4)
    ),
    "granite_swa": lambda: T.GraniteSWAForCausalLM(
        T.GraniteSWAConfig(**GROUPED, sliding_window=8)
    ),
    "granitemoe_swa": lambda: T.GraniteMoeSWAForCausalLM(
        T.GraniteMoeSWAConfig(
            **GROUPED, sliding_window=8, num_local_experts=4, shared_intermediate_size=32
        )
    ),
    "bridgetower": lambda: T.BridgeTowerModel(
        T.BridgeTowerConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            text_config=SIZES | {"hidden_size": 64, "max_position_embeddings": 40},
            vision_config={
                "hidden_size": 64, "num_hidden_layers": 3, "patch_size": 8, "image_size": 32
            },
        )
    ),
    "gemma2": lambda: T.Gemma2ForCausalLM(T.Gemma2Config(**GROUPED, sliding_window=8)),
    "gpt2": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=1)
    ),
    "bert": lambda: T.BertModel(T.BertConfig(**SIZES)),
    "bart": lambda: T.BartForConditionalGeneration(T.BartConfig(**BART)),
    "t5": lambda: T.T5ForConditionalGeneration(
        T.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4,
            decoder_start_token_id=3,
        )
    ),
    "vit": lambda: T.ViTModel(
        T.ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
            image_size=32, patch_size=8,
        )
    ),
}  # fmt: skip


@functools.cache
def _made(kind):
    torch.manual_seed(0)
    found = KINDS[kind]().eval()
    if hasattr(found, "generation_config"):
        found.generation_config.eos_token_id = None
    return found


def model(kind, implementation="regard"):
    """A model of that kind, the same one each time."""
    if kind.endswith("_swa") and not hasattr(T, "GraniteMoeSWAConfig"):
        pytest.skip("the oldest transformers that is tested does not have it")
    found = _made(kind)
    found.set_attn_implementation(implementation)
    if kind == "t5" and T.__version__.startswith("5.10."):
        pytest.skip("T5 has an attention of its own in the oldest transformers that is tested")
    return found


def texts(batch=2, length=20):
    """Ids of random tokens, none of them special."""
    return torch.randint(4, 97, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(length=20, left=5):
    """A mask of two texts, the first with padding before it."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :left] = 0
    return mask
