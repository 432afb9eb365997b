"""A survey of a model of transformers."""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import regard.hf
from regard.heads import head_scores
from regard.hf._stream import Stream
from regard.survey import Survey

TEXT = "the cat sat on a mat and the cat ran " * 3
WORDS = {word: n for n, word in enumerate(["<unk>", *sorted({*TEXT.split()})])}
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip


def written(folder, model):
    """A folder with a model and a tokenizer of the words."""
    plain = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", model_max_length=40
    )
    for one in (model, tokenizer):
        one.save_pretrained(folder)
    return folder


def test_modules_with_their_own_attention_are_said_to_be_left_out(tmp_path):
    config = transformers.MiniMaxConfig(
        **SIZES, head_dim=8, num_local_experts=2, block_size=8, bos_token_id=None,
        eos_token_id=None, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    folder = written(tmp_path / "model", transformers.MiniMaxModel(config))
    (tmp_path / "a.txt").write_text(TEXT)
    match = r"survey: layers\.0\.self_attn is left out: attention that .* computes by itself"
    with pytest.warns(UserWarning, match=match) as told:
        survey = Survey(tmp_path / "heads", corpus=tmp_path / "a.txt", model=folder)
    assert told[0].filename == __file__
    survey.run(workers=1)
    assert survey.heads().layers == (1,)


def test_a_model_of_transformers_is_surveyed_layer_by_layer(tmp_path):
    text = TEXT
    torch.manual_seed(0)
    written(tmp_path / "model", transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text * 9)
    survey = Survey(tmp_path / "heads", corpus=[tmp_path / "a.txt"], model=tmp_path / "model")
    survey.run(workers=1)
    found, heads = regard.hf.read(tmp_path / "model", text), survey.heads()
    expected = np.array([w.entropy().mean(-1).numpy() for w in found.weights])
    np.testing.assert_allclose(heads.mean("entropy"), expected, atol=1e-5)
    wanted = head_scores(found, queries=1000).scores
    np.testing.assert_allclose(survey.means().scores, wanted, atol=1e-4)
    longer = Survey(tmp_path / "two", corpus=[tmp_path / "b.txt"], model=tmp_path / "model")
    longer.run(workers=1)
    assert longer.manifest.settings["max_tokens"] == longer.heads().tokens == 40
    assert len(longer.facts()[0].cut) == 1
    assert {"torch", "transformers"} < longer.manifest.versions.keys()
    with pytest.raises(ValueError, match="max_tokens is 99; the model reads at most 40"):
        Survey(tmp_path / "no", corpus=tmp_path / "a.txt", model=tmp_path / "model", max_tokens=99)


def settings_changed(folder, **settings):
    """The folder, with other settings of its tokenizer."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_a_document_is_read_from_its_beginning_whatever_the_tokenizer_cuts(tmp_path):
    folder = written(tmp_path / "m", transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))
    stream = Stream(settings_changed(folder, truncation_side="left"))
    ids, is_cut = stream.encode(TEXT, 3)
    assert (stream.tokens(ids), is_cut) == (["the", "cat", "sat"], True)


def test_positions_that_begin_after_that_of_padding_are_not_counted(tmp_path):
    """RoBERTa has vectors for 42 positions, of which 40 are of tokens."""
    named = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
    config = transformers.RobertaConfig(**named | {"max_position_embeddings": 42}, pad_token_id=1)
    folder = written(tmp_path / "m", transformers.RobertaModel(config))
    settings_changed(folder, model_max_length=10**30)
    assert len(regard.hf.read(folder, "cat " * 40).tokens) == 40
    with pytest.raises(ValueError, match=r"41 tokens; .* reads at most 40"):
        regard.hf.read(folder, "cat " * 41)
    (tmp_path / "a.txt").write_text(TEXT * 9)
    survey = Survey(tmp_path / "heads", corpus=tmp_path / "a.txt", model=folder)
    survey.run(workers=1)
    assert survey.manifest.settings["max_tokens"] == survey.heads().tokens == 40
