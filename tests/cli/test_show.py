"""``regard show``: what it prints is what the weights are."""

import contextlib
import json
import os
import re
import shlex
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

import regard as package
from cli.conftest import TOKENS, looks_at, planted, recording_of, start
from regard.recording import Layer, Recording
from tiny_model import TEXT

ESCAPE = "\x1b"


def section(out, name):
    """The lines of a section, its title and the blank lines left out."""
    after = re.split(rf"\n{name} [ ·]", out, maxsplit=1)[1]
    lines = after.split("\n")
    end = next((n for n, line in enumerate(lines) if re.match(r"\S", line) and n), len(lines))
    return [line for line in lines[:end] if line.strip()]


def test_a_text_is_shown_as_tokens_heads_and_weights(regard, model):
    result = regard("show", "import os", "--model", model)
    assert result.code == 0
    assert result.err == ""
    names = [line.split()[0] for line in result.out.splitlines() if re.match(r"[A-Z]", line)]
    assert names[:2] == ["Tokens", "Heads"]
    assert re.fullmatch(r"L[01]H[0-3]", names[2])


def test_tokens_are_numbered_and_their_spaces_are_seen(regard, planted_file):
    shown = " ".join(section(regard("show", planted_file).out, "Tokens")[1:])
    assert shown.split()[:6] == ["0", "<bos>", "1", "a", "2", "·b"]
    assert len(shown.split()) == 2 * len(TOKENS)


def test_the_roles_of_planted_heads_are_named_with_their_scores_and_entropies(regard, planted_file):
    out = regard("show", planted_file).out
    roles, numbers = next(
        (a.split(), b.split())
        for a, b in zip(out.splitlines(), out.splitlines()[1:])
        if a.startswith("  L0")
    )
    assert roles == ["L0", "prev", "first", "induct", "even"]
    entropy = np.mean(np.log(np.arange(1, len(TOKENS) + 1)))
    assert numbers == ["100%", "0.0", "100%", "0.0", "100%", "0.0", "100%", f"{entropy:.1f}"]
    clearest = " ".join(out.split("Clearest")[1].split())
    others = "previous token L0H0 100%, first token L0H1 100%, spread evenly L0H3 100%"
    assert clearest.startswith(f"induction L0H2 100%, {others}")


def test_a_clear_induction_head_is_shown_and_the_reason_given(regard, planted_file):
    said = "L0H2 · induction 100 %: looks at what followed the same token before"
    assert f"\n{said}\n" in regard("show", planted_file).out


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([0, 1, 3], "L0H0 · previous token 100 %: looks at the token just before"),
        ([1, 3], "L0H0 · first token 100 %: looks at the first token, its attention sink"),
        ([3], "L0H0 · spread evenly 100 %: looks at all that it sees, about evenly"),
    ],
)
def test_without_an_induction_head_the_next_best_is_shown(regard, tmp_path, kept, said):
    whole = planted().layers[0]
    layer = Layer(whole.query[kept], whole.key[kept], whole.value[kept], **whole.options)
    Recording(TOKENS, [layer]).save(tmp_path / "some.safetensors")
    assert f"\n{said}\n" in regard("show", tmp_path / "some.safetensors").out


def table_of(out, name):
    """Rows of numbers of a head's table, by query."""
    lines = [line for line in section(out, name) if re.match(r" {2,}\d+ \S+ +\d", line)]
    return [[int(n) for n in re.split(r"\s+", line.strip())[2:]] for line in lines]


@pytest.mark.parametrize("head", range(4))
def test_the_table_holds_every_visible_weight_in_per_cent(regard, planted_file, head):
    rows = table_of(regard("show", planted_file, "--head", head).out, f"L0H{head}")
    weights = np.asarray(planted().weights[0])[head]
    assert len(rows) == len(TOKENS)
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, 100 * weights[i, : i + 1], atol=0.5001)


def test_what_a_query_does_not_see_is_blank_in_the_table(regard, tmp_path):
    recording_of(looks_at(np.arange(9))[None], TOKENS, window=(1, 0)).save(
        tmp_path / "a.safetensors"
    )
    rows = table_of(regard("show", tmp_path / "a.safetensors").out, "L0H0")
    assert rows == [[100], *[[0, 100]] * 8]


def long_recording(length=300, far=7):
    """One head whose last query looks far back, and all others at themselves."""
    places = np.arange(length)
    places[-1] = far
    return recording_of(looks_at(places)[None], [f" {n}" for n in range(length)])


@pytest.fixture
def long_file(tmp_path):
    long_recording().save(tmp_path / "long.safetensors")
    return tmp_path / "long.safetensors"


def test_a_long_text_is_a_picture_in_which_no_lone_link_is_lost(regard, long_file):
    lines = [
        line
        for line in section(regard("show", long_file).out, "L0H0")
        if "│" in line or "┤" in line
    ]
    picture = [re.split("[│┤]", line)[1] for line in lines]
    columns = max(map(len, picture))
    assert picture[-1][7 * columns // 300] == "█"
    assert all(row.rstrip()[-1] == "█" for row in picture)  # the diagonal
    assert set("".join(picture[:-1])) <= set(" ·█")


def test_the_picture_in_half_blocks_has_two_rows_in_a_line(regard, long_file, colours):
    out = regard("show", long_file, "--width", 100).out
    lines = [line for line in out.splitlines() if "▀" in line]
    assert len(lines) >= 16
    assert "\x1b[38;2;254;236;168" in lines[-1]  # all of the weight
    assert "\x1b[38;2;34;28;70" in lines[5]  # none of it


def test_a_middling_text_names_each_row_of_the_picture(regard, tmp_path):
    long_recording(30, 3).save(tmp_path / "a.safetensors")
    rows = section(regard("show", tmp_path / "a.safetensors", "--width", 80).out, "L0H0")
    rows = [line for line in rows if re.match(r" +\d+ ·\d", line)]
    assert [line.split()[1] for line in rows] == [f"·{n}" for n in range(30)]
    assert rows[5].split()[2] == "··········██"
    assert rows[-1].split()[2][:10] == "······██··"


def test_the_strongest_links_are_listed_with_positions_tokens_and_weight(regard, tmp_path):
    weights = looks_at(np.zeros(100, int))
    weights[50, [0, 20]] = 0.25, 0.75
    weights[90, [0, 60]] = 0.5, 0.5
    recording_of(weights[None], [f" {n}" for n in range(100)]).save(tmp_path / "a.safetensors")
    out = regard("show", tmp_path / "a.safetensors").out
    links = [line.split()[:6] for line in section(out, "Strongest links") if "→" in line]
    assert links == [
        ["75.0%", "50", "·50", "→", "20", "·20"],
        ["50.0%", "90", "·90", "→", "60", "·60"],
    ]
    assert "Pairs with token 0, the attention sink, are left out." in " ".join(out.split())


def test_links_to_the_first_token_are_listed_where_there_are_no_others(regard, tmp_path):
    recording = recording_of(looks_at(np.zeros(100, int))[None], [f" {n}" for n in range(100)])
    recording.save(tmp_path / "a.safetensors")
    out = regard("show", tmp_path / "a.safetensors").out
    links = [line.split() for line in section(out, "Strongest links") if "→" in line]
    assert len(links) == 12
    assert {link[4] for link in links} == {"0"}
    assert "left out" not in out


def ranked(out, name):
    return [line.split()[:3] for line in section(out, name) if re.match(r" +\d+ ", line)]


def test_a_query_shows_what_it_attends_to_and_what_attends_to_it(regard, planted_file):
    out = regard("show", planted_file, "--query", "6", "--head", 2).out
    assert ranked(out, "Attends to") == [["3", "·c", "100.0%"]]
    assert section(out, "Attended by")[1:] == ["  none with 0.1% or more"]
    out = regard("show", planted_file, "--query", "3", "--head", 2).out
    assert ranked(out, "Attended by") == [["6", "·b", "100.0%"]]


def test_ranked_bars_are_as_long_as_the_weights_and_strongest_first(regard, planted_file):
    out = regard("show", planted_file, "--query", 1, "--head", 3).out
    lines = section(out, "Attended by")[1:]
    shares = [float(line.split()[2].rstrip("%")) for line in lines]
    assert shares == [round(100 / n, 1) for n in range(2, 10)]
    bars = [line.count("█") + (0.5 if re.search("[▏▎▍▌▋▊▉]", line) else 0) for line in lines]
    for share, bar in zip(shares, bars):
        assert bar == pytest.approx(share / 5, abs=0.51)


def test_of_several_occurrences_of_a_query_the_last_is_taken_and_the_others_named(
    regard, planted_file
):
    out = " ".join(regard("show", planted_file, "--query", "b").out.split())
    assert "'b' occurs 2 times; the last is taken (others: 2)." in out
    assert "The keys of query 6 ·b" in out


def test_a_token_that_has_the_query_several_times_is_named_once(regard, tmp_path):
    looks = recording_of(looks_at([0, 0, 0])[None], ["<bos>", "banana", " ananas"])
    looks.save(tmp_path / "a.safetensors")
    out = " ".join(regard("show", tmp_path / "a.safetensors", "--query", "an").out.split())
    assert "'an' occurs 2 times; the last is taken (others: 1)." in out


def test_a_word_of_several_tokens_stands_for_its_last_token(regard, planted_file):
    out = " ".join(regard("show", planted_file, "--query", "d a").out.split())
    assert "'d a' is tokens 4 to 5; the last of them is shown." in out
    assert "The keys of query 5 ·a" in out


def test_steps_are_written_out_under_their_names(regard, planted_file):
    out = regard("show", planted_file, "--steps", "--head", 1).out
    for name in (
        "query",
        "scores = query @ key.T",
        "weights = softmax",
        "output = weights @ value",
    ):
        assert f"\n{name}" in out


def test_steps_of_a_query_write_out_the_arithmetic_of_its_strongest_link(regard, planted_file):
    out = regard("show", planted_file, "--steps", "--head", 0, "--query", "6").out
    title, *lines = section(out, "Arithmetic")
    assert "query 6 ' b', key 5 ' a'" in title
    assert [line.split()[0] for line in lines if line[2] != " "][-2:] == ["weights", "output"]


def test_a_saved_recording_is_shown_again_just_as_the_text_was(regard, model, tmp_path):
    path = tmp_path / "kept.safetensors"
    first = regard("show", "import os", "--model", model, "--save", path)
    assert first.err == f"Saved; regard show {path} shows it again.\n"
    assert package.Recording.load(path).tokens[0] == "<bos>"
    assert regard("show", path).out == first.out


@pytest.mark.parametrize("name", ["dir with spaces/y z", "-x", "it's; $HOME *", "猫"])
def test_a_command_that_is_suggested_works_as_it_is(regard, model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(exist_ok=True)
    first = regard("show", "a text", "--model", model, f"--save={name}")
    said = re.fullmatch(r"Saved; (.*) shows it again\.\n", first.err)[1]
    program, *line = shlex.split(said)
    assert program == "regard"
    again = regard(*line)
    assert (again.code, again.out) == (0, first.out)


def test_a_recording_is_known_by_its_content_too(regard, planted_file, tmp_path):
    (tmp_path / "recording").write_bytes(planted_file.read_bytes())
    assert regard("show", tmp_path / "recording").out == regard("show", planted_file).out


def test_a_file_and_standard_input_give_what_the_text_gives(regard, model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("import os")
    given = regard("show", "import os", "--model", model)
    assert regard("show", file, "--model", model) == given
    assert regard("show", "-", "--model", model, stdin=b"import os") == given


@pytest.mark.parametrize("text", ["and/or", "notes.txt"])
def test_text_that_looks_like_a_file_can_be_shown(regard, model, text):
    assert regard("show", text, "--text", "--model", model).code == 0


@pytest.mark.parametrize("text", ["one or/and two", "Read it. Then stop.", "x" * 5000, "a\nb.txt"])
def test_what_does_not_look_like_a_file_is_a_text(regard, model, text):
    assert regard("show", text, "--model", model).code == 0


def test_json_holds_the_tokens_the_heads_the_weights_and_the_links(regard, planted_file):
    found = json.loads(regard("show", planted_file, "--json", "--query", "6", "--head", 2).out)
    assert list(found) == [
        "model", "tokens", "words", "query_tokens", "heads", "shown", "weights", "links", "query",
        "steps",
    ]  # fmt: skip
    assert found["tokens"] == TOKENS
    assert found["model"] == "made"
    assert found["query_tokens"] is None
    names = ["layer", "head", "role", "entropy", "distance", "scores"]
    assert [list(head) for head in found["heads"]] == [names] * 4
    roles = ["previous token", "first token", "induction", "spread evenly"]
    assert [head["role"] for head in found["heads"]] == roles
    assert [head["scores"][role] for head, role in zip(found["heads"], roles)] == [1, 1, 1, 1]
    assert found["words"] is None
    assert (found["shown"]["layer"], found["shown"]["head"]) == (0, 2)
    np.testing.assert_allclose(found["weights"], np.asarray(planted().weights[0])[2], atol=1e-6)
    link = {"query": 6, "key": 3, "weight": 1.0, "query_token": " b", "key_token": " c"}
    assert link in found["links"]
    assert found["query"]["position"] == 6
    assert found["query"]["attends_to"] == [link]
    assert found["query"]["attended_by"] == []
    assert found["steps"] is None


def test_json_has_null_where_there_is_no_number(regard, tmp_path):
    recording_of(looks_at([0, 1, 2])[None], list("abc")).save(tmp_path / "a.safetensors")
    found = json.loads(regard("show", tmp_path / "a.safetensors", "--json", "--steps").out)
    assert found["heads"][0]["scores"]["induction"] is None
    assert found["steps"]["masked"][0][1:] == [None, None]
    assert found["steps"]["weights"] == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_weights_that_are_no_numbers_are_seen_to_be_none(regard, tmp_path):
    query = np.zeros((1, 3, 2))
    query[0, 1] = np.nan
    Recording(list("abc"), [Layer(query, np.zeros((1, 3, 2)), causal=True)]).save(
        tmp_path / "a.safetensors"
    )
    out = regard("show", tmp_path / "a.safetensors").out
    assert re.search(r"\n +1 b +nan +nan\n", out)
    found = json.loads(regard("show", tmp_path / "a.safetensors", "--json").out)
    assert found["weights"][1][:2] == [None, None]
    assert found["heads"][0]["entropy"] is None


def test_json_of_a_long_text_leaves_the_weights_out(regard, long_file):
    found = json.loads(regard("show", long_file, "--json").out)
    assert found["weights"] is None
    assert len(found["links"]) == 12


def test_cross_attention_is_shown_without_roles(regard, tmp_path):
    random = np.random.default_rng(0)
    layer = Layer(*(random.standard_normal((2, n, 4)) for n in (3, 5, 5)))
    Recording(list("abcde"), [layer], query_tokens=list("xyz")).save(tmp_path / "a.safetensors")
    out = regard("show", tmp_path / "a.safetensors").out
    assert {*re.findall(r"^  L0 +(.+)$", out, re.MULTILINE)[0].split()} <= {"even", "mixed"}
    assert len(table_of(out, re.search(r"\n(L0H\d) ·", out)[1])) == 3
    out = regard("show", tmp_path / "a.safetensors", "--query", "z").out
    assert "Attended by" not in out


def test_layers_may_have_different_numbers_of_heads(regard, tmp_path):
    random = np.random.default_rng(0)
    layers = [
        Layer(*(random.standard_normal((h, 5, 4)) for _ in range(3)), causal=True) for h in (1, 3)
    ]
    Recording(list("abcde"), layers).save(tmp_path / "a.safetensors")
    out = regard("show", tmp_path / "a.safetensors").out
    assert "2 layers of 1 or 3 heads" in out
    assert regard("show", tmp_path / "a.safetensors", "--layer", 1, "--head", 2).code == 0


NASTY = ["\x1b[31mred", "\u202eevil", "日本語", "\r\n", "\t", "e\u0301\u0301", "[bold]x[/]", "🙂"]


@pytest.fixture(params=["short", "middling", "long"])
def any_file(request, tmp_path):
    length = {"short": 8, "middling": 24, "long": 90}[request.param]
    tokens = [NASTY[n % len(NASTY)] for n in range(length)]
    path = tmp_path / "nasty.safetensors"
    random = np.random.default_rng(0)
    recording_of(random.dirichlet(np.full(length, 0.1), (13, length)), tokens).save(path)
    return path


@pytest.mark.parametrize("width", [60, 71, 100, 163])
@pytest.mark.parametrize("options", [[], ["--query", "1"]])
def test_every_line_fits_the_width_whatever_the_tokens_are(regard, any_file, width, options):
    lines = regard("show", any_file, "--width", width, *options).out.splitlines()
    assert len(lines) > 8
    assert max(map(cell_len, lines)) <= width
    assert not [line for line in lines if line != line.rstrip()]


@pytest.mark.parametrize("unit", ["--words", "--pieces"])
def test_tokens_are_text_never_commands_or_markup(regard, any_file, unit):
    out = regard("show", any_file, unit, "--width", 163).out
    assert ESCAPE not in out
    assert "\u202e" not in out
    assert unit == "--words" or "[bold]x[/]" in out


def test_the_name_of_a_model_is_text_too(regard, tmp_path):
    recording = recording_of(np.eye(3)[None], list("abc"))
    named = Recording(recording.tokens, recording.layers, model="a\x1b[31m")
    named.save(tmp_path / "a.safetensors")
    assert "model a\\x1b[31m" in regard("show", tmp_path / "a.safetensors").out
    assert regard("show", f"{ESCAPE}.safetensors").err.startswith("regard: \\x1b.safetensors: ")


def test_characters_of_several_tokens_are_whole_in_words(regard):
    out = regard("show", "naïve café", "--query", "café").out
    assert "The keys of query 2 ·café" in out
    assert regard("show", "naïve café", "--query", "café", "--pieces").code == 0


def test_output_that_is_no_terminal_is_plain_text(regard, planted_file):
    for options in ([], ["--query", "1"], ["--steps"]):
        assert ESCAPE not in regard("show", planted_file, *options).out


def test_no_color_leaves_shades_and_numbers(regard, long_file, colours, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = regard("show", long_file).out
    assert "▀" not in out
    assert "█" in out
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", out)


def test_colours_repeat_what_numbers_and_words_say(regard, planted_file, colours):
    coloured = regard("show", planted_file, "--width", 80).out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert ESCAPE in coloured
    for word in ("induct", "prev", "first", "even", "100%"):
        assert word in plain
    assert table_of(plain, "L0H2")[6] == [0, 0, 0, 100, 0, 0, 0]


def test_an_output_without_unicode_gets_other_signs(long_file, planted_file, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    for options in ([long_file], [planted_file, "--query", "1"]):
        out, err = start("show", *options).communicate(timeout=60)
        assert err == b""
        assert out.isascii()
        assert b"@" in out or b"#####" in out
    out, err = start("heads", "Your journey starts with one step").communicate(timeout=60)
    assert err == b""
    assert out.isascii()
    assert b"previous" in out


@pytest.mark.skipif(sys.platform == "win32", reason="terminals of POSIX")
def test_a_terminal_gets_colours_at_its_own_width(planted_file, monkeypatch):
    monkeypatch.setenv("COLORTERM", "truecolor")
    import fcntl
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 72, 0, 0))
    process = start("show", planted_file, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    out = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while part := os.read(ours, 4096):
            out += part
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"\x1b[38;2;" in out
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.decode()).splitlines()
    assert 60 < max(map(cell_len, lines)) <= 72


def test_a_long_text_read_by_the_model_fits_too(regard, model):
    result = regard("show", "-", "--model", model, "--width", 80, stdin=TEXT.encode())
    assert result.code == 0
    assert max(map(cell_len, result.out.splitlines())) <= 80


def test_weights_that_exist_are_shown_and_have_no_steps(regard, tmp_path):
    halves = np.tril(np.ones((1, 3, 3))) / np.arange(1, 4)[:, None]
    Recording.from_weights(["a", "b", "c"], [halves]).save(tmp_path / "a.safetensors")
    result = regard("show", tmp_path / "a.safetensors", "--width", 100)
    assert (result.code, result.err) == (0, "")
    assert re.search(r"2 c +33 +33 +33", result.out)
    assert regard("show", tmp_path / "a.safetensors", "--json").code == 0
    assert regard("heads", tmp_path / "a.safetensors").code == 0
    result = regard("show", tmp_path / "a.safetensors", "--steps")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("regard: --steps: query and key are not known")


def pieces_file(tmp_path, length=8):
    """Words of two pieces each, after <bos>; the head looks at random places."""
    tokens = ["<bos>", *[piece for n in range(length) for piece in (f" w{n}", "x")]]
    weights = np.random.default_rng(0).dirichlet(np.ones(len(tokens)), len(tokens))
    recording_of(weights[None], tokens).save(tmp_path / "pieces.safetensors")
    return tmp_path / "pieces.safetensors"


def test_a_short_text_is_shown_by_words_and_pieces_bring_it_back(regard, tmp_path):
    path = pieces_file(tmp_path)
    out = regard("show", path).out
    assert out.startswith("17 tokens in 9 words, 1 layer of 1 head, ")
    assert section(out, "Words")[1].split()[:6] == ["0", "<bos>", "1", "·w0x", "2", "·w1x"]
    rows = table_of(out, "L0H0")
    expected = np.asarray(Recording.load(path).in_words().weights[0].head(0))
    assert len(rows) == 9
    for i, row in enumerate(rows):
        np.testing.assert_allclose(row, 100 * expected[i, : i + 1], atol=0.5001)
    pieces = regard("show", path, "--pieces").out
    assert pieces.startswith("17 tokens, 1 layer of 1 head,")
    assert len(table_of(pieces, "L0H0")) == 17


def test_a_text_of_200_tokens_is_shown_by_pieces_unless_words_are_asked_for(regard, tmp_path):
    path = pieces_file(tmp_path, 110)
    assert regard("show", path).out.startswith("221 tokens, ")
    out = regard("show", path, "--words").out
    assert out.startswith("221 tokens in 111 words, ")
    assert "the 111 queries; across: the 111 keys" in " ".join(out.split())
    links = [line.split() for line in section(out, "Strongest links") if "→" in line]
    assert all(re.fullmatch(r"·w\d+x", link[2]) for link in links)


def test_a_query_may_be_a_word(regard, tmp_path):
    path = pieces_file(tmp_path)
    for unit, said in (("--words", "9 words, 0 to 8"), ("--pieces", "17 tokens, 0 to 16")):
        assert f"the text has {said}." in regard("show", path, "--query", "99", unit).err
    out = regard("show", path, "--query", "w3x").out
    assert "The keys of query 4 ·w3x" in out
    expected = Recording.load(path).in_words().weights[0].head(0)[4]
    shares = {line.split()[0]: line.split()[2] for line in section(out, "Attends to")[1:]}
    assert shares["4"] == f"{expected[4]:.1%}"


def test_json_and_steps_are_of_pieces_unless_words_are_asked_for(regard, tmp_path):
    path = pieces_file(tmp_path)
    assert len(json.loads(regard("show", path, "--json").out)["tokens"]) == 17
    found = json.loads(regard("show", path, "--json", "--words").out)
    assert found["tokens"][:2] == ["<bos>", " w0x"]
    assert found["words"][:2] == [[0, 1], [1, 3]]
    assert found["words"][-1] == [15, 17]
    np.testing.assert_allclose(np.sum(found["weights"], -1), 1, atol=1e-4)
    assert "Arithmetic" in regard("show", path, "--steps", "--query", 4).out
    result = regard("show", path, "--steps", "--words")
    assert (result.code, result.out) == (2, "")
    assert "--steps writes out the pieces of words; leave --words out." in result.err


def test_where_it_cannot_be_saved_nothing_is_read(regard, model, tmp_path, monkeypatch):
    monkeypatch.setattr("regard.lm.LanguageModel.load", None)
    path = tmp_path / "none" / "a.safetensors"
    result = regard("show", "a text", "--model", model, "--save", path)
    assert (result.code, result.err) == (1, f"regard: {path}: No such file or directory\n")


def test_steps_are_as_wide_as_the_rest_on_a_narrow_terminal(regard, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    narrow = regard("show", "ab", "--steps", "--model", model).out
    monkeypatch.delenv("COLUMNS")
    assert narrow == regard("show", "ab", "--steps", "--model", model, "--width", 60).out


def test_one_of_a_kind_is_counted_in_the_singular(regard, tmp_path):
    x = np.ones((1, 1, 4))
    Recording(["a"], [Layer(x, x, x)]).save(tmp_path / "a.safetensors")
    assert regard("show", tmp_path / "a.safetensors").out.startswith("1 token, 1 layer of 1 head\n")


def test_a_head_whose_weights_are_no_numbers_is_not_called_mixed(regard, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 5, 4))
    x[1, 2] = np.nan
    Recording(list("abcde"), [Layer(x, x, x, causal=True)]).save(tmp_path / "a.safetensors")
    lines = section(regard("show", tmp_path / "a.safetensors").out, "Heads")
    assert next(line for line in lines if line.startswith("  L0")).split()[-1] == "NaN"
    assert "nan" not in "".join(lines)
