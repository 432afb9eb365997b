"""``regard generate``: the prompt and its continuation, and nothing else."""

from cli.conftest import start
from regard.lm import LanguageModel
from regard.recording import Recording


def test_the_output_is_the_prompt_and_what_the_model_says(regard, model):
    result = regard("generate", "import ", "--tokens", 9, "--model", model)
    assert result.out == "import " + LanguageModel.load(model).generate("import ", 9)
    assert result.err == ""


def test_the_output_is_utf_8_whatever_the_surroundings_are(model, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    out, err = start("generate", "é\n", "--tokens", 0, "--model", model).communicate(timeout=60)
    assert (out, err) == ("é\n".encode(), b"")


def test_no_tokens_give_the_prompt_back(regard, model):
    assert regard("generate", " a\n", "--tokens", 0, "--model", model).out == " a\n"


def test_the_prompt_may_come_from_standard_input(regard, model):
    given = regard("generate", "import", "--model", model, "--tokens", 5)
    assert regard("generate", "-", "--model", model, "--tokens", 5, stdin=b"import") == given


def test_the_seed_decides_what_is_drawn(regard, model):
    def drawn(seed):
        line = ["generate", "def", "--tokens", 20, "--temperature", 1, "--seed", seed]
        return regard(*line, "--model", model).out

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_text_comes_as_it_is_generated(regard, model, monkeypatch):
    shown = []

    def stream(self, text, tokens, **options):
        import sys

        for n in range(3):
            shown.append(sys.stdout.getvalue())
            yield str(n)

    monkeypatch.setattr(LanguageModel, "stream", stream)
    assert regard("generate", "a", "--model", model).out == "a012"
    assert shown == ["a", "a0", "a01"]


def test_what_was_attended_to_can_be_kept(regard, model, tmp_path):
    path = tmp_path / "kept.safetensors"
    out = regard("generate", "import", "--tokens", 6, "--model", model, "--record", path).out
    assert Recording.load(path).tokens == LanguageModel.load(model).record(out).tokens


def test_what_was_kept_tells_where_the_model_began_to_write(regard, model, tmp_path):
    path = tmp_path / "kept.safetensors"
    out = regard("generate", "import", "--tokens", 6, "--model", model, "--record", path).out
    boundary = Recording.load(path).boundary
    tokenizer = LanguageModel.load(model).tokenizer
    spelled = [tokenizer.bytes(i) for i in tokenizer.encode(out, bos=True)]
    assert len(b"".join(spelled[:boundary])) <= len(b"import")
    assert len(b"".join(spelled[: boundary + 1])) > len(b"import")


def test_where_nothing_was_written_there_is_no_boundary(regard, model, tmp_path):
    path = tmp_path / "kept.safetensors"
    regard("generate", "import", "--tokens", 0, "--model", model, "--record", path)
    assert Recording.load(path).boundary is None


def test_where_nothing_can_be_kept_nothing_is_generated(regard, model, tmp_path):
    for path, message in (
        (tmp_path / "none" / "a.safetensors", "No such file or directory"),
        (tmp_path, "is a folder; saving needs the name of a file"),
        ("", "is a folder; saving needs the name of a file"),
    ):
        result = regard("generate", "import", "--model", model, "--record", path)
        assert (result.code, result.out) == (1, "")
        assert message in result.err


def test_an_empty_name_of_a_model_is_not_the_current_folder(regard, model, tmp_path, monkeypatch):
    monkeypatch.chdir(model)
    for command in ("generate", "show", "heads"):
        result = regard(command, "import", "--model", "")
        assert (result.code, result.out) == (2, "")
        assert "the name is empty; name builtin, or . for this folder." in result.err
