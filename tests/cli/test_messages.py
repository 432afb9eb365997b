"""What the command line says of bad input: one line, on standard error, with the way out."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cli.conftest import start
from regard._backends import kernel_calls
from regard.lm import memory
from regard.lm.model import LanguageModel

MISSING = "notes.txt: no such file. To show these words as a text, add --text."
WHY = "its compiler could not make it, or REGARD_TARGETS named others"


def refusal(result, code=2):
    """The message: one line, and nothing on standard output."""
    assert result.code == code
    assert result.out == ""
    assert result.err.startswith("regard: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("regard: ").strip()


@pytest.mark.parametrize("command", ["show", "heads", "view", "generate"])
def test_a_text_without_quotes_is_refused_with_the_way_out(regard, command):
    message = refusal(regard(command, "the", "cat", "sat"))
    assert message.endswith("(cat sat). A text of several words stands in quotes.")


def test_an_empty_text_is_refused(regard):
    assert refusal(regard("show", "")) == "The text is empty; at least one character is needed."
    assert "Standard input is empty" in refusal(regard("show", "-"))
    assert "The prompt is empty" in refusal(regard("generate", ""))


def test_an_empty_file_is_refused_by_its_name(regard, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert "empty.txt is empty" in refusal(regard("show", tmp_path / "empty.txt"))


def test_a_file_that_is_no_text_is_refused_where_it_stops_being_one(regard, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc\xff\xfe")
    message = refusal(regard("show", tmp_path / "a.bin"))
    assert message.endswith("a.bin: not a text; byte 3 is no UTF-8. Convert it to UTF-8 first.")
    (tmp_path / "a.bin").write_bytes("\ufeffabc".encode() + b"\xff\xfe")
    assert "byte 6 is no UTF-8" in refusal(regard("show", tmp_path / "a.bin"))
    (tmp_path / "b").write_bytes(b"abcdefghijklm\0")
    assert "b: not a text; byte 13 is zero" in refusal(regard("show", tmp_path / "b"))


def test_a_command_line_that_is_no_text_is_refused(regard):
    for line, name in ((["show", "a\udcff"], "The text"), (["generate", "a\udcff"], "The prompt")):
        assert refusal(regard(*line)).startswith(f"{name}: not a text; byte 1 is no UTF-8.")


def test_standard_input_that_is_no_text_is_refused(regard):
    for line in (["show", "-"], ["generate", "-"]):
        message = refusal(regard(*line, stdin=b"\xff"))
        assert message.startswith("standard input: not a text; byte 0 is no UTF-8.")


@pytest.mark.parametrize(
    "name", ["notes.txt", "folder/notes", "a.safetensors", "my notes.md", "a.npz"]
)
def test_a_missing_file_is_named_and_how_to_pass_it_as_a_text(regard, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(regard("show", name)) == MISSING.replace("notes.txt", name)


def test_a_folder_is_refused(regard, tmp_path):
    message = refusal(regard("show", tmp_path))
    assert message.endswith(": a folder. Name one file in it; to show the word, add --text.")


def test_a_file_that_may_not_be_read_is_refused(regard, tmp_path, monkeypatch):
    def refuse(path, flags):  # what the system answers to anybody but root
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (tmp_path / "a.txt").write_text("secret")
    monkeypatch.setattr("regard._base.files._without_waiting", refuse)
    assert refusal(regard("show", tmp_path / "a.txt")).endswith("a.txt: Permission denied")


def test_a_text_longer_than_memory_allows_is_refused_with_what_would_fit(
    regard, model, monkeypatch
):
    monkeypatch.setattr(memory, "free_bytes", lambda: 10_000)
    message = refusal(regard("show", "import os\n" * 50, "--model", model))
    assert re.match(r"The text has \d+ tokens; reading them needs .* GB are free\.", message)
    assert re.search(r"Give at most \d+ tokens of it at a time\.$", message)


def test_running_out_of_memory_is_one_line_too(regard, model, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError

    monkeypatch.setattr(LanguageModel, "record", exhausted)
    message = refusal(regard("show", "import os", "--model", model), code=1)
    assert message == "out of memory. Give a shorter text."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", 2], "--layer 2: there are 2 layers, 0 to 1."),
        (["--layer=-1"], "--layer -1: there are 2 layers, 0 to 1."),
        (["--head", 4], "--head 4: there are 4 heads, 0 to 3."),
        (["--layer", 1, "--head", 9], "--head 9: there are 4 heads, 0 to 3."),
        (["--query", "99"], "--query 99: the text has 3 tokens, 0 to 2."),
        (["--query", "9" * 5000], f"--query {'9' * 5000}: the text has 3 tokens, 0 to 2."),
    ],
    ids=range(6),
)
def test_a_layer_head_or_position_out_of_range_is_refused_with_the_range(
    regard, model, options, message
):
    assert refusal(regard("show", "import os", "--model", model, *options)) == message


def test_an_unknown_query_is_refused_with_the_nearest_words(regard, planted_file, model):
    message = refusal(regard("show", "import sys", "--model", model, "--query", "imprt"))
    assert message.startswith("--query 'imprt': not in the text. Nearest: 'import'")
    message = refusal(regard("show", planted_file, "--query", "zzzz"))
    assert message.endswith("Give a word of it, or a position, 0 to 8.")
    for command in ("show", "view"):
        message = refusal(regard(command, planted_file, "--query", ""))
        assert message == "--query is empty. Give a word of the text, or a position, 0 to 8."


def test_steps_of_a_long_text_are_refused(regard, model):
    message = refusal(regard("show", "import os\n" * 99, "--model", model, "--steps"))
    assert message.startswith("--steps writes out every number, for up to 64 tokens; these are ")
    assert message.endswith("Give a part of the text, or use --query instead.")


@pytest.mark.parametrize("line", [["show", "text"], ["generate", "text"]])
def test_an_unknown_model_is_refused(regard, line, tmp_path):
    message = refusal(regard(*line, "--model", tmp_path))
    assert "no language model there; a folder with a config.json is needed" in message
    assert "'builtin' is the one in the package" in message


def test_a_model_without_its_weights_is_refused(regard, model, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    assert "model.safetensors" in refusal(regard("show", "text", "--model", tmp_path))


def test_a_damaged_recording_is_refused(regard, planted_file, tmp_path):
    whole = planted_file.read_bytes()
    path = tmp_path / "cut.safetensors"
    path.write_bytes(whole[:-9])
    assert "truncated recording" in refusal(regard("show", path))
    path.write_bytes(b"not at all")
    assert "is no recording" in refusal(regard("show", path))


def test_a_recording_that_cannot_be_saved_is_a_failure(regard, model, tmp_path):
    path = tmp_path / "nowhere" / "a.safetensors"
    message = refusal(regard("show", "text", "--model", model, "--save", path), code=1)
    assert "No such file or directory" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["show"], "Missing argument 'TEXT|FILE|-'."),
        (["sow", "text"], "No such command 'sow'."),
        (["show", "text", "--wide"], "No such option: --wide"),
        (["show", "text", "--width", "20"], "'--width'"),
        (["show", "text", "--layer", "first"], "'--layer'"),
        (["generate", "text", "--tokens", "-1"], "'--tokens'"),
        (["generate", "text", "--temperature", "-1"], "'--temperature'"),
        (["train", "a.txt"], "Missing option"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(regard, line, message):
    assert message in refusal(regard(*line))


def test_help_is_given_without_any_command(regard):
    result = regard()
    assert result.code == 0
    assert 'regard show "Your journey starts with one step"' in result.out
    for name in ("show", "train", "generate"):
        assert f"\n  {name} " in result.out
        assert regard(name, "--help").code == 0


def test_the_usage_says_once_that_there_may_be_several(regard):
    for name in ("survey", "train"):
        assert regard(name, "--help").out.splitlines()[0].count("...") == 1


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ([], []),
        (["a", "b"], [f"  not {name}: this build was made without it: {WHY}" for name in "ab"]),
    ],
)
def test_the_version_comes_with_the_cpu_and_the_compiled_module(
    regard, monkeypatch, left_out, said
):
    kernels = SimpleNamespace(
        cpu_name=lambda: "some cpu_name",
        target=lambda: "some target",
        obstacles=lambda: {"amx": "some obstacle"},
        targets_left_out=lambda: left_out,
    )
    monkeypatch.setitem(sys.modules, "regard._kernels", kernels)
    lines = regard("--version").out.splitlines()
    assert re.match(r"regard \d+\.\d+", lines[0])
    assert lines[2:4] == ["CPU some cpu_name", "compiled module present, for some target"]
    assert lines[4:] == ["  not amx: some obstacle", *said]


@pytest.mark.parametrize("arguments", [["--version"], ["show", "Your journey"]])
def test_an_instruction_set_that_is_unknown_is_told_in_a_line(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "regard", *arguments],
        env={**os.environ, "REGARD_TARGET": "sse9"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    message = refusal(SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr), 1)
    assert message.startswith("REGARD_TARGET=sse9 is unknown; ")


def test_an_instruction_set_that_cannot_run_is_told_whatever_its_words_are(regard, monkeypatch):
    def refused(*_):
        raise RuntimeError("amx: the system gives none.")

    monkeypatch.setattr("regard.recording.Recording.heads", refused)
    with pytest.raises(RuntimeError, match="amx: the system"):  # a fault of ours is no message
        regard("heads", "Your journey")
    monkeypatch.setattr(kernel_calls, "kernels", SimpleNamespace(target=refused))
    message = refusal(regard("heads", "Your journey"), code=1)
    assert message == "amx: the system gives none."


def test_the_version_says_what_to_do_without_the_compiled_module(regard, monkeypatch):
    monkeypatch.setitem(sys.modules, "regard._kernels", None)  # its import fails
    out = regard("--version").out
    assert "compiled module missing: no C++ compiler that builds it was found" in out
    assert "install a newer compiler, then regard again" in out


def test_help_loads_neither_torch_nor_a_model():
    code = (
        "import sys; from regard.cli import main\n"
        "try: main(['show', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'tokenizers', 'safetensors'} & set(sys.modules))"
    )
    line = [sys.executable, "-c", code]
    out = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    assert out.splitlines()[-1] == "set()"


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_ends_with_130_and_no_traceback(model):
    process = start("generate", "import", "--tokens", 1_000_000, "--model", model)
    assert process.stdout.read(6) == b"import"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_seen_enough_is_no_error(planted_file):
    reading, writing = os.pipe()
    os.close(reading)
    process = start("show", planted_file, "--json", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == b""


def test_json_is_the_only_output_that_programs_have_to_read(planted_file, tmp_path):
    process = start("show", planted_file, "--json", "--save", tmp_path / "a.safetensors")
    out, _ = process.communicate(timeout=60)
    assert json.loads(out)["tokens"][0] == "<bos>"
