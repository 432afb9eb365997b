"""Chosen layers and heads under their own numbers, and groups of layers, in the viewer."""

import json

import numpy as np
import pytest

from regard._showing.picture import recording_html
from regard.recording import Layer, Recording
from regard.viewer.answer import Answers
from viewer.pages import address_of, is_said, share

WORDS = ["<s>", " Dein", " Weg", " beginnt", "."]
PATCHES = [f"<patch {n}>" for n in range(12)]


def layer(Lq, Lk, seed, heads=2, key_heads=1, **options):
    random = np.random.default_rng(seed)
    shapes = (heads, Lq), (key_heads, Lk), (key_heads, Lk)
    return Layer(*(random.standard_normal((*shape, 4)).astype("f") for shape in shapes), **options)


def chosen(**options):
    """Layers 5 and 9, of each heads 3 and 7."""
    own = {"causal": True, "head_numbers": (3, 7)}
    layers = [
        layer(5, 5, 1, number=5, name="model.layers.5.self_attn", **own),
        layer(5, 5, 2, number=9, **own),
    ]
    return Recording(WORDS, layers, model="small", **options)


def whole():
    """The same as a decoder, beside an encoder of a picture, and cross-attention to it."""
    encoder = Recording(PATCHES, [layer(12, 12, n, heads=3, key_heads=3) for n in (3, 4)])
    few = layer(5, 12, 5, heads=1, number=9, head_numbers=[7])
    cross = Recording(PATCHES, [few], query_tokens=WORDS)
    return chosen(group="decoder", others={"encoder": encoder, "cross": cross})


def weight(recording, layer, head, query, key):
    return float(recording.weights[layer][head, query, key])


def test_facts_have_numbers_names_and_groups():
    answers = Answers.of_groups([whole(), chosen()], ["one", "two"])
    found = json.loads(answers.answer("about").body)["recordings"]
    named = [(facts["name"], facts["group"]) for facts in found]
    assert named == [("one", "decoder"), ("one", "encoder"), ("one", "cross"), ("two", "")]
    five, nine = found[0]["layers"]
    assert (five["number"], five["name"]) == (5, "model.layers.5.self_attn")
    assert (nine["number"], nine["name"], nine["head_numbers"]) == (9, "", [3, 7])
    assert [facts["number"] for facts in found[1]["layers"]] == [0, 1]
    assert found[2]["layers"][0]["head_numbers"] == [7]
    with pytest.raises(ValueError, match="1 name for 2 recordings"):
        Answers.of_groups([whole(), chosen()], ["one"])


def test_requests_count_the_layers_and_heads_that_are_there():
    recording = chosen()
    answers = Answers([recording])
    row = np.frombuffer(answers.answer("row", "layer=1&head=1&query=4").body, "<f4")
    np.testing.assert_allclose(np.exp(row), recording.weights[9][7, 4], rtol=1e-5)
    steps = json.loads(answers.answer("steps", "layer=0&head=1&queries=2&keys=0,1").body)
    np.testing.assert_allclose(steps["weights"], [recording.weights[5][7, 2, :2]], rtol=1e-5)
    facts = json.loads(answers.answer("heads", "layer=1").body)
    np.testing.assert_allclose(facts["entropy"], recording.weights[9].entropy().mean(-1), rtol=1e-4)
    counts = np.frombuffer(answers.answer("visible", "layer=1&head=1").body, "<f4")
    assert counts.tolist() == [1, 2, 3, 4, 5]
    assert answers.answer("row", "layer=5&head=3&query=4").status == 400


def test_a_notebook_has_every_group():
    notebook = pytest.importorskip("regard.viewer.notebook")
    widget = notebook.RecordingWidget(whole(), other=chosen())
    about = json.loads(widget._answers.answer("about").body)
    groups = [facts["group"] for facts in about["recordings"]]
    assert groups == ["decoder", "encoder", "cross", ""]
    widget.close()


def test_heatmaps_of_a_recording_are_named_by_number():
    assert "L9H7: queries down" in recording_html(chosen())


def options_of(page, label):
    return page.locator(".regard-names").get_by_label(label).locator("option").all_inner_texts()


def test_the_page_shows_the_numbers_of_the_model(serve, open_page):
    recording = chosen()
    page = open_page(f"{serve(recording)}#L9H7&query=4&key=2")
    is_said(page, f"weight {share(weight(recording, 9, 7, 4, 2))}")
    assert options_of(page, "layer") == ["5", "9"]
    assert options_of(page, "head") == ["3", "7"]
    assert page.locator(".regard-layer-name").all_inner_texts() == ["5", "9"]
    assert page.locator(".regard-layer-name").first.get_attribute("title") == (
        "model.layers.5.self_attn"
    )
    assert page.locator(".regard-head-name").all_inner_texts() == ["L5H3", "L5H7", "L9H3", "L9H7"]
    page.locator(".regard-map-caption", has_text="L9H7").wait_for()
    page.get_by_text("heads 3, 7 share keys").wait_for()
    page.keyboard.press("[")
    is_said(page, "L9H3")
    page.keyboard.press("{")
    is_said(page, rf"L5H3.*weight {share(weight(recording, 5, 3, 4, 2))}")
    page.wait_for_function("() => location.hash.startsWith('#L5H3&')")
    page.keyboard.press("c")
    page.wait_for_function("() => location.hash.includes('other=L5H7')")
    assert page.locator(".regard-compare-with option").all_inner_texts()[-4:] == [
        "5",
        "9",
        "3",
        "7",
    ]
    page.get_by_role("button", name="Swap both heads").click()
    is_said(page, "L5H7")


def test_an_address_of_no_layer_opens_the_nearest(serve, open_page):
    page = open_page(f"{serve(chosen())}#L8H4&query=4&key=2&compare=difference&other=L0H0")
    is_said(page, "key 2")
    assert page.locator("[aria-pressed=true] .regard-head-name").inner_text() == "L9H3"
    assert page.locator(".regard-map-caption", has_text="L9H3").is_visible()


def test_a_chooser_of_groups_is_there_where_there_are_several(serve, open_page):
    recording = whole()
    assert open_page(serve(chosen())).get_by_label("group").count() == 0
    page = open_page(f"{serve(recording)}#L9H7&query=4&key=2")
    is_said(page, f"weight {share(weight(recording, 9, 7, 4, 2))}")
    group = page.get_by_label("group", exact=True)
    assert group.locator("option").all_inner_texts() == ["decoder", "encoder", "cross"]
    group.select_option("cross")
    cross = recording.groups["cross"]
    key = int(np.argmax(cross.weights[9][7, 4]))
    is_said(page, f"query 4 «.*→ key {key} «.*weight {share(weight(cross, 9, 7, 4, key))}")
    assert "5 queries · 12 keys" in page.locator(".regard-facts").inner_text()
    assert "#L9H7&recording=2" in address_of(page)
    group.select_option("encoder")
    is_said(page, "query 11 «")
    assert options_of(page, "layer") == ["0", "1"]
    assert options_of(page, "head") == ["0", "1", "2"]
    page.go_back()
    is_said(page, f"query 4 «.*→ key {key} «.*weight {share(weight(cross, 9, 7, 4, key))}")


def test_groups_are_compared(serve, open_page):
    page = open_page(f"{serve(whole())}#L9H3&query=4&key=2&compare=side&other=L9H7@2")
    page.get_by_text("L9H3 of decoder beside L9H7 of cross").wait_for()


def test_an_exported_group_shows_what_the_server_shows(tmp_path, serve, open_page):
    recording = whole()
    path = tmp_path / "page.html"
    recording.groups["cross"].export(path, layers=[9])
    place = "#L9H7&query=4&key=2"
    found = is_said(open_page(path.as_uri() + place, shared=False), "weight")
    assert found == is_said(open_page(f"{serve(recording)}{place}&recording=2"), "weight")
    recording.export(path, layers=[9])
    page = open_page(path.as_uri(), shared=False)
    is_said(page, "weight")
    assert options_of(page, "layer") == ["9"]
    assert page.get_by_label("group").count() == 0
    with pytest.raises(IndexError, match="layers has 0; there are 5, 9"):
        recording.export(path, layers=[0])
