"""Chosen layers and heads, and groups of layers, on the command line."""

import json
import re

import numpy as np
import pytest

from regard.recording import Recording
from viewer.test_groups import chosen, whole


@pytest.fixture
def path(tmp_path):
    whole().save(tmp_path / "whole.safetensors")
    return tmp_path / "whole.safetensors"


def test_show_names_the_heads_of_the_model(regard, path):
    out = regard("show", path, "--layer", 9, "--head", 7).out
    assert "2 layers of 2 heads" in out
    assert re.search(r"^ +H3 +H7$", out, re.MULTILINE)
    assert re.findall(r"^  (L\d)", out, re.MULTILINE) == ["L5", "L9"]
    assert "\nL9H7 · " in out
    weights = whole().weights[9][7]
    assert f"{100 * weights[4, 2]:.0f}" in out.split("L9H7")[-1]


def test_show_heads_a_layer_by_its_own_numbers(regard, path):
    out = regard("show", path, "--group", "cross").out
    assert re.search(r"^ +H7$", out, re.MULTILINE)
    assert "1 layer of 1 head" in out
    assert "12 tokens" in out


def test_json_has_numbers(regard, path):
    found = json.loads(regard("show", path, "--json", "--layer", 5, "--head", 7).out)
    assert [(head["layer"], head["head"]) for head in found["heads"]] == [
        (5, 3), (5, 7), (9, 3), (9, 7),
    ]  # fmt: skip
    assert (found["shown"]["layer"], found["shown"]["head"]) == (5, 7)
    np.testing.assert_allclose(found["weights"], whole().weights[5][7], atol=1e-6)


def test_a_query_is_looked_up_in_the_group(regard, path):
    out = regard("show", path, "--group", "cross", "--query", "Weg").out
    assert "The keys of query 2 " in out
    assert "<patc" in out


def test_heads_are_a_table(regard, path):
    result = regard("heads", path, "--group", "decoder")
    assert (result.code, result.err) == (0, "")
    assert result.out == whole().heads().table() + "\n"
    assert "L9H7" in regard("heads", path, "--group", "cross").out
    assert regard("heads", path).out == result.out


def test_saving_keeps_every_group(regard, path, tmp_path):
    again = tmp_path / "again.safetensors"
    regard("show", path, "--group", "cross", "--save", again)
    assert again.read_bytes() == path.read_bytes()


class FakeViewer:
    """Is closed at once."""

    address = "http://127.0.0.1:1/token/"

    def __init__(self, recordings, names, port, readings, surveys):
        self.recordings = recordings

    def wait(self):
        pass

    def close(self):
        return True


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr("regard.viewer._server.Viewer", FakeViewer)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ([], "#L5H7"),
        (["--layer", 9], "#L9H7"),
        (["--layer", 9, "--head", 7], "#L9H7"),
        (["--group", "decoder"], "#L5H7"),
        (["--group", "cross"], "#L9H7&recording=2"),
        (["--group", "cross", "--query", "Weg"], "#L9H7&recording=2&query=2"),
        (["--group", "encoder", "--layer", 1], "#L1H0&recording=1"),
    ],
)
def test_view_opens_at_the_group_and_head(regard, served, path, options, place):
    result = regard("view", path, "--no-open", *options)
    assert result.out == f"http://127.0.0.1:1/token/{place}\n"


def test_export_writes_one_group(regard, path, tmp_path):
    page, expected = tmp_path / "page.html", tmp_path / "expected.html"
    for options, group in (([], "decoder"), (["--group", "cross", "--layer", 9], "cross")):
        assert regard("view", path, "--export", page, *options).code == 0
        data = re.search(r'id="regard-data">(.*?)</script>', page.read_text())[1]
        (found,) = json.loads(data)["about"]["recordings"]
        assert found["group"] == group
    assert not expected.exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["show", "--layer", 0], "--layer 0: there are layers 5, 9."),
        (["show", "--head", 4], "--head 4: there are heads 3, 7."),
        (["show", "--layer", 9, "--head", 0], "--head 0: there are heads 3, 7."),
        (["view", "--layer", 0], "--layer 0: there are layers 5, 9."),
        (["view", "--head", 0], "--head 0: there are heads 3, 7."),
        (["view", "--group", "cross", "--head", 3], "--head 3: there are heads 7."),
        (["show", "--group", "x"], "--group x: there are 'decoder', 'encoder', 'cross'."),
        (["view", "--group", "x"], "--group x: there are 'decoder', 'encoder', 'cross'."),
        (["heads", "--group", "x"], "--group x: there are 'decoder', 'encoder', 'cross'."),
    ],
)
def test_numbers_and_groups_that_are_not_there_are_said(regard, path, command, message):
    name, *options = command
    result = regard(name, path, *options)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_a_recording_without_groups_takes_no_group(regard, tmp_path):
    chosen().save(tmp_path / "one.safetensors")
    result = regard("show", tmp_path / "one.safetensors", "--group", "decoder")
    assert "--group decoder: it has no groups; leave it out." in result.err


def test_a_recording_without_queries_has_nothing_to_score(regard, tmp_path):
    full = chosen().layers[0]
    empty = type(full)(full.query[:, :0], full.key, query_start=0)
    Recording(chosen().tokens, [empty]).save(tmp_path / "empty.safetensors")
    result = regard("heads", tmp_path / "empty.safetensors")
    assert (result.code, result.out) == (2, "")
    assert "a recording without queries has nothing to score" in result.err
