"""The steps of a small attention as they are printed, and the arithmetic of one cell."""

import copy
import html
import math
import pickle
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from recordings import numbers
from regard._base import tables
from regard._showing.steps import Steps, steps
from small import OPTIONS, journey, qkv


def test_the_printed_text_names_every_step_its_formula_and_shape():
    found = steps(
        *qkv(), causal=True, window=(2, None), mask=OPTIONS["mask"], bias=OPTIONS["bias"],
        key_lengths=5, segments=OPTIONS["segments"], sinks=OPTIONS["sinks"], softcap=2.5,
        dropout=0.25, seed=1, scale=0.5,
    )  # fmt: skip
    headings = [line for line in str(found).split("\n") if line and not line.startswith(" ")]
    assert headings == [
        "query",
        "key",
        "value",
        "scores = query @ key.T",
        "scaled = scores * 0.5",
        "capped = 2.5 * tanh(scaled / 2.5)",
        "masked = capped + bias, -inf where a query must not look: causal, window=(2, None), mask,"
        " key_lengths, segments",
        "weights = softmax of each row of masked, with a sink that takes a share",
        "dropped = weights, each set to 0 with probability 0.25, the others / 0.75",
        "output = dropped @ value",
    ]
    assert str(found).count("shape (4, 3, 5)") == 6
    assert repr(found) == (
        "Steps(4 heads, 3 x 5, head size 6, causal, window=(2, None), mask, key_lengths, segments)"
    )
    assert "scaled = scores / sqrt(6)" in str(steps(*qkv()))


def test_labels_are_the_tokens_of_queries_and_keys():
    q, k, v = (x[0] for x in qkv(Lq=2, Lk=3))
    found = steps(q, k, v, tokens=["aa", "bb", "cc"])
    assert (found.query_tokens, found.tokens) == (("bb", "cc"), ("aa", "bb", "cc"))
    assert re.search(r"\n +aa +bb +cc\n  bb +-?\d.*\n  cc +-?\d", str(found))
    assert steps(q, k, v, tokens=["aa", "bb", "cc"], query_start=0).query_tokens is None
    crossed = steps(q, k, v, tokens=["aa", "bb", "cc"], query_tokens=["x", "y"])
    assert crossed.query_tokens == ("x", "y")


def test_large_matrices_are_cut_in_the_middle():
    q, k, v = qkv(Hq=7, Hkv=7, Lq=300, Lk=300, D=2)
    text = str(steps(q, k, v, causal=True))
    assert max(map(len, text.split("\n"))) <= tables.TEXT_WIDTH
    assert text.count("\n") < 700
    assert "... and 3 more" in text
    assert re.search(r"\n +0 +1 +2 .*\.\.\. .* 298 +299\n", text)
    assert re.search(r"\n  5 .*\n  \.\.\. .*\n  295 ", text)


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([0.0, 1.0, -2.0], ["0", "1", "-2"]),
        ([0.5, -0.00001], ["0.5000", "-0.0000"]),
        ([1234.5, 0.25], ["1234.5", "0.2"]),
        ([12.3456, 1.0], ["12.346", "1.000"]),
        ([2e7, 0.5], ["2.000e+07", "5.000e-01"]),
        ([1e-5, 0.0], ["1.000e-05", "0.000e+00"]),
        ([-0.0, 3.0], ["0", "3"]),
        ([math.inf, -math.inf, math.nan, 0.5], ["inf", "-inf", "nan", "0.5000"]),
    ],
)
def test_numbers_of_one_matrix_have_the_same_number_of_digits(values, written):
    write = tables._writer(tables.Table("x", "", np.array(values), None, None))
    assert [write(x) for x in values] == written


def test_printing_ends_at_ascii_unless_the_tokens_do_not():
    assert str(steps(*qkv(), causal=True, softcap=2.0)).isascii()


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "·the"),
        ("end ", "end·"),
        ("  ", "··"),
        ("a b", "a b"),
        ("\n", r"\n"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\u202eabc", r"\u202eabc"),
        ("\ud800", r"\ud800"),
        ("a" * 20, "a" * 10 + ".."),
        ("", ""),
    ],
)
def test_tokens_are_shown_on_one_short_line(token, shown):
    assert tables.printable(token) == shown


HOSTILE = [
    "<script>alert(1)</script>"[:12],
    "\x1b[31mred",
    '"><img src=x>',
    "[bold]x",
    "&amp;",
    "\n",
]


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style", "class", "scope"}

    def handle_data(self, data):
        self.text.append(data)


def test_html_never_interprets_a_token():
    x = journey().numpy()
    page = Steps.from_inputs(x, tokens=HOSTILE, causal=True)._repr_html_()
    parser = Tags()
    parser.feed(page)
    assert parser.tags == {"div", "p", "b", "code", "br", "small", "table", "tr", "th", "td"}
    for token in HOSTILE:
        assert html.escape(tables.printable(token)) in page
    assert "\x1b" not in page


def test_html_has_no_formula_where_there_is_none():
    page = steps(np.eye(2), np.eye(2), np.eye(2))._repr_html_()
    assert "<b>query</b><br>" in page
    assert "<b>scores</b> <code>= query @ key.T</code><br>" in page


def test_html_writes_every_number_and_greys_what_is_hidden():
    found = steps(np.eye(2), np.eye(2), np.array([[2.0, -2.0], [0.5, 1.0]]), causal=True, scale=1.0)
    page = found._repr_html_()
    weights = page[page.index("<b>weights</b>") : page.index("<b>output</b>")]
    cells = re.findall(r'<td style="([^"]*)">([^<]*)</td>', weights)
    assert [text for _, text in cells] == ["1.0000", "0.0000", "0.2689", "0.7311"]
    assert [style.startswith(tables.INVISIBLE) for style, _ in cells] == [
        False,
        True,
        False,
        False,
    ]
    values = page[page.index("<b>value</b>") : page.index("<b>scores")]
    styles = re.findall(r'<td style="background:(#\w+);color:(#\w+)', values)
    assert styles[0] == ("#6e0822", "#ffffff")  # the largest positive
    assert styles[1] == ("#0d3478", "#ffffff")  # the largest negative
    assert styles[2][1] == "#000000"  # a light colour has black ink


def test_a_terminal_gets_colours_and_the_same_numbers():
    found = steps(*(x[0] for x in qkv()), causal=True, tokens=HOSTILE[:5])
    coloured = Console(
        width=80, force_terminal=True, color_system="truecolor", legacy_windows=False
    )
    with coloured.capture() as capture:
        coloured.print(found)
    text = capture.get()
    assert "\x1b[" in text
    assert "\x1b[31mred" not in text
    plain = Console(width=80, color_system=None, force_terminal=False)
    with plain.capture() as capture:
        plain.print(found)
    text = capture.get()
    assert "\x1b" not in text
    assert "[bold]x" in text
    assert max(map(len, text.split("\n"))) <= 80
    for number in found.output.ravel():
        assert f"{number:.4f}" in text


def test_wide_characters_keep_columns_aligned():
    text = str(steps(*(x[0] for x in qkv(Lq=3, Lk=3)), tokens=["猫", "ab", "e\u0301"]))
    block = text[text.index("weights =") :].split("\n")[3:6]
    assert len({cell_len(line) for line in block}) == 1


# One cell.


def test_explain_writes_the_arithmetic_of_one_weight():
    q = np.array([[1.0, 2.0], [3.0, -1.0]])
    k = np.array([[1.0, 0.0], [0.5, 0.5]])
    v = np.array([[1.0, 0.0], [0.0, 1.0]])
    bias = np.array([[0.0, 0.0], [0.25, 0.0]])
    found = steps(q, k, v, scale=0.5, softcap=4.0, bias=bias, causal=True, tokens=["a", " b"])
    assert found.explain(1, 0).split("\n") == [
        "query 1 ' b', key 0 'a'",
        "scores   3*1 + -1*0 = 3",
        "scaled   3 * 0.5 = 1.5",
        "capped   4 * tanh(1.5 / 4) = 1.4334",
        "masked   1.4334 + 0.25 of the bias = 1.6834",
        "weights  exp(1.6834 - 1.6834) / (exp(1.6834 - 1.6834) + exp(0.49741 - 1.6834)) = 0.76603",
        "output   0.76603 * value 0 + 0.23397 * value 1 = [0.76603, 0.23397]",
    ]
    assert found.explain(0, 1).split("\n")[4:] == [
        "masked   -inf: query 0 does not attend to key 1",
        "weights  nothing is left of exp(-inf) = 0",
        "output   1 * value 0 = [1, 0]",
    ]
    assert "masked   1.4334: query 1 attends to key 0" in steps(
        q, k, v, scale=0.5, softcap=4.0, causal=True
    ).explain(-1, 0)


def test_explain_is_right_about_sinks_dropout_heads_and_long_sums():
    q, k, v = (x[None].repeat(2, 0) for x in qkv(D=20, Lk=30))
    found = steps(q, k, v, sinks=np.array([0.0, 1.0, 2.0, 9.0]), dropout=0.5, seed=3)
    lines = found.explain(2, 29, head=(1, 3)).split("\n")
    weight = found.weights[1, 3, 2, 29]
    assert lines[1].count("*") == 5
    assert f"{found.scores[1, 3, 2, 29]:.5g}" in lines[1]
    assert "exp(9 - 9)" in lines[3]
    assert lines[3].endswith(f"= {weight:.5g}")
    assert lines[4] == f"dropped  {found.dropped[1, 3, 2, 29]:.5g}"
    shared = steps(q, k[:1], v[:1]).explain(0, 0, head=(1, 3))
    assert f"*{k[0, 1, 0, 0]:.5g}" in shared
    assert f"*{k[0, 0, 0, 0]:.5g}" in steps(q, k[:1], v[:1]).explain(0, 0, head=(1, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.explain(3, 0, head=0), "query 3; there are 3"),
        (lambda s: s.explain(0, -6, head=0), "key -6; there are 5"),
        (lambda s: s.explain(0, 0, head=4), "head 4; there are 4"),
        (
            lambda s: s.explain(0, 0),
            r"head \(\); one index is needed for each of .* \(4,\), as in head=\(0,\)",
        ),
    ],
)
def test_explain_says_which_cells_there_are(call, message):
    with pytest.raises(IndexError, match=message):
        call(steps(*qkv()))


def test_explain_keeps_terms_that_are_no_numbers():
    q, k = np.eye(2), np.array([[np.nan, 0.0], [0.0, 1.0]])
    found = steps(q, k, scale=1.0)
    assert found.explain(0, 1).split("\n")[3] == (
        "weights  exp(0 - nan) / (exp(nan - nan) + exp(0 - nan)) = nan"
    )
    alone = steps(q, k, scale=1.0, causal=True).explain(0, 0)
    assert alone.split("\n")[-1] == "weights  exp(nan - nan) / (exp(nan - nan)) = nan"


def test_explain_takes_no_difference_of_infinities():
    found = steps(np.full((1, 2), 1e200), np.full((1, 2), 1e200), bias=np.ones((1, 1)))
    assert "masked   inf + the bias = inf" in found.explain(0, 0).split("\n")


@pytest.mark.parametrize("write", [str, lambda found: found._repr_html_()], ids=["text", "html"])
def test_a_tensor_that_was_written_to_since_says_so_where_it_is_printed(write):
    note = "written to since: later steps have its old numbers"
    x, w, k, v = (torch.eye(2) for _ in range(4))
    found, projected = steps(x, k, v), Steps.from_inputs(x, w, w, w)
    assert note not in write(found)
    assert note not in write(projected)
    x += 1
    assert write(found).count(note) == write(projected).count(note) == 1
    w += 1  # is not printed itself
    assert write(projected).count(note) == 1
    assert note not in write(Steps.from_inputs(x, w, w, w))


def test_numbers_near_the_largest_are_printed_without_a_warning():
    q, k, v = (1e200 * np.eye(2) for _ in range(3))
    assert "range 0 to 1e+200   variance inf" in str(steps(q, k, v))


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_steps_that_are_copied_or_read_know_which_tensors_were_written_to(again):
    q, k, v = (torch.from_numpy(numbers(3, 2, seed=n)) for n in range(3))
    for x in (q, k, v):
        x.mul_(2)  # before
    first = steps(q, k, v)
    found = again(first)
    assert "written to" not in str(found)
    assert found.explain(0, 1) == first.explain(0, 1)
    assert found.backward(v).d_query.equal(first.backward(v).d_query)
    k.mul_(2)
    for some in (again(first), again(again(first))):
        assert str(some).count("written to") == 1
        with pytest.raises(RuntimeError, match="explain: key was written to"):
            some.explain(0, 1)


@pytest.mark.parametrize("inputs", [False, True])
def test_deep_copies_of_steps_that_autograd_follows_have_no_graph(inputs):
    q, k, v = (torch.from_numpy(numbers(3, 3, seed=n)).requires_grad_() for n in range(3))
    bias = v * 2
    first = (
        Steps.from_inputs(q * 1, k, k * 2, v, bias=bias)
        if inputs
        else steps(q * 1, k, v, bias=bias)
    )
    found = copy.deepcopy(first)
    assert str(found) == str(first)
    assert found.explain(0, 1) == first.explain(0, 1)
    gradients = first.backward(torch.ones_like(first.output))
    assert copy.deepcopy(gradients).explain(1, 0) == gradients.explain(1, 0)
    assert (first.output.requires_grad, found.output.requires_grad) == (True, False)
    assert found.output.data_ptr() != first.output.data_ptr()
    assert found._call.query.data_ptr() == found.query.data_ptr()
    found.query.zero_()
    assert first.query.any()
    first.output.sum().backward()
    assert k.grad.any()


def evaluated(line):
    """Both sides of the last equation of a line of ``explain``."""
    text, _, result = line.split(":")[0].rpartition(" = ")
    return eval(text.split(maxsplit=1)[1], {"exp": np.exp, "sqrt": np.sqrt}), float(result)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e7, 1e-7, 123456.789])
def test_the_arithmetic_of_scores_of_any_size_can_be_followed(size):
    q = np.array([[size, 1.0]])
    k = np.array([[1.0, 0.3], [1.0, 1.5], [1.0, -1.0]])
    found = steps(q, k, k, scale=1.0)
    scores, scaled, weights, output = found.explain(0, 1).splitlines()[1:]
    for line in (scores, scaled, weights):
        result, told = evaluated(line)
        assert told == pytest.approx(result, rel=2e-3, abs=1e-6)
        assert told == pytest.approx(result, abs=2e-3)
    assert float(scores.rpartition(" = ")[2]) == pytest.approx(size + 1.5, abs=1e-3)
    assert output.endswith(f"= [1, {found.output[0, 1]:.5g}]")


@pytest.mark.parametrize("size", [1.0, 1e5, 1e-7])
def test_the_arithmetic_of_gradients_of_any_size_can_be_followed(size):
    x = np.array([[size, 1.0], [size, -1.0]])
    gradients = steps(np.eye(2), np.eye(2), x, scale=1.0).backward(np.array([[1.0, 1.0]] * 2))
    lines = gradients.explain(0, 1).splitlines()
    (line,) = [line for line in lines if line.startswith("d_scaled")]
    result, told = evaluated(line)
    assert told == pytest.approx(result, rel=2e-3)


def test_gradients_do_not_show_digits_of_rounding():
    value = np.random.default_rng(0).normal(size=(1, 4)).astype("float32").repeat(3, 0)
    x = np.random.default_rng(1).normal(size=(3, 4)).astype("float32")
    lines = steps(x, x, value).backward(np.ones((3, 4), "float32")).explain(0, 1).splitlines()
    (line,) = [line for line in lines if line.startswith("d_scaled")]
    less = line[line.index("(") + 1 : line.index(")")].split()
    assert max(len(number.lstrip("-").replace(".", "")) for number in less) <= 9


def test_the_note_of_a_tensor_that_was_written_to_stands_under_its_facts():
    q, k = torch.eye(2), torch.eye(2)
    found = steps(q, k)
    k += 1
    under = str(found).split("key\n")[1].split("\n")
    assert under[1] == "  written to since: later steps have its old numbers"
    assert max(map(len, under)) <= tables.TEXT_WIDTH


def test_numbers_that_are_all_alike_have_no_variance():
    found = steps(*(np.ones((2, 5, 3)) for _ in range(3)))  # NumPy's mean of 1.7321 is off it
    assert "range 1.732 to 1.732   variance 0\n" in str(found)


def test_a_batch_without_heads_has_steps():
    for kind in (np.zeros, torch.zeros):
        found = steps(*(kind((2, 0, 3, 4)) for _ in range(3)))
        assert tuple(found.scores.shape) == tuple(found.weights.shape) == (2, 0, 3, 3)
        assert "shape (2, 0, 3, 3)" in str(found)


@pytest.mark.parametrize(("tokens", "kind"), [(3, "an int"), ((c for c in "ab"), "a generator")])
def test_tokens_that_cannot_be_counted_are_refused(tokens, kind):
    with pytest.raises(TypeError, match=f"^steps: tokens is {kind}; a list of 2 is needed, one"):
        steps(np.eye(2), np.eye(2), tokens=tokens)
