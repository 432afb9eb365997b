"""Architectures of transformers under regard, by the judge of benchmarks/architectures.py."""

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs the hf extra")

import transformers

import regard.hf

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
RESULTS = FOLDER / "results" / "architectures.json"
CHOSEN = {  # by what is particular to it
    "llama": "grouped heads, rotary positions",
    "gpt2": "one projection for query, key and value",
    "bert": "an encoder",
    "t5": "relative positions as a bias, cross-attention",
    "mistral": "a sliding window",
    "gemma3": "pictures that see themselves in a causal text",
    "vit": "a picture",
    "whisper": "a sound, cross-attention",
}
pytestmark = pytest.mark.xdist_group(
    "architectures"
)  # one import of transformers' models serves all


@pytest.fixture(scope="module")
def judged():
    """The judge; masks are read as those of long texts are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setattr(regard.hf._masks, "SMALL", 0)
        from zoo.judge import judged
        from zoo.situations import SITUATIONS

        yield lambda name, situations=(*SITUATIONS,): judged(
            name, "regard", torch.float32, situations
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "zoo"]:
        del sys.modules[name]


@pytest.mark.filterwarnings("default")  # whatever transformers warns of
@pytest.mark.parametrize("name", CHOSEN)
def test_an_architecture_gives_under_regard_what_eager_gives(name, judged):
    found = judged(name)
    if name == "t5" and transformers.__version__.startswith("5.10."):
        assert found["status"] == "own attention", found
        return
    assert found["status"] == "pass", found
    ran = [s for s, r in found["situations"].items() if r["result"] == "pass"]
    assert {"plain", "gradients", "attentions", "switching"} <= {*ran}
    if name in ("llama", "mistral", "gemma3"):
        assert {"left padding", "own mask", "chunks", "static cache", "generation"} <= {*ran}


@pytest.mark.filterwarnings("default")
def test_the_judge_finds_a_wrong_implementation(judged, monkeypatch):
    """One that sees the future, one that sees padding, and one that forgets the scale."""
    from transformers import AttentionInterface

    right = AttentionInterface._global_mapping["regard"]

    def blind(module, query, key, value, attention_mask, **options):
        return right(module, query, key, value, None, **options | {"is_causal": True})

    def loud(module, query, key, value, attention_mask, scaling=None, **options):
        return right(module, query, key, value, attention_mask, scaling=1.001 * scaling, **options)

    for wrong, spoiled in ((blind, "left padding"), (loud, "plain")):
        monkeypatch.setitem(AttentionInterface._global_mapping, "regard", wrong)
        found = judged("llama", [spoiled])
        assert found["status"] != "pass"
        assert found["situations"][spoiled]["result"] != "pass"


def test_what_the_script_cannot_do_is_told_before_it_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    from architectures import read_options

    theirs = tmp_path / "theirs.json"
    theirs.write_text(json.dumps({"implementation": "sdpa", "dtype": "float32"}))
    for arguments, said in {
        ("--only", "nosuch"): "has no architecture 'nosuch'",
        ("--situations", "nosuch"): "there is no situation 'nosuch'; there are plain, left padding",
        ("--jobs", "0"): "--jobs 0; at least 1 is needed",
        ("--json", f"{tmp_path}/nosuch/a.json"): f"there is no folder {tmp_path}/nosuch",
        ("--merge",): "--merge needs --json FILE",
        ("--merge", "--json", f"{tmp_path}/a.json"): "--merge needs --json FILE",
        ("--merge", "--json", str(theirs)): "has the implementation sdpa, and regard is asked for",
    }.items():
        monkeypatch.setattr(sys, "argv", ["architectures.py", *arguments])
        with pytest.raises(SystemExit):
            read_options()
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["architectures.py", "--merge", "--json", str(RESULTS)])
    assert read_options().merge


def test_the_committed_results_have_no_unexplained_failure(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    from architectures import KNOWN

    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert result["implementation"] == "regard"
    by_status = {}
    for x in result["architectures"]:
        by_status.setdefault(x["status"], set()).add(x["name"])
    assert len(by_status["pass"]) >= 60
    assert not by_status.get("leak")
    assert not by_status.get("NaN")
    assert by_status.get("fail", set()) | by_status.get("crashed", set()) <= set(KNOWN)


def test_every_architecture_that_was_not_judged_says_why():
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    for x in result["architectures"]:
        assert (
            x["status"] in ("pass", "own attention", "no attention")
            or x.get("why")
            or any(r.get("why") for r in x["situations"].values())
        )
        for name, r in x.get("situations", {}).items():
            assert r["result"] == "pass" or r["why"], (x["name"], name)
