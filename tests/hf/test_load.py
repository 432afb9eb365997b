"""Folders of models that transformers loads in part."""

import copy
import warnings

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import regard.hf
from models import model
from regard.cli import main
from regard.hf import _load

WAY_OUT = r"tokenizer\.save_pretrained\('.*folder'\)"


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "vit"])
def test_a_folder_without_a_tokenizer_says_so(kind, tmp_path):
    """transformers makes one without words, of some, and does not say what it lacks, of others."""
    model(kind).save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"has no vocabulary of a tokenizer.*{WAY_OUT}"):
        regard.hf.load(tmp_path / "folder")


def test_python_of_a_model_is_trusted_by_true_alone(tmp_path):
    with pytest.raises(TypeError, match="trust_remote_code is 'no'; True or False is needed"):
        regard.hf.load(tmp_path, trust_remote_code="no")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5"])
def test_a_name_of_the_hub_without_a_tokenizer_says_so(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    place, commit = tmp_path / "models--me--own", "a" * 40
    model(kind).save_pretrained(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    with pytest.raises(ValueError, match=r"me/own: the hub gives no vocabulary .* into a folder"):
        regard.hf.load("me/own")


def test_the_command_line_does_not_read_without_a_tokenizer(tmp_path, capsys):
    model("bert").save_pretrained(tmp_path / "folder")
    with pytest.raises(SystemExit) as end:
        main(["show", "--model", str(tmp_path / "folder"), "the cat"])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert "tokenizer.save_pretrained(" in err


def test_a_tokenizer_without_a_vocabulary_needs_no_file(tmp_path):
    transformers.PerceiverConfig().save_pretrained(tmp_path)
    found = _load._tokenizer(tmp_path, {"local_files_only": True})
    assert found.decode(found("a cat")["input_ids"][1:-1]) == "a cat"


@pytest.mark.parametrize(
    ("file", "is_one"),
    [
        ("tokenizer.json", True), ("vocab.txt", True), ("spiece.model", True),
        ("tekken.json", True), ("sentencepiece.bpe.model", True), ("merges.txt", True),
        ("dict.txt", True), ("tokenizer_config.json", False), ("added_tokens.json", False),
        ("config.json", False), ("special_tokens_map.json", False), ("model.safetensors", False),
        ("README.md", False), ("pytorch_model.bin", False), ("tokenization_own.py", False),
        ("generation_config.json", False), ("preprocessor_config.json", False),
    ],
)  # fmt: skip
def test_which_files_have_the_words_of_a_tokenizer(file, is_one):
    assert bool(_load.VOCABULARY.search(file)) == is_one


def test_a_reason_of_several_lines_is_told_whole(tmp_path, monkeypatch):
    def fails(name, **_):
        raise ValueError("It is one of:\n (1) this,\n (2) that.")

    model("bert").save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(ValueError, match=r"cannot load it: It is one of: \(1\) this, \(2\) that\."):
        regard.hf.load(tmp_path)


def written(folder, found, **options):
    """The folder, with a model and a tokenizer of one word."""
    found.save_pretrained(folder)
    plain = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    plain.pre_tokenizer = Whitespace()
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **options)
    own.save_pretrained(folder)
    return folder


def test_weights_that_no_file_has_are_told(tmp_path):
    written(tmp_path, model("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        regard.hf.load(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for name in ("q", "k"):
        del weights[f"model.layers.1.self_attn.{name}_proj.weight"]
    save_file(weights, path, {"format": "pt"})
    match = r"layers\.1\.self_attn\.k_proj\.weight and 1 more are missing from its weights"
    with pytest.warns(UserWarning, match=match) as told:
        regard.hf.load(tmp_path)
    assert told[0].filename == __file__


def test_the_encoder_of_an_encoder_decoder_reads_alone(tmp_path):
    config = copy.deepcopy(model("t5").config)
    written(tmp_path, transformers.T5EncoderModel(config))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = regard.hf.read(tmp_path, "a a a")
    assert (found.tokens, [*found.groups]) == (("a",) * 3, [""])


def bert_to_bert(config):
    parts = [copy.deepcopy(config) for _ in range(2)]
    parts[1].is_decoder = parts[1].add_cross_attention = True
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    both.decoder_start_token_id = both.pad_token_id = 0
    return transformers.EncoderDecoderModel(config=both)


@pytest.mark.parametrize("kind", ["t5", "bert to bert", "llama", "narrow"])
def test_a_tokenizer_may_give_more_than_the_model_takes(kind, tmp_path, monkeypatch):
    found = model("bert" if kind in ("bert to bert", "narrow") else kind)
    found = bert_to_bert(found.config) if kind == "bert to bert" else found
    if kind == "narrow":  # it takes no others
        forward = transformers.BertModel.forward

        def narrow(self, input_ids, attention_mask=None):
            return forward(self, input_ids, attention_mask)

        monkeypatch.setattr(transformers.BertModel, "forward", narrow)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    written(tmp_path, found, model_input_names=names)
    recording = regard.hf.read(tmp_path, "a a a")
    tokens = recording.groups["encoder"].tokens if "encoder" in recording.groups else None
    assert (tokens or recording.tokens)[:3] == ("a",) * 3


def test_a_model_with_its_own_attention_alone_says_so(tmp_path):
    config = transformers.GPTJConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)
    written(tmp_path, transformers.GPTJModel(config))
    with pytest.raises(ValueError, match="cannot load it: it computes its attention by itself"):
        regard.hf.load(tmp_path)


def test_a_model_that_needs_pictures_too_says_so(tmp_path):
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 32, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=sizes | {"vocab_size": 97}, vision_config=sizes)
    written(tmp_path, transformers.CLIPModel(config))
    with pytest.raises(ValueError, match=r"does not read a text alone: .* regard.hf.record"):
        regard.hf.read(tmp_path, "a a a")


def test_a_model_without_an_end_of_positions_reads_every_text(tmp_path):
    sizes = {"vocab_size": 97, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 32}
    found = transformers.XLNetModel(transformers.XLNetConfig(**sizes))
    assert found.config.max_position_embeddings == -1
    own = pytest.raises(regard.RecordingError, match="no attention was computed")
    with pytest.warns(UserWarning, match="XLNetRelativeAttention computes its own"), own:
        regard.hf.read(written(tmp_path, found), "a a a")
