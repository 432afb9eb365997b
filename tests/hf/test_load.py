"""Folders of models that transformers loads in part."""

import pytest
import transformers

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
