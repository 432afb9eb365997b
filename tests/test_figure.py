"""Figures for papers: what is drawn, in which colours, with which labels, and in which files."""

import io
import itertools
import re
import sys
import warnings

import numpy as np
import pytest
from matplotlib import image

import regard
from regard import Layer, Recording
from regard._showing import figure as drawing
from regard._showing.figure import FontWarning, LostWarning
from regard._showing.picture import INVISIBLE, RAMP

TOKENS = ["<bos>", "the", " cat", " saw", " $x_1$", "\n", " bird"]


def recording(length=7, layers=2, heads=3, tokens=None, **options):
    rng = np.random.default_rng(length)
    shape = (2, heads, length, 4)
    pairs = [1.5 * rng.standard_normal(shape).astype(np.float32) for _ in range(layers)]
    tokens = tokens or [TOKENS[n % 7] for n in range(length)]
    return Recording(tokens, [Layer(q, k, causal=True, **options) for q, k in pairs])


def maps(figure):
    """The axes of the heatmaps; the colour bar is the last."""
    return figure.figure.axes[:-1]


def shown(ax):
    """What a heatmap shows; NaN where it is masked."""
    return ax.images[0].get_array().filled(np.nan)


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def bar_labels(figure):
    return labels(figure.figure.axes[-1].yaxis)


def pixels(figure):
    return image.imread(io.BytesIO(figure._repr_png_()[0]))


def test_a_head_is_drawn_with_its_tokens_and_numbers():
    found = recording()
    figure = found.figure(1, 2)
    width, height = figure.figure.get_size_inches()
    assert repr(figure) == f"Figure(1 heatmap, {width:.1f} × {height:.1f} inches)"
    (ax,) = maps(figure)
    exact = np.where(np.tri(7), found.weights[1][2], np.nan)
    np.testing.assert_allclose(shown(ax), exact, rtol=1e-6)
    assert ax.get_title() == "L1H2"
    assert labels(ax.xaxis) == labels(ax.yaxis) == [
        "<bos>", "the", "·cat", "·saw", "·$x_1$", "⏎", "·bird",
    ]  # fmt: skip
    numbers = [f"{100 * x:.0f}" for x in exact[np.tri(7, dtype=bool)]]
    assert [text.get_text() for text in ax.texts] == numbers
    assert bar_labels(figure)[0] == "0%"
    assert bar_labels(figure)[-1] == "100%"


def test_colours_are_the_ramp_and_masked_pairs_are_grey():
    dense = [np.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]])]
    figure = Recording.from_weights(["a", "b", "c"], dense).figure(0, 0)
    (ax,) = maps(figure)
    drawn = pixels(figure)
    box = ax.get_window_extent()
    assert drawn.shape[1] > box.width
    levels = (255 * drawn[..., :3]).round().astype(int) @ [1 << 16, 1 << 8, 1]
    colours = {(x >> 16, x >> 8 & 255, x & 255) for x in np.unique(levels).tolist()}
    assert {
        tuple(RAMP[0].astype(int)),
        tuple(RAMP[-1].astype(int)),
        tuple(INVISIBLE.astype(int)),
    } <= (colours)


def test_linear_colours_end_at_the_largest_weight_rounded_up():
    flat = Recording.from_weights([""] * 20, [np.full((1, 20, 20), 1 / 20)])
    assert maps(flat.figure(0, 0))[0].images[0].norm.vmax == pytest.approx(0.05)
    assert bar_labels(flat.figure(0, 0))[-1] == "5%"


@pytest.mark.parametrize(("length", "scale"), [(99, "linear"), (100, "log")])
def test_rows_of_100_keys_and_more_are_logarithmic(length, scale):
    found = recording(length, heads=1)
    other = "log" if scale == "linear" else "linear"
    auto, named, another = (
        found.figure(0, 0, **options)._repr_svg_()
        for options in ({}, {"scale": scale}, {"scale": other})
    )
    assert auto == named != another


def test_a_logarithmic_scale_has_ticks_in_per_cent_and_no_numbers():
    figure = recording().figure(0, 0, scale="log")
    ticks = [label for label in bar_labels(figure) if label]
    assert {"0.001%", "0.01%", "0.1%", "1%", "10%", "100%"} <= {*ticks}
    (ax,) = maps(figure)
    assert not ax.texts
    assert np.nanmin(shown(ax)) >= 1e-5 * (1 - 1e-6)


@pytest.mark.parametrize("options", [{}, {"window": (2, 0)}, {"segments": [0, 0, 1, 1, 1, 1, 1]}])
def test_uniform_divides_by_equal_weights_on_the_unmasked_keys(options):
    found = recording(**options)
    figure = found.figure(0, 1, scale="uniform", rows=slice(2, 6))
    visible = ~np.isnan(found.weights[0].pool()[1])
    exact = found.weights[0][1] * visible.sum(-1, keepdims=True)
    (ax,) = maps(figure)
    expected = np.where(visible, np.maximum(exact, 0.01), np.nan)[2:6]
    np.testing.assert_allclose(shown(ax), expected, rtol=1e-6)
    assert "1×" in bar_labels(figure)


def test_uniform_is_of_each_query_where_several_share_a_bin():
    length = 300
    query, last = np.zeros((1, length, 2), "f"), np.where(np.arange(length) % 2, length, 2)
    even = Layer(query, query, intervals=(np.zeros(length, int), last))
    found = Recording(list(map(str, range(length))), [even])
    (ax,) = maps(found.figure(0, 0, scale="uniform", size=(3, 3), dpi=30))
    assert ax.images[0].get_array().shape[0] < length
    np.testing.assert_allclose(shown(ax), 1, rtol=1e-6)


def test_a_part_has_its_positions_and_tokens():
    found = recording(40, heads=1)
    (ax,) = maps(found.figure(0, 0, rows=slice(30, 34), columns=slice(20, 36)))
    np.testing.assert_allclose(
        np.nan_to_num(shown(ax)), found.weights[0][0, 30:34, 20:36], rtol=1e-6, atol=1e-30
    )
    assert [*ax.get_yticks()] == [30, 31, 32, 33]
    assert labels(ax.yaxis) == ["·cat", "·saw", "·$x_1$", "⏎"]
    assert ax.get_ylim() == (33.5, 29.5)
    assert ax.get_xlim() == (19.5, 35.5)


def test_several_heads_share_a_colour_bar_and_the_labels_at_the_edges():
    found = recording()
    figure = found.figure(heads=[(0, 1), (1, 2), (-1, 0), (0, -1), (0, 0)])
    axes = maps(figure)
    assert [ax.get_title() for ax in axes] == ["L0H1", "L1H2", "L1H0", "L0H2", "L0H0"]
    assert len({ax.images[0].norm for ax in axes}) == 1
    assert [any(labels(ax.yaxis)) for ax in axes] == [True, False, False, True, False]
    assert [any(labels(ax.xaxis)) for ax in axes] == [False, False, True, True, True]
    four = maps(found.figure(heads=[(0, 0), (0, 1), (1, 0), (1, 1)]))
    assert len({round(ax.get_position().x0, 3) for ax in four}) == 2  # two and two
    whole = found.figure(1)
    assert [ax.get_title() for ax in maps(whole)] == ["L1H0", "L1H1", "L1H2"]


def test_chosen_heads_are_named_by_their_numbers():
    layer = recording().layers[0]
    options = {"number": 5, "head_numbers": (3, 7, 8)}
    found = Recording(TOKENS, [Layer(layer.query, layer.key, causal=True, **options)])
    (ax,) = maps(found.figure(5, 7))
    assert ax.get_title() == "L5H7"
    np.testing.assert_allclose(np.nan_to_num(shown(ax)), found.weights[5][7], rtol=1e-6)
    with pytest.raises(IndexError, match="head 1 was not recorded; there are 3, 7, 8"):
        found.figure(5, 1)


def test_ticks_are_thinned_to_whole_positions_where_tokens_do_not_fit():
    (ax,) = maps(recording(300, heads=1).figure(0, 0))
    ticks = [int(label) for label in labels(ax.xaxis)]
    assert ticks == [*ax.get_xticks()]
    assert 3 <= len(ticks) <= 9
    assert {*np.diff(ticks)} <= {50, 100}
    (small,) = maps(recording(60, heads=1).figure(0, 0, size=(2, 1.6)))
    assert all(label.isdigit() for label in labels(small.yaxis))
    (large,) = maps(recording(60, heads=1).figure(0, 0))
    assert len(labels(large.yaxis)) == 60


@pytest.mark.parametrize(("count", "size"), [(1, (3.3, 3)), (3, (7, 3)), (1, None)])
def test_labels_do_not_overlap(count, size):
    figure = recording(24).figure(heads=[(0, n) for n in range(count)], size=size)
    canvas = figure.figure._get_renderer()
    for ax in maps(figure):
        for axis, low, high in ((ax.xaxis, "x0", "x1"), (ax.yaxis, "y0", "y1")):
            boxes = [label.get_window_extent(canvas) for label in axis.get_ticklabels()]
            boxes.sort(key=lambda box: getattr(box, low))
            for a, b in itertools.pairwise(boxes):
                assert getattr(a, high) <= getattr(b, low) + 1


@pytest.mark.parametrize(("count", "token"), [(30, "mm"), (11, "WWW"), (6, "WWWWW"), (40, "il")])
def test_labels_are_turned_where_their_letters_have_no_room(count, token):
    figure = recording(count, heads=1, tokens=[token] * count).figure(0, 0)
    (ax,) = maps(figure)
    names = ax.get_xticklabels()
    assert len(names) == count
    boxes = [name.get_window_extent(figure.figure._get_renderer()) for name in names]
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
    assert {name.get_rotation() for name in names} == {0 if token == "il" else 90}


def test_more_cells_than_pixels_show_the_strongest_of_each():
    found = recording(3000, heads=1)
    figure = found.figure(0, 0, dpi=100)
    (ax,) = maps(figure)
    (bins, _) = shown(ax).shape
    assert bins == 450
    pool = np.exp(found.weights[0].head(0).pool((450, 450)).astype(float))
    np.testing.assert_allclose(shown(ax), np.maximum(pool, 1e-5), rtol=1e-6)
    label = figure.figure.axes[-1].get_ylabel()
    assert label == "weight, strongest of up to 7 × 7 pairs"


def test_a_size_is_the_size_of_the_file():
    figure = recording().figure(0, 0, size=(3.5, 2.5), dpi=120)
    assert pixels(figure).shape[:2] == (300, 420)
    _, metadata = figure._repr_png_()
    assert metadata == {"width": 336, "height": 240}


@pytest.mark.parametrize("size", [(1, 1), (0.3, 0.3), (0.001, 0.001)])
def test_a_size_without_room_is_refused_with_the_way_out(size):
    said = f"figure: {size[0]:g} × {size[1]:g} inches have no room for the heatmaps beside their"
    with pytest.raises(ValueError, match=f"^{said} labels; give a larger size"):
        recording().figure(0, 0, size=size, dpi=100)


def test_weights_that_are_no_numbers_are_told_since_they_are_grey_as_masked_ones():
    q, k = np.random.default_rng(0).standard_normal((2, 3, 7, 4)).astype(np.float32)
    q[1, 2], q[2, 3:5] = np.nan, np.nan
    mask = np.arange(7)[:, None] > 0  # the first query sees nothing, which is no fault
    found = Recording(TOKENS, [Layer(q, k, mask=np.broadcast_to(mask, (7, 7)))])
    with pytest.warns(LostWarning) as told:
        found.figure(0)
    (one,) = told
    assert one.filename == __file__
    assert "1 query of L0H1, 2 queries of L0H2 are not numbers" in str(one.message)
    assert "grey, as masked pairs are" in str(one.message)
    found.figure(0, 0)
    found.figure(0, 1, rows=slice(3, 7))


@pytest.mark.parametrize("is_transparent", [False, True])
def test_it_is_white_or_transparent(is_transparent):
    corner = pixels(recording().figure(0, 0, transparent=is_transparent))[0, 0]
    assert list(corner) == ([1, 1, 1, 0] if is_transparent else [1, 1, 1, 1])


def test_files_have_text_as_text_and_are_the_same_each_time(tmp_path):
    found = recording()
    for name in ("a.svg", "a.pdf", "A.PNG"):
        found.figure(0, 1).save(tmp_path / name)
        first = (tmp_path / name).read_bytes()
        found.figure(0, 1).save(tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    texts = re.findall(r"<text[^>]*>([^<]*)<", (tmp_path / "a.svg").read_text(encoding="utf-8"))
    assert {"·cat", "⏎", "L0H1", "100%"} <= {*texts}
    pdf = (tmp_path / "a.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf  # TrueType
    assert (tmp_path / "A.PNG").read_bytes().startswith(b"\x89PNG")


def test_pyplot_and_the_settings_of_the_caller_stay_as_they_are():
    import matplotlib

    pyplot = sys.modules.get("matplotlib.pyplot")  # where another test has loaded it
    figures = pyplot.get_fignums() if pyplot else []
    with matplotlib.rc_context({"figure.facecolor": "black", "text.color": "white"}):
        before = dict(matplotlib.rcParams)
        drawn = pixels(recording().figure(0, 0))
        assert dict(matplotlib.rcParams) == before
    np.testing.assert_array_equal(drawn, pixels(recording().figure(0, 0)))
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        assert pyplot.get_fignums() == figures


def test_a_style_of_the_caller_neither_turns_a_map_over_nor_strikes_it_through():
    import matplotlib

    style = {"image.origin": "lower", "axes.grid": True, "axes.titlecolor": "white"}
    with matplotlib.rc_context(style | {"xtick.labelcolor": "white", "ytick.labelcolor": "white"}):
        drawn = pixels(recording().figure(0, 0))
    np.testing.assert_array_equal(drawn, pixels(recording().figure(0, 0)))


def test_any_token_is_a_label():
    strange = ["\ud800", "\x1b[31m", "‮", "x" * 99, "\\frac{", "$", "\t"]
    figure = recording(tokens=strange).figure(0, 0)
    (ax,) = maps(figure)
    assert labels(ax.xaxis) == [
        "\\ud800", "\\x1b[31m", "\\u202e", "xxxxxxxxxxxxx…", "\\frac{", "$", "→",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure._repr_svg_()


def test_signs_that_no_font_has_are_told_once_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "FALLBACKS", ())
    signs = [chr(0x1F400 + n) for n in range(9)]  # animals, not in matplotlib's own font
    with pytest.warns(FontWarning) as told:
        figure = recording(10, tokens=["a", *signs]).figure(0, 0, dpi=60)
    figure.save(tmp_path / "a.png")  # another warning would be an error
    (only,) = told
    assert only.filename == __file__
    named = ", ".join(map(repr, signs[:8]))
    assert str(only.message).startswith(f"figure: no font has {named} and 1 more, and a box")
    assert 'rcParams["font.family"]' in str(only.message)


def test_weights_that_exist_and_queries_of_their_own_are_drawn():
    given = np.array([[[0.25, 0.75], [1.0, 0.0], [0.5, 0.5]]])
    found = Recording.from_weights(["a", "b"], [given], query_tokens=["x", "y", "z"])
    (ax,) = maps(found.figure(0, 0))
    np.testing.assert_allclose(shown(ax), given[0], atol=1e-12)
    assert (labels(ax.xaxis), labels(ax.yaxis)) == (["a", "b"], ["x", "y", "z"])


def test_torch_weights_are_drawn():
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    found = Recording(list("abcde"), [Layer(q, q, mask=mask)])
    (ax,) = maps(found.figure(0, 1, scale="uniform"))
    exact = found.weights[0][1].numpy() * np.arange(1, 6)[:, None]
    np.testing.assert_allclose(
        np.nan_to_num(shown(ax)), np.where(mask, exact.clip(0.01), 0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, r"name one head, figure\(layer, head\), all of a layer"),
        ({"head": 1}, TypeError, "name one head"),
        ({"layer": 0, "heads": [(0, 1)]}, TypeError, "name one head"),
        ({"head": 0, "heads": [(0, 1)]}, TypeError, "name one head"),
        ({"heads": []}, TypeError, "heads is empty; name at least one"),
        ({"heads": 3}, TypeError, r"heads is an int; a list of \(layer, head\) is needed"),
        ({"heads": [3]}, TypeError, r"heads has 3; a pair \(layer, head\)"),
        ({"layer": 2, "head": 0}, IndexError, "layer 2; there are 2, 0 to 1"),
        ({"layer": 0, "head": 3}, IndexError, "head 3; there are 3, 0 to 2"),
        ({"layer": 0, "scale": "ln"}, ValueError, "scale is 'ln'; there are 'auto', 'linear'"),
        ({"layer": 0, "dpi": 0}, ValueError, "dpi is 0; a number of pixels per inch is"),
        ({"layer": 0, "dpi": "high"}, ValueError, "dpi is 'high'; a number"),
        ({"layer": 0, "dpi": 20000}, ValueError, "of 20000 dpi are more than 32768 pixels"),
        ({"layer": 0, "size": 3}, ValueError, r"size is 3; \(width, height\) in inches"),
        ({"layer": 0, "size": (3, -1)}, ValueError, r"size is \(3, -1\); \(width, height\)"),
        ({"layer": 0, "size": (300, 1)}, ValueError, "more than 32768 pixels on a side"),
        ({"layer": 0, "rows": 3}, TypeError, "rows is an int; a slice is needed"),
        ({"layer": 0, "rows": slice(0, 7, 2)}, ValueError, "rows has the step 2; neighbours alone"),
        ({"layer": 0, "columns": slice(9, 12)}, regard.ShapeError, "7 queries and 0 keys"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        recording().figure(**arguments)


def test_a_recording_without_queries_is_refused():
    empty = Recording(["a"], [Layer(np.ones((1, 0, 2)), np.ones((1, 1, 2)))], query_tokens=[])
    with pytest.raises(regard.ShapeError, match="0 queries and 1 key have nothing to draw"):
        empty.figure(0, 0)


@pytest.mark.slow
def test_a_hundred_thousand_tokens_take_linear_memory():
    import tracemalloc

    length = 100_000
    q, k = np.random.default_rng(0).standard_normal((2, 1, length, 4)).astype(np.float32)
    found = Recording([str(n) for n in range(length)], [Layer(q, k, causal=True)])
    tracemalloc.start()
    data, _ = found.figure(0, 0, dpi=150)._repr_png_()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert data.startswith(b"\x89PNG")
    assert most < 200e6  # a row of weights is 400 kB, the matrix 40 GB
