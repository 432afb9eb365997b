"""What every head does over a corpus: the numbers, the documents, the files."""

import contextlib
import errno
import gc
import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import tracemalloc
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from threadpoolctl import threadpool_info, threadpool_limits

from recordings import numbers
from regard.heads import head_scores
from regard.lm import LanguageModel
from regard.recording import Layer, Recording
from regard.survey import (
    Facts,
    HeadSums,
    Progress,
    Survey,
    SurveyError,
    TopReceiver,
    _corpus,
    _threads,
)
from regard.survey import _run as running
from regard.survey._exact import parts_of, total_of
from regard.survey._measure import Document
from regard.survey._models import Own, load
from regard.survey._shard import read_sums
from regard.survey._statistics import STATISTICS, quantiles, spacing
from regard.survey._threads import threads
from tiny_model import TEXT, tiny_model

pytestmark = pytest.mark.xdist_group("survey")  # one survey serves many of the tests
WORDS = (TEXT + "\n\nWhile it was read, it was the same; and then it was another one.\n") * 2
SHARES = [name for name, one in STATISTICS.items() if one.role is not None]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Ten texts of many lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    for n in range(10):
        (folder / f"{n}.txt").write_text(WORDS[37 * n : 37 * n + 60 + 90 * n])
    return folder


def started(folder, corpus, model, **options):
    given = {"max_tokens": 64, "shard_tokens": 40} | options
    return Survey(folder, model=model, corpus=corpus, **given)


@pytest.fixture(scope="module")
def survey(tmp_path_factory, corpus, model):
    found = started(tmp_path_factory.mktemp("done") / "heads", corpus, model, documents=True)
    found.run(workers=1)
    return found


def recordings_of(model, corpus, most=64):
    """The documents of a survey, recorded one by one."""
    loaded = LanguageModel.load(model)
    for path in sorted(corpus.glob("*.txt")):
        yield loaded.record_ids(loaded.tokenizer.encode(path.read_text(), bos=True)[:most])


# The numbers


def dense(recording, number):
    """``(heads, Lq, Lk)`` in float64, by the formula."""
    layer = recording.layers[number]
    q, k = layer.query.astype(float), layer.key.astype(float)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
    i = np.arange(q.shape[1])
    window = layer.options.get("window") or (None, None)
    seen = i[None] <= i[:, None]
    if window[0] is not None:
        seen &= i[None] >= i[:, None] - window[0]
    w = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    return w / w.sum(-1, keepdims=True), seen, scores


def by_the_formula(recording, number):
    """Each statistic of each query by plain loops: ``{name: [(values, counted)] by head}``."""
    w, seen, _ = dense(recording, number)
    tokens, length = recording.tokens, w.shape[1]
    i = np.arange(length)
    choice = seen.sum(-1) > 1
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(w > 0, w * np.log(w), 0).sum(-1)
    every = np.ones(length, bool)
    found = {
        "entropy": (entropy, every),
        "distance": ((w * np.abs(i[:, None] - i)).sum(-1), every),
    }
    keys = {
        "first": np.where(i > 0, 0, -1)[:, None] == i,
        "previous": i[:, None] - 1 == i,
        "self": i[:, None] == i,
        "induction": np.array(
            [
                [j and tokens[j - 1] == tokens[q] and j < q - 1 for j in range(length)]
                for q in range(length)
            ]
        ),
    }
    for name, of_it in keys.items():
        means = of_it & seen & choice[:, None]
        found[name] = ((w * means).sum(-1), means.any(-1))
    return found


def test_every_statistic_is_that_of_the_plain_formula(model, corpus, survey):
    sums, counts, bins = {}, {}, {}
    for recording in recordings_of(model, corpus):
        for layer in range(2):
            for name, (values, counted) in by_the_formula(recording, layer).items():
                own = values[:, counted]
                sums[name, layer] = sums.get((name, layer), 0) + own.sum(-1)
                counts[name, layer] = counts.get((name, layer), 0) + counted.sum()
                edges = STATISTICS[name].edges
                found = np.array([np.histogram(x, edges)[0] for x in own.clip(0, 1e9)])
                bins[name, layer] = bins.get((name, layer), 0) + found
    heads = survey.heads()
    for (name, layer), total in sums.items():
        n = counts[name, layer]
        assert (heads.count(name)[layer] == n).all(), name
        np.testing.assert_allclose(heads.mean(name)[layer], total / n, atol=2e-6, err_msg=name)
        counted = heads.histogram(name)[layer]
        assert (counted.sum(-1) == n).all()
        # A value at an edge may be rounded to either side of it.
        assert np.abs(counted - bins[name, layer]).sum() <= 0.002 * n * len(counted), name


def test_the_roles_are_those_of_a_text_where_the_corpus_is_that_text(model, tmp_path):
    text = WORDS[:400]
    (tmp_path / "a.txt").write_text(text)
    survey = started(tmp_path / "heads", tmp_path / "a.txt", model, max_tokens=1000)
    survey.run(workers=1)
    recording = LanguageModel.load(model).record(text)
    expected = head_scores(recording, queries=len(recording.tokens))
    found = survey.means()
    for name in ("scores", "even", "counted", "overlap", "largest", "sees_all"):
        wanted = getattr(expected, name)
        np.testing.assert_allclose(getattr(found, name), wanted, atol=5e-6, err_msg=name)
    places = [(layer, head) for layer in range(2) for head in range(4)]
    assert [found.role(*x) for x in places] == [expected.role(*x) for x in places]
    assert found.queries == expected.queries
    assert "L0H0" in str(found)
    names = set(survey.heads().columns())
    assert {"layer", "head", "role", "entropy", "nucleus_median", "max_score"} <= names


def test_means_over_documents_count_queries_and_not_documents(survey, model, corpus):
    total = queries = 0
    for recording in recordings_of(model, corpus):
        total = total + np.array([w.entropy().sum(-1, dtype=float) for w in recording.weights])
        queries += len(recording.tokens)
    np.testing.assert_allclose(survey.heads().mean("entropy"), total / queries, atol=1e-6)
    assert survey.heads().tokens == queries
    assert survey.heads().documents == 10


@pytest.mark.parametrize("every", [1, 7])
def test_nucleus_and_weights_are_exact_over_the_queries_that_are_read_whole(model, every):
    recording = LanguageModel.load(model).record(WORDS[:300])
    document = Document(recording.tokens, len(recording.tokens), True, every)
    rows = np.arange(len(recording.tokens))[every // 2 :: every]
    for layer, weights in enumerate(recording.weights):
        found = document.measured(weights)
        w, seen, scores = dense(recording, layer)
        falling = -np.sort(-w[:, rows], -1)
        sizes = (np.cumsum(falling, -1) < 0.9 - 1e-12).sum(-1) + 1
        assert np.abs(found["nucleus_sum"] - sizes.sum(-1)).max() <= 1  # a tie at 90 %
        assert (found["nucleus_count"] == len(rows)).all()
        assert (found["nucleus_histogram"].sum(-1) == len(rows)).all()
        counts = found["weight_histogram"]
        assert (counts.sum(-1) == seen[rows].sum()).all()
        edges = HeadSums.edges("weight")[::-1]
        values = [head[rows][seen[rows]] for head in w]
        expected = np.array([np.histogram(x, edges)[0][::-1] for x in values])
        assert np.abs(counts - expected).sum() <= 4
        visible = np.where(seen, scores, -np.inf).max((1, 2))
        np.testing.assert_allclose(found["max_score"], visible, rtol=1e-5)


def test_quantiles_are_within_a_bin_of_those_of_the_values():
    values = np.random.default_rng(0).gamma(2, 1, 5000)
    one = STATISTICS["entropy"]
    counts = np.bincount(one.places(values), minlength=one.bins)
    for p in (0, 0.1, 0.5, 0.99):
        assert abs(quantiles(counts, one.edges, p) - np.quantile(values, p)) <= 0.25
    far = np.bincount(one.places(values + 9), minlength=one.bins)
    assert abs(quantiles(far, one.edges, 0) - (values + 9).min()) <= 0.25
    assert np.isnan(quantiles(np.zeros(one.bins, int), one.edges, 0.5))
    last = np.zeros(one.bins, int)
    last[-1] = 3
    assert quantiles(last, one.edges, 0.5) == 63 / 4, "the lower edge of an open bin"


def test_quantile_refuses_what_is_no_share_or_no_statistic(survey):
    assert (survey.quantile("distance", 0.5) <= survey.quantile("distance", 0.9)).all()
    with pytest.raises(TypeError, match=r"p is a list; a share from 0 to 1"):
        survey.quantile("entropy", [0.1, 0.5])
    with pytest.raises(ValueError, match=r"p is 50; a share from 0 to 1"):
        survey.quantile("entropy", 50)
    with pytest.raises(KeyError, match="no statistic 'entrop'; there are 'entropy', 'distance'"):
        survey.quantile("entrop", 0.5)


def test_top_receivers_are_the_keys_with_most_weight_of_their_document(survey, model, corpus):
    best = []
    for n, recording in enumerate(recordings_of(model, corpus)):
        received = recording.weights[1].received("mean")[2]
        if len(recording.tokens) >= 32:
            keys = enumerate(received.tolist())
            best += [(share, n, j, recording.tokens[j]) for j, share in keys if j > 0]
    best.sort(key=lambda one: (-one[0], one[1], one[2]))
    found = survey.heads().top_receivers(1, 2)
    assert all(isinstance(one, TopReceiver) for one in found)
    assert [(x.document, x.position, x.token) for x in found] == [x[1:] for x in best[:8]]
    np.testing.assert_allclose([x.received for x in found], [x[0] for x in best[:8]], rtol=1e-5)
    assert survey.document(found[0].document) == str(corpus / f"{found[0].document}.txt")
    assert survey.text(3) == (corpus / "3.txt").read_text()
    with pytest.raises(IndexError, match="layer"):
        survey.heads().top_receivers(7, 0)


def test_a_head_with_a_weight_that_is_not_finite_is_left_out_and_counted(tmp_path):
    q, k = numbers(2, 40, 4), numbers(2, 40, 4, seed=1)
    q[1, 3, 0] = np.nan
    recording = Recording(list("abcd" * 10), [Layer(q, k, causal=True)])
    recording.save(tmp_path / "a.safetensors")
    survey = Survey(tmp_path / "heads", corpus=tmp_path / "a.safetensors")
    survey.run(workers=1)
    heads = survey.heads()
    assert heads.not_finite == 40
    assert np.isfinite(heads.mean("entropy")[0, 0])
    assert np.isnan(heads.mean("entropy")[0, 1])
    assert heads.count("entropy").tolist() == [[40, 0]]
    assert np.isnan(heads.max_score[0, 1])


# Sums in any order


def test_totals_of_any_order_and_grouping_are_the_same_bits(survey):
    shards = [read_sums(running.file_of(survey.folder, n)) for n in range(len(survey))]
    assert len(shards) > 7
    whole = survey.heads()
    draw = random.Random(0)

    def grouped(parts):
        while len(parts) > 1:
            at = draw.randrange(len(parts) - 1)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts[0]

    for orders in (1, 2, 7):
        for _ in range(orders):
            parts = draw.sample(shards, len(shards))
            found = grouped(parts)
            assert found == whole
            for name in STATISTICS:
                np.testing.assert_array_equal(found.mean(name), whole.mean(name))
            np.testing.assert_array_equal(found.means().scores, whole.means().scores)
    assert grouped(shards[1:]) != whole
    assert sum(shards) == whole
    assert shards[0] + HeadSums.of_nothing() == shards[0]


@given(st.lists(st.floats(0, 2.0**40), min_size=1, max_size=30), st.randoms())
@settings(max_examples=60, deadline=None)
def test_exact_sums_follow_no_order_and_lose_half_a_unit_each(values, draw):
    parts = [parts_of(np.array(x)) for x in values]
    total = total_of(sum(parts))
    draw.shuffle(parts)
    assert total_of(sum(parts)) == total
    exact = sum(int(x * 2**30) for x in values) / 2**30
    assert abs(total - exact) <= len(values) * 2.0**-21 + abs(exact) * 2.0**-52 + 1e-9


def test_sums_of_other_layers_and_heads_stand_beside_each_other(tmp_path):
    for n, (heads, number) in enumerate([((0, 1), 0), ((1, 5), 3)]):
        layer = Layer(
            numbers(2, 9, 4, seed=n), numbers(2, 9, 4, seed=7), causal=True, number=number,
            head_numbers=heads,
        )  # fmt: skip
        Recording(list("abcabcabc"), [layer]).save(tmp_path / f"{n}.safetensors")
    survey = Survey(tmp_path / "heads", corpus=tmp_path)
    survey.run(workers=1)
    heads = survey.heads()
    assert heads.layers == (0, 3)
    assert heads.head_numbers == ((0, 1), (1, 5))
    assert (heads.count("entropy") == 9).all()
    assert heads.role(3, 5) == survey.means().role(3, 5)


# Documents


def test_documents_that_are_empty_unreadable_or_too_long_are_named_and_counted(tmp_path, model):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "zero.txt").write_bytes(b"a\0b")
    (tmp_path / "long.txt").write_text(WORDS[:3000])
    (tmp_path / "good.txt").write_text("import os")
    (tmp_path / ".hidden").write_text("not read")
    lines = ['{"text": "import sys"}', "", "no json", '{"other": 1}', '{"text": null}', "[1]"]
    lines.append('{"text": "half \\ud800"}')
    (tmp_path / "rows.jsonl").write_text(
        "\n".join([*lines, '{"text": 5}', "{}", '{"text": "end"}'])
    )
    survey = started(tmp_path / "heads", tmp_path, model)
    survey.run(workers=1)
    facts = survey.facts().values()
    names = {
        what: [
            str(name).removeprefix(f"{tmp_path}/") for one in facts for name in getattr(one, what)
        ]
        for what in ("cut", "empty")
    }
    assert names["cut"] == ["long.txt"]
    assert sorted(names["empty"]) == ["empty.txt", "rows.jsonl:2", "rows.jsonl:5"]
    reasons = {name.rpartition("/")[2]: why for one in facts for name, why in one.unreadable}
    assert reasons.keys() == {
        "latin.txt", "zero.txt", "rows.jsonl:3", "rows.jsonl:4", "rows.jsonl:6", "rows.jsonl:7",
        "rows.jsonl:8", "rows.jsonl:9",
    }  # fmt: skip
    assert reasons["latin.txt"] == "byte 3 is no UTF-8"
    assert reasons["rows.jsonl:4"] == "there is no 'text' in it; --column names another, of 'other'"
    assert reasons["rows.jsonl:6"] == "an object with 'text' is needed, and it is list"
    assert reasons["rows.jsonl:7"] == "character 5 is half of a surrogate pair"
    assert reasons["rows.jsonl:8"] == "'text' is no text, but int"
    assert reasons["rows.jsonl:9"] == "an object with 'text' is needed, and it has nothing"
    assert survey.heads().documents == 4
    assert sum(one.documents for one in facts) == 4
    assert isinstance(next(iter(facts)), Facts)


def test_files_of_rows_without_a_row_are_named(tmp_path, model):
    import pyarrow as pa

    (tmp_path / "a.jsonl").touch()
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("import os")
    survey = started(tmp_path / "heads", tmp_path, model)
    names = {str(tmp_path / name): "it has no rows" for name in ("a.jsonl", "b.parquet")}
    assert unreadable(survey) == names
    assert survey.heads().documents == 1
    assert [survey.document(n) for n in range(3)] == [str(tmp_path / "c.txt"), *names]


def test_the_byte_that_is_no_utf_8_is_counted_from_the_beginning_of_the_file(tmp_path, model):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    survey = started(tmp_path / "heads", tmp_path, model)
    assert unreadable(survey) == {str(tmp_path / "a.txt"): "byte 6 is no UTF-8"}
    assert survey.text(1) == "café"


def unreadable(survey):
    """Name and reason of all that is left out of a survey, after it was run."""
    survey.run(workers=1)
    return dict(pair for one in survey.facts().values() for pair in one.unreadable)


def test_folders_and_files_that_may_not_be_read_are_named_and_counted(tmp_path, model, monkeypatch):
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "rows.jsonl", "sub/b.txt"):
        (tmp_path / name).write_text("import os")
    scan, open_ = os.scandir, _corpus.open_file

    def guarded(wanted, forbidden):  # root may read everything
        def call(path):
            if os.fspath(path) == str(tmp_path / forbidden):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return wanted(path)

        return call

    monkeypatch.setattr(os, "scandir", guarded(scan, "sub"))
    monkeypatch.setattr(_corpus, "open_file", guarded(open_, "rows.jsonl"))
    survey = started(tmp_path / "heads", tmp_path, model)
    assert unreadable(survey) == {
        str(tmp_path / "sub"): "all in this folder: Permission denied",
        str(tmp_path / "rows.jsonl"): "Permission denied",
    }
    assert survey.heads().documents == 1
    assert {survey.document(n) for n in (1, 2)} == {*unreadable(survey)}
    with pytest.raises(ValueError, match=r"no file to read: .*/sub \(all in this folder: Perm"):
        started(tmp_path / "other", tmp_path / "sub", model)


@pytest.mark.parametrize("pattern", ["*/*.txt", "*/b.txt", "**/*.txt", "*/*"])
def test_folders_that_a_pattern_may_not_look_into_are_named(pattern, tmp_path, model, monkeypatch):
    texts, error = tmp_path / "texts", (errno.EACCES, "Permission denied")
    for name in ("a", "sub"):
        (texts / name).mkdir(parents=True)
        (texts / name / "b.txt").write_text("import os")
    scan, stat = os.scandir, os.lstat

    def guarded(wanted):  # root may read everything
        def call(path, *args, **kwargs):
            folder = str(texts / "sub")
            if f"{path}".startswith(folder if wanted is scan else f"{folder}{os.sep}"):
                raise PermissionError(*error, str(path))
            return wanted(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "scandir", guarded(scan))
    monkeypatch.setattr(os, "lstat", guarded(stat))
    survey = started(tmp_path / "heads", str(texts / pattern), model)
    assert unreadable(survey) == {str(texts / "sub"): "all in this folder: Permission denied"}
    assert survey.heads().documents == 1
    with pytest.raises(FileNotFoundError, match=r"no file matches\. .*/sub: Permission denied"):
        started(tmp_path / "other", str(texts / "s*" / "c*.txt"), model)


def test_links_that_lead_nowhere_and_pipes_of_a_folder_are_left_out_and_named(tmp_path, model):
    texts = tmp_path / "texts"
    (texts / "sub").mkdir(parents=True)
    (texts / "good.txt").write_text("import os")
    (texts / "sub" / "good.txt").write_text("import sys")
    (texts / "loop.txt").symlink_to("loop.txt")
    (texts / "dangling.txt").symlink_to("/not/there.txt")
    (texts / "up").symlink_to(tmp_path)
    os.mkfifo(texts / "pipe")
    for named in (texts, str(texts / "*")):
        survey = started(tmp_path / "heads", named, model)
        found = {os.path.relpath(name, texts): why for name, why in unreadable(survey).items()}
        assert found.pop("loop.txt") == os.strerror(errno.ELOOP)
        assert found.pop("dangling.txt") == "a link to /not/there.txt, which is not there"
        assert found.pop("pipe") == "a pipe"
        assert found.pop("up") == "a link to a folder, which is not followed"
        assert not found
        assert survey.heads().documents == 2
        shutil.rmtree(tmp_path / "heads")
    with pytest.raises(ValueError, match=r"pipe is a pipe; name files, or folders of them"):
        started(tmp_path / "heads", texts / "pipe", model)
    with pytest.raises(FileNotFoundError, match=r"loop.txt: no such file or folder"):
        started(tmp_path / "heads", texts / "loop.txt", model)


@pytest.mark.skipif(sys.platform != "linux", reason="names of any bytes are Linux's")
def test_names_of_files_may_be_any_bytes(tmp_path, model):
    import pyarrow as pa

    names = [os.fsdecode(b"caf\xe9" + end) for end in (b".jsonl", b".parquet", b".txt")]
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    (folder / names[0]).write_text('{"text": "import os"}\n{}')
    with (folder / names[1]).open("wb") as file:
        parquet.write_table(pa.table({"text": ["import sys"]}), file)
    (folder / names[2]).write_text("")
    heads = folder / "heads"
    survey = started(heads, folder, model)
    assert list(unreadable(survey)) == [f"{folder / names[0]}:2"]
    assert [one for facts in survey.facts().values() for one in facts.empty] == [
        str(folder / names[2])
    ]
    assert survey.heads().documents == 2
    assert survey.text(2) == "import sys"
    assert Survey(heads).manifest == survey.manifest
    assert started(heads, folder, model).missing() == []
    json.loads((heads / "survey.json").read_text())


def test_a_column_with_a_dot_in_its_name_is_cut_into_as_many_shards(tmp_path, model):
    import pyarrow as pa

    shards = {}
    for name in ("body", "doc.body"):
        table = pa.table({name: [f"{n} the cat sat on the mat" for n in range(10)]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
        shards[name] = len(
            started(tmp_path / name, tmp_path / f"{name}.parquet", model, column=name)
        )
    assert shards["doc.body"] == shards["body"] > 1


def test_a_column_whose_name_another_has_is_refused(tmp_path, model):
    import pyarrow as pa

    texts = pa.array(["the cat", "sat"])
    table = pa.table([texts, texts, texts], names=["text", "body", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet has 2 columns 'text'; .*name another: --col"):
        started(tmp_path / "heads", tmp_path / "a.parquet", model)
    assert len(started(tmp_path / "heads", tmp_path / "a.parquet", model, column="body"))


def test_rows_of_parquet_and_jsonl_are_the_documents_of_text_files(tmp_path, model, corpus, survey):
    import pyarrow as pa

    texts = [path.read_text() for path in sorted(corpus.glob("*.txt"))]
    table = pa.table({"n": range(10), "body": texts})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    rows = (json.dumps({"body": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text("".join(rows))
    found = {}
    for kind in ("parquet", "jsonl"):
        one = started(tmp_path / kind, tmp_path / f"a.{kind}", model, column="body")
        assert len(one) > 3
        one.run(workers=1)
        found[kind] = one.heads()
        assert one.text(4) == texts[4]
        assert one.document(4).endswith(f"a.{kind}:5")
    assert found["parquet"] == found["jsonl"] == survey.heads()
    with pytest.raises(ValueError, match=r"no column 'text'; there are n, body"):
        started(tmp_path / "other", tmp_path / "a.parquet", model)
    (tmp_path / "b.parquet").write_text("none")
    with pytest.raises(ValueError, match=r"b\.parquet: not a Parquet file .* leave it out"):
        started(tmp_path / "other", tmp_path / "b.parquet", model)


def test_patterns_folders_and_files_are_found_once_each_and_not_the_survey_itself(tmp_path, model):
    (tmp_path / "in").mkdir()
    for name in ("b.txt", "a.txt", "in/c.md"):
        (tmp_path / name).write_text("import os")
    folder = tmp_path / "heads"
    named = [tmp_path, tmp_path / "b.txt", str(tmp_path / "*.txt")]
    survey = started(folder, named, model)
    paths = [source.path for shard in survey.manifest.shards for source in shard]
    assert [os.path.relpath(path, tmp_path) for path in paths] == ["a.txt", "b.txt", "in/c.md"]
    survey.run(workers=1)
    assert started(folder, named, model).missing() == []
    for wrong, message in (
        ("not/there", "no such file or folder"),
        ("https://a.b/c.safetensors", "no such file or folder. An address is fetched first"),
        (str(tmp_path / "*.rs"), "no file matches"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            started(tmp_path / "other", wrong, model)
    with pytest.raises(ValueError, match="no file to read"):
        started(tmp_path / "other", [], model)


def test_a_long_document_is_tokenized_as_far_as_it_is_read(tmp_path, model, monkeypatch):
    (tmp_path / "a.txt").write_text(WORDS * 40)
    loaded = LanguageModel.load(model)
    lengths = []
    encode = loaded.tokenizer.encode
    monkeypatch.setattr(
        loaded.tokenizer, "encode", lambda text, bos: lengths.append(len(text)) or encode(text, bos)
    )
    survey = started(tmp_path / "heads", tmp_path / "a.txt", loaded)
    survey.run()
    assert max(lengths) < len(WORDS) * 20
    assert survey.heads().tokens == 64


# Manifest and files


def test_the_same_call_goes_on_and_another_names_what_differs(tmp_path, corpus, model):
    folder = tmp_path / "heads"
    started(folder, corpus, model).run(workers=1, shards=[0, 2])
    again = started(folder, corpus, model)
    assert again.missing() == [n for n in range(len(again)) if n not in (0, 2)]
    before = {path: path.stat().st_mtime_ns for path in (folder / "heads").iterdir()}
    again.run(workers=1)
    assert again.missing() == []
    assert before.items() <= {p: p.stat().st_mtime_ns for p in (folder / "heads").iterdir()}.items()
    assert repr(again) == f"Survey({str(folder)!r}, {model}, shards: {len(again)} of {len(again)})"
    tiny = tiny_model()
    tiny.weights["norm"] = tiny.weights["norm"] + 1
    for options, difference in (
        ({"max_tokens": 65}, "it has max_tokens 64, and 65 is asked for"),
        ({"max_tokens": 2048}, "it has max_tokens 64, and 2048 is asked for"),
        ({"column": "body"}, "it has column text, and body is asked for"),
        ({"documents": True}, "it has documents False, and True is asked for"),
        ({"threads": 2}, "it has threads 1, and 2 is asked for"),
        ({"model": tiny}, "it has model "),
        ({"shard_tokens": 200}, "other shards"),
        ({"corpus": corpus / "1.txt"}, r"it reads .*0.txt, which is not asked for"),
        ({"corpus": sorted(corpus.iterdir())[::-1]}, "stands at another place among the files"),
    ):
        with pytest.raises(ValueError, match=difference) as error:
            started(folder, **({"corpus": corpus, "model": model} | options))
        assert "Name another folder, or remove this one" in str(error.value)


def test_a_file_or_model_that_changed_ends_a_shard_with_its_name(tmp_path, model):
    own = tmp_path / "model"
    tiny_model().save(own)
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text("import os")
    paths = [tmp_path / "0.txt", tmp_path / "1.txt"]
    survey = started(tmp_path / "heads", paths, own, shard_tokens=1)
    (tmp_path / "1.txt").write_text("import sys")
    survey.run_shard(0)
    with pytest.raises(SurveyError, match=r"1.txt has changed since .* it has 10 bytes, and had 9"):
        survey.run_shard(1)
    with pytest.raises(ValueError, match=r"1.txt has changed since"):
        started(tmp_path / "heads", paths, own, shard_tokens=1)
    (tmp_path / "1.txt").write_text("import os")
    with pytest.raises(SurveyError, match=r"ns as its time of change, and had .* with its times"):
        survey.run_shard(1)
    (tmp_path / "1.txt").unlink()
    with pytest.raises(SurveyError, match=r"1.txt: No such file .* Put it back"):
        survey.run_shard(1)
    changed = tiny_model()
    changed.weights["norm"] = changed.weights["norm"] + 1
    changed.save(own)
    load.cache_clear()
    with pytest.raises(SurveyError, match=r"its weights are not those that the survey began with"):
        survey.run_shard(1)
    load.cache_clear()


def test_a_manifest_with_a_changed_bit_is_told_and_one_of_before_has_no_checksum(tmp_path, survey):
    (tmp_path / "heads").mkdir()
    for path in (survey.folder / "heads").iterdir():
        (tmp_path / "heads" / path.name).write_bytes(path.read_bytes())
    path, whole = tmp_path / "survey.json", (survey.folder / "survey.json").read_text()
    for there, changed in (
        ('"max_tokens": 64', '"max_tokens": 65'),
        ('"first": 1,', '"first": 3,'),
    ):
        assert there in whole
        path.write_text(whole.replace(there, changed, 1))
        with pytest.raises(
            ValueError, match=r"\(its checksum is another: .*\)\. Put the one of the"
        ):
            Survey(tmp_path)
    before = {name: x for name, x in json.loads(whole).items() if name != "sha256"}
    path.write_text(json.dumps(before))
    assert Survey(tmp_path).heads() == survey.heads()


def test_a_survey_without_a_corpus_is_opened_and_others_are_errors(tmp_path, survey):
    assert Survey(survey.folder).heads() == survey.heads()
    with pytest.raises(FileNotFoundError, match=r"no survey .*regard survey PATHS"):
        Survey(tmp_path)
    (tmp_path / "survey.json").write_text('{"format": 9}')
    with pytest.raises(
        ValueError, match=r"not a manifest of regard \(format 9; this regard reads 1"
    ):
        Survey(tmp_path)
    (tmp_path / "survey.json").write_text("{}\n")
    with pytest.raises(
        ValueError, match=r"\('format' is missing\)\. Put the one of the survey back"
    ):
        Survey(tmp_path)
    (tmp_path / "survey.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"not a manifest of regard \(maximum recursion"):
        Survey(tmp_path)
    whole = json.loads(survey.manifest.text)
    for wrong, message in (
        ({"settings": {}}, "'max_tokens' is missing"),
        ({"settings": None}, "'NoneType' object is not iterable"),
        ({"model": {"name": 5}}, "name is 5, and no str"),
        ({"settings": whole["settings"] | {"every": "x"}}, "every is 'x', and no int"),
    ):
        (tmp_path / "survey.json").write_text(json.dumps(whole | wrong))
        with pytest.raises(ValueError, match=rf"not a manifest of regard \({message}\)"):
            Survey(tmp_path)
    for options, message in (
        ({"max_tokens": 0}, "max_tokens is 0; at least 1"),
        ({"shard_tokens": -1}, "shard_tokens is -1; at least 1"),
        ({"max_tokens": sys.maxsize}, r"max_tokens is 9\d+; at most 2\*\*40"),
        ({"shard_tokens": 10**30}, r"shard_tokens is 1000\d+; at most 2\*\*40"),
    ):
        with pytest.raises(ValueError, match=message):
            Survey(tmp_path, **options)
    with pytest.raises(IndexError, match="there is no shard 99; there are"):
        survey.run_shard(99)
    with pytest.raises(IndexError, match="there is no shard 99; there are"):
        survey.run(shards=[99])
    with pytest.raises(ValueError, match="workers is 0"):
        survey.run(workers=0)


def test_a_document_is_found_by_its_number_and_no_other_number_is_one(survey, tmp_path, model):
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_text('{"text": "import os"}\n' * (n + 2))
    rows = started(tmp_path / "heads", tmp_path, model, shard_tokens=3)
    assert len(rows) > 3
    named = [f"{tmp_path / f'{n}.jsonl'}:{row}" for n in range(3) for row in range(1, n + 3)]
    assert [rows.document(n) for n in range(9)] == named
    for wrong in (-1, 9):
        with pytest.raises(IndexError, match=f"there is no document {wrong}"):
            rows.document(wrong)
        with pytest.raises(IndexError, match=f"there is no document {wrong}"):
            rows.text(wrong)


def test_what_is_asked_for_once_for_each_of_many_heads_is_found_once(survey):
    heads = survey.heads()
    assert heads.layers is heads.layers
    assert heads.head_numbers is heads.head_numbers


def test_many_shards_are_not_gone_through_once_for_each(tmp_path, corpus, model):
    survey, looked_up = started(tmp_path / "heads", corpus, model), []

    class Number(int):
        def __hash__(self):
            looked_up.append(self)
            return int.__hash__(self)

    with ThreadPoolExecutor(1) as pool:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            survey.run(pool, shards=[Number(n) for n in range(len(survey))])
    assert len(survey) > 7
    assert len(looked_up) <= 3 * len(survey)


def test_a_damaged_file_or_one_of_another_survey_is_named(tmp_path, corpus, model, survey):
    one = started(tmp_path / "heads", corpus / "1.txt", model)
    one.run(workers=1)
    path = one.folder / "heads" / "00000.parquet"
    path.write_bytes((survey.folder / "heads" / "00000.parquet").read_bytes())
    with pytest.raises(ValueError, match=r"00000.parquet is of another survey. Remove it"):
        one.heads()
    path.write_bytes(b"PAR1")
    for ask in (one.heads, one.run):
        with pytest.raises(ValueError, match=r"00000.parquet: not a file of this survey .* Remove"):
            ask()
    path.unlink()
    one.run(workers=1)
    whole = path.read_bytes()
    for at in range(4, len(whole), len(whole) // 40):  # other numbers, or a file of no survey
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):
            one.heads()
    path.write_bytes(whole)
    several = started(tmp_path / "several", corpus, model)
    several.run(workers=1, shards=[0])
    shutil.copy(several.folder / "heads" / "00000.parquet", several.folder / "heads/00001.parquet")
    with pytest.raises(ValueError, match=r"00001.parquet is of another shard. Remove it"):
        several.heads()


def test_no_flipped_bit_of_a_file_changes_what_is_read_of_it(tmp_path, corpus, model):
    one = started(tmp_path / "heads", corpus / "1.txt", model)
    one.run(workers=1)
    path = one.folder / "heads" / "00000.parquet"
    whole, sums, facts = path.read_bytes(), one.heads(), one.facts()
    draw = random.Random(0)
    refused = 0
    for at in (*range(4, len(whole), len(whole) // 100), *(whole.index(b'"tokens": ') + 10,) * 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(3)]) + whole[at + 1 :])
        try:
            assert one.facts() == facts
            assert one.heads() == sums
        except ValueError as error:
            assert "00000.parquet" in str(error)  # noqa: PT017 - the same bits are well too
            refused += 1
    assert refused > 50


def test_a_file_by_another_name_is_no_shard(tmp_path, corpus, model):
    one = started(tmp_path / "heads", corpus / "1.txt", model)
    one.run(workers=1)
    sums, path = one.heads(), one.folder / "heads" / "00000.parquet"
    path.rename(path.with_name("0.parquet"))
    assert one.missing() == [0]
    one.run(workers=1)
    assert one.heads() == sums


def test_files_of_documents_hold_the_sums_that_the_shards_add_up(survey):
    total, documents = 0, []
    for path in sorted((survey.folder / "documents").glob("*.parquet")):
        table = parquet.read_table(path)
        documents += table["document"].to_pylist()
        total = total + np.array(table["entropy_sum"].to_pylist(), float).sum(0)
    assert documents == list(range(10))
    means = total / survey.heads().count("entropy").ravel()
    np.testing.assert_allclose(means, survey.heads().mean("entropy").ravel(), rtol=1e-6)


def test_the_files_are_plain_columns_of_sums_and_counts(survey):
    tables = [parquet.read_table(path) for path in (survey.folder / "heads").iterdir()]
    rows = [
        row
        for table in tables
        for row in table.to_pylist()
        if (row["layer"], row["head"]) == (1, 2)
    ]
    mean = sum(row["first_sum"] for row in rows) / sum(row["first_count"] for row in rows)
    assert mean == pytest.approx(survey.heads().mean("first")[1, 2], rel=1e-12)
    assert sum(row["documents"] for row in rows) == 10
    names = tables[0].column_names
    for name in STATISTICS:
        assert {f"{name}_sum", f"{name}_count", f"{name}_histogram"} <= set(names)


# Models and recordings


@pytest.mark.parametrize("where", ["footer", "page"])
def test_a_damaged_file_of_rows_is_named(where, tmp_path, model):
    import pyarrow as pa

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["the cat sat on the mat"] * 9}), path)
    data = bytearray(path.read_bytes())
    part = slice(30, 60) if where == "page" else slice(-60, -8)
    data[part] = b"\xff" * len(data[part])
    path.write_bytes(data)
    said = (
        r"rows 1 to 9 cannot be read \(.*\)\. Put a whole file in its place, or leave it out, and"
    )
    if where == "footer":
        said = r"not a Parquet file \(.*\)\. Put a whole one in its place, or leave it out: name"
    with pytest.raises((ValueError, SurveyError), match=rf"a\.parquet: {said}"):
        started(tmp_path / "heads", path, model).run(workers=1)


def test_a_changed_bit_of_a_file_of_rows_with_checksums_is_told(tmp_path, model):
    import pyarrow as pa

    path, text = tmp_path / "a.parquet", "the cat sat on the mat"
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    table = pa.table({"text": [text] * 9})
    parquet.write_table(table, path, **plain, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"the cat", b"the bat", 1))
    assert parquet.read_table(path)["text"][0].as_py() == "the bat sat on the mat"
    survey = started(tmp_path / "heads", path, model)
    with pytest.raises(SurveyError, match=r"a\.parquet: rows 1 to .* cannot be read \(.*CRC"):
        survey.run(workers=1)


def test_recordings_of_several_models_are_added_up_and_that_is_said(tmp_path):
    layer = Layer(numbers(2, 5, 4), numbers(2, 5, 4))
    for name in ("one", "two"):
        Recording(list("abcde"), [layer], model=name).save(tmp_path / f"{name}.safetensors")
    match = r"of 2 models \('one', 'two'\), and heads of the same number are added up"
    with pytest.warns(UserWarning, match=match) as told:
        survey = Survey(tmp_path / "heads", corpus=tmp_path / "*.safetensors")
    assert told[0].filename == __file__
    survey.run(workers=1)
    assert survey.heads().documents == 2
    Survey(tmp_path / "single", corpus=tmp_path / "one.safetensors")  # nothing is said of one


def test_recordings_of_any_kind_are_surveyed_without_a_model(tmp_path):
    random_ = np.random.default_rng(0)
    weights = np.tril(random_.random((2, 3, 40, 40)))
    weights /= weights.sum(-1, keepdims=True)
    Recording.from_weights(list("ab cd" * 8), weights).save(tmp_path / "w.safetensors")
    cross = Layer(numbers(3, 5, 4), numbers(3, 9, 4), number=0)
    other = Layer(numbers(3, 5, 4, seed=4), numbers(3, 9, 4), number=1)
    made = Recording(list("abcdefghi"), [cross, other], query_tokens=list("vwxyz"))
    made.save(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"no recording")
    survey = Survey(tmp_path / "heads", corpus=str(tmp_path / "*.safetensors"))
    survey.run(workers=1)
    heads = survey.heads()
    assert heads.documents == 2
    assert (heads.count("entropy") == 45).all()
    assert (heads.count("previous") <= 40).all(), "cross-attention has no places"
    (unreadable,) = [one for facts in survey.facts().values() for one in facts.unreadable]
    assert unreadable[0].endswith("y.safetensors")
    expected = np.concatenate([made.weights[0].entropy(), np.zeros((3, 0))], 1).sum(-1)
    plain = -np.where(
        weights[0] > 0, weights[0] * np.log(np.where(weights[0] > 0, weights[0], 1)), 0
    )
    np.testing.assert_allclose(
        heads.mean("entropy")[0] * 45, expected + plain.sum((1, 2)), rtol=1e-5
    )
    assert isinstance(survey.text(0), Recording)


def test_a_recording_whose_numbers_cannot_be_read_is_named_and_counted(tmp_path):
    tokens = [f"\ud800{n}" for n in range(40)]
    recording = Recording(tokens, [Layer(*(numbers(2, 40, 4, seed=n) for n in range(2)))])
    recording.save(tmp_path / "a.safetensors")
    recording.save(tmp_path / "b.safetensors", statistics=True)
    data = (tmp_path / "b.safetensors").read_bytes()
    maxima = recording.weights[0].lse * 0 + 9
    (tmp_path / "b.safetensors").write_bytes(data[: -maxima.nbytes] + maxima.tobytes())
    survey = Survey(tmp_path / "heads", corpus=tmp_path / "*.safetensors")
    survey.run(workers=1)
    assert survey.heads().documents == 1
    (unreadable,) = [one for facts in survey.facts().values() for one in facts.unreadable]
    assert unreadable[0].endswith("b.safetensors")
    assert "the row statistics" in unreadable[1]
    first, *_ = survey.heads().top_receivers(0, 1)
    assert first.token == rf"\ud800{first.position}"


def test_recordings_beside_texts_or_a_model_are_errors(tmp_path, corpus, model):
    made = Recording(list("abc"), [Layer(numbers(1, 3, 2), numbers(1, 3, 2), causal=True)])
    made.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"is a recording, and .* a text; survey either"):
        Survey(tmp_path / "heads", corpus=[tmp_path, corpus])
    with pytest.raises(ValueError, match="leave the model out"):
        Survey(tmp_path / "heads", corpus=tmp_path, model=model)


# Engines


def files_of(survey):
    return {path.name: path.read_bytes() for path in (survey.folder / "heads").glob("*.parquet")}


def test_a_file_is_the_same_bits_on_threads_and_in_processes_one_of_which_is_killed(
    tmp_path, corpus, model
):
    plain, threads = (started(tmp_path / "heads" / name, corpus, model) for name in ("a", "b"))
    # One manifest: the bits follow from it.
    plain.run(workers=1)
    with ThreadPoolExecutor(3) as pool:
        threads.run(pool)
    pooled = started(tmp_path / "heads" / "c", corpus, model)
    seen, killed = [], []

    def kill_one(progress):
        seen.append(progress)
        if progress.shards and not killed:
            killed.extend(multiprocessing.active_children())
            killed[0].kill()

    pooled.run(workers=2, progress=kill_one)
    assert len(killed) == 2
    assert files_of(plain) == files_of(threads) == files_of(pooled)
    assert isinstance(seen[-1], Progress)
    assert (seen[-1].tokens, seen[-1].shards) == (plain.heads().tokens, len(plain))
    assert all(a.shards <= b.shards for a, b in itertools.pairwise(seen))


def test_a_file_is_the_same_bits_whatever_threads_its_process_has(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(WORDS)
    surveys = [started(tmp_path / name, text, "builtin", max_tokens=256) for name in ("a", "b")]
    for survey, count in zip(surveys, (1, 4)):
        with threadpool_limits(count, user_api="blas"):
            set_here = most_threads()
            survey.run(workers=1)
            assert most_threads() == set_here
    assert files_of(surveys[0]) == files_of(surveys[1])


def most_threads():
    """Of NumPy's products; 0 where it has a BLAS of which that is not known."""
    return max((x["num_threads"] for x in threadpool_info() if x["user_api"] == "blas"), default=0)


def test_threads_of_one_number_share_it_and_another_number_waits(monkeypatch):
    # Of NumPy's products what is asked for: a BLAS that began with one thread may keep it.
    events, seen, before = [], [], torch.get_num_threads()
    inside, go = threading.Event(), threading.Event()

    class Limits:
        def __init__(self, count, user_api):
            assert user_api == "blas"
            self.count = count
            events.append(("set", count))

        def restore_original_limits(self):
            events.append(("restored", self.count))

    monkeypatch.setattr(_threads, "threadpool_limits", Limits)

    def take(count, wait):
        with threads(count):
            seen.append((count, torch.get_num_threads()))
            inside.set()
            assert not wait or go.wait(60)

    first = threading.Thread(target=take, args=(1, True))
    first.start()
    assert inside.wait(60)
    take(1, False)
    other = threading.Thread(target=take, args=(2, False))
    other.start()
    other.join(0.05)
    assert other.is_alive()
    assert events == [("set", 1)]
    go.set()
    first.join()
    other.join()
    assert seen == [(1, 1), (1, 1), (2, 2)]
    assert events == [("set", 1), ("restored", 1), ("set", 2), ("restored", 2)]
    assert torch.get_num_threads() == before


class OfEachThread:
    """An OpenBLAS that is built on OpenMP, as threadpoolctl has it."""

    user_api, internal_api, threading_layer = "blas", "openblas", "openmp"

    def __init__(self):
        self._of = threading.local()

    @property
    def num_threads(self):
        return getattr(self._of, "number", 8)

    def set_num_threads(self, number):
        self._of.number = number


def test_every_thread_sets_the_threads_of_products_that_are_its_own(monkeypatch):
    library, inside, go, seen = OfEachThread(), threading.Event(), threading.Event(), []

    class Limits:
        def __init__(self, count, user_api):
            self.before = library.num_threads
            library.set_num_threads(count)

        def restore_original_limits(self):
            library.set_num_threads(self.before)

    def controller():
        return SimpleNamespace(lib_controllers=[library])

    monkeypatch.setattr(_threads, "ThreadpoolController", controller)
    monkeypatch.setattr(_threads, "threadpool_limits", Limits)

    def other():
        library.set_num_threads(6)
        with threads(2):
            seen.append(library.num_threads)
            inside.set()
            assert go.wait(60)
        seen.append(library.num_threads)

    with ThreadPoolExecutor(1) as pool:
        try:
            with threads(2):  # comes first, and leaves first
                last = pool.submit(other)
                assert inside.wait(60)
                assert library.num_threads == 2
            assert library.num_threads == 8
        finally:
            go.set()
        last.result()
    assert seen == [2, 6]


def test_any_thread_sets_the_threads_of_products_and_takes_that_back():
    """Also where another one, which goes on, was the first to do so."""
    code = """if True:
        from concurrent.futures import ThreadPoolExecutor
        from threadpoolctl import threadpool_info, threadpool_limits
        from regard.survey._threads import threads

        def most():
            return max((x["num_threads"] for x in threadpool_info()), default=1)

        def take():
            with threads(1):
                return most()

        usual = most()
        print(usual)
        with ThreadPoolExecutor(1) as other:
            print(take(), other.submit(take).result(), most() == usual)
            with threadpool_limits(usual):
                print(other.submit(take).result(), most() == usual)
            block = threads(1)
            other.submit(block.__enter__).result()
            with threads(1):  # leaves last, and was not the first
                other.submit(block.__exit__, None, None, None).result()
            print(most() == usual)
            other.submit(take).result()
            with threadpool_limits(1):
                print(most())
    """
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
    )
    usual, _, rest = told.stdout.partition("\n")
    if usual == "1":
        pytest.skip("NumPy's products have one processor here")
    assert rest == "1 1 True\n1 True\nTrue\n1\n", told.stderr


def test_progress_after_a_resume_has_a_rate_of_this_run_alone(tmp_path, corpus, model, monkeypatch):
    survey = started(tmp_path / "heads", corpus, model)
    survey.run(workers=1, shards=range(len(survey) - 1))
    now = [100.0]
    monkeypatch.setattr(running.time, "monotonic", lambda: now.__setitem__(0, now[0] + 1) or now[0])
    seen = []
    survey.run(workers=1, progress=seen.append)
    first, last = seen[0], seen[-1]
    assert first.tokens > last.tokens / 2, "those of the run before are done"
    assert first.rate <= 64, "64 tokens in a second, and not those of the run before"
    assert first.seconds is not None
    assert last.seconds == 0
    assert last.tokens == last.total == survey.heads().tokens


def test_progress_of_some_shards_counts_the_tokens_of_these_and_of_what_is_done(
    tmp_path, corpus, model
):
    survey, seen = started(tmp_path / "heads", corpus, model), []
    survey.run(workers=1, shards=[0, 2], progress=seen.append)
    assert (seen[-1].shards, seen[-1].of) == (2, len(survey))
    assert seen[-1].tokens == seen[-1].total == survey.heads().tokens
    survey.run(workers=1, shards=[1], progress=seen.append)
    assert (seen[-1].shards, seen[-1].of) == (3, len(survey))
    assert seen[-1].tokens == seen[-1].total == survey.heads().tokens
    survey.run(workers=1, progress=seen.append)
    assert seen[-1].shards == seen[-1].of == len(survey) > 3
    assert seen[-1].tokens == seen[-1].total == survey.heads().tokens
    assert all(one.tokens <= one.total for one in seen)


def test_a_first_shard_without_a_token_says_nothing_of_those_to_come():
    seen = []
    meter = running.Meter([10, 100], {}, seen.append)
    meter.finished(0, 0)
    assert (seen[-1].tokens, seen[-1].total) == (0, 100)


def test_what_is_no_number_is_refused_before_anything_is_written(tmp_path, corpus, model, survey):
    for name in ("max_tokens", "shard_tokens", "threads"):
        for wrong, told in ((1.5, "a float"), ("5", "a str"), (True, "a bool")):
            with pytest.raises(TypeError, match=f"survey: {name} is {told}; an int is needed"):
                Survey(tmp_path / "heads", model=model, corpus=corpus, **{name: wrong})
    for name, wrong, message in (
        ("documents", "no", "documents is a str; True or False is needed"),
        ("trust_remote_code", "no", "trust_remote_code is 'no'; True or False is needed"),
        ("column", 3, "column is an int; a str is needed"),
        ("corpus", 5, "corpus is an int; a path or a list of paths is needed"),
        ("corpus", [corpus, 5], "corpus is an int; a path or a list of paths is needed"),
        ("corpus", b"texts", "corpus is a bytes; a path or a list of paths is needed"),
        ("model", torch.nn.Linear(2, 2), "model is a Linear; a name, a folder or a LanguageModel"),
        ("model", 5, "model is an int; a name, a folder or a LanguageModel"),
    ):
        with pytest.raises(TypeError, match=message):
            Survey(tmp_path / "heads", **{"model": model, "corpus": corpus, name: wrong})
    with pytest.raises(TypeError, match="folder is an int; a path is needed"):
        Survey(5, model=model, corpus=corpus)
    named = ("model", " "), ("folder", ""), ("corpus", ""), ("corpus", [corpus, ""])
    for name, wrong in named:  # as of an unset variable
        given = {"folder": tmp_path / "heads", "model": model, "corpus": corpus}
        with pytest.raises(ValueError, match=f"survey: {name} is an empty name"):
            Survey(**given | {name: wrong})
    assert not (tmp_path / "heads").exists()
    for ask, message in (
        (lambda: survey.run(shards=3), "shards is an int; a list of ints is needed: \\[3\\]"),
        (lambda: survey.run(shards=[0, 1.5]), "shard is a float; an int is needed"),
        (lambda: survey.run(shards="01"), "shard is a str; an int is needed"),
        (lambda: survey.run(workers=1.5), "workers is a float; an int is needed"),
        (lambda: survey.run(5), "executor is an int; a concurrent.futures.Executor is needed"),
        (lambda: survey.run(ThreadPoolExecutor), "executor is the class ThreadPoolExecutor; a"),
        (lambda: survey.run_shard("0"), "shard is a str; an int is needed"),
        (lambda: survey.text(0.5), "document is a float; an int is needed"),
        (lambda: survey.document("0"), "document is a str; an int is needed"),
    ):
        with pytest.raises(TypeError, match=f"survey: {message}"):
            ask()
    assert survey.document(np.int64(0)) == survey.document(0)
    of_numpy = {"max_tokens": np.int64(64), "shard_tokens": np.int32(40), "threads": np.int64(1)}
    assert len(Survey(tmp_path / "heads", model=model, corpus=corpus, **of_numpy)) == len(survey)


def test_of_two_surveys_that_begin_at_once_in_a_folder_the_second_is_refused(
    tmp_path, corpus, model, monkeypatch
):
    folder, make = tmp_path / "heads", running.make_folders

    def meanwhile(*given):  # between the look at the folder and the writing
        make(*given)
        monkeypatch.undo()
        started(folder, corpus, model, max_tokens=32)

    monkeypatch.setattr(running, "make_folders", meanwhile)
    with pytest.raises(ValueError, match="it has max_tokens 32, and 64 is asked for"):
        started(folder, corpus, model)
    assert Survey(folder).manifest.settings["max_tokens"] == 32
    assert {path.name for path in folder.iterdir()} == {"heads", "survey.json"}


def test_a_survey_that_begins_twice_at_once_is_one(tmp_path, corpus, model, monkeypatch):
    folder, make = tmp_path / "heads", running.make_folders

    def meanwhile(*given):
        make(*given)
        monkeypatch.undo()
        started(folder, corpus, model)

    monkeypatch.setattr(running, "make_folders", meanwhile)
    assert started(folder, corpus, model).manifest == Survey(folder).manifest


def test_a_survey_that_is_opened_has_the_settings_that_it_began_with(
    survey, tmp_path, corpus, model
):
    same = Survey(survey.folder, max_tokens=64, documents=True, model=survey.manifest.model["name"])
    assert same.heads() == survey.heads()
    for options, message in (
        ({"max_tokens": 65}, "it has max_tokens 64, and 65 is asked for"),
        ({"column": "body"}, "it has column text, and body is asked for"),
        ({"threads": 2}, "it has threads 1, and 2 is asked for"),
        ({"model": "another"}, "and another is asked for"),
        ({"shard_tokens": 9}, "shard_tokens .* without a corpus"),
    ):
        with pytest.raises(ValueError, match=message):
            Survey(survey.folder, **options)
    other = started(tmp_path / "heads", corpus, model, column="body", documents=True, threads=2)
    for name, usual in {"column": "text", "documents": False, "threads": 1}.items():
        with pytest.raises(ValueError, match=f"it has {name} .*, and {usual} is asked for"):
            Survey(other.folder, **{name: usual})
    assert Survey(other.folder).manifest == other.manifest


def test_a_model_that_is_no_name_is_not_taken_to_several_processes(tmp_path, corpus, model):
    survey = started(tmp_path / "heads", corpus, LanguageModel.load(model))
    with pytest.raises(ValueError, match=r"workers is 2, .* in this process alone"):
        survey.run(workers=2)
    assert len(survey.missing()) == len(survey)


class Client:
    """As Dask's, which takes work like an executor, and gives futures of its own."""

    def __init__(self):
        self.cancelled = []

    def submit(self, work, *given):
        return SimpleNamespace(cancel=lambda: self.cancelled.append(given[1]))


class DaskClient(Client):
    def get_executor(self):
        return ThreadPoolExecutor(1)


def test_a_client_that_is_no_executor_is_refused_with_the_way_out(tmp_path, corpus, model):
    survey, client = started(tmp_path / "heads", corpus, model), Client()
    with pytest.raises(TypeError, match=r"is a DaskClient; .* which its get_executor\(\) makes\."):
        survey.run(DaskClient())
    with pytest.raises(TypeError, match=r"executor is a Client, whose submit gives a Simple"):
        survey.run(client)
    assert client.cancelled == [0]
    with DaskClient().get_executor() as pool:
        survey.run(pool)
    assert survey.missing() == []


class CancellingExecutor(ThreadPoolExecutor):
    """Cancels what comes second, and takes nothing after a number of tasks."""

    def __init__(self, most=1000):
        super().__init__(1)
        self.made, self.most = [], most

    def submit(self, function, task, number):
        if len(self.made) == self.most:
            raise RuntimeError("cannot schedule new futures after shutdown")
        waits = number == 1 or self.most < 1000
        self.made.append(Future() if waits else super().submit(function, task, number))
        if number == 1:
            self.made[-1].cancel()
        return self.made[-1]


def test_a_shard_that_its_executor_cancels_is_named_and_the_others_are_computed(
    tmp_path, corpus, model
):
    survey = started(tmp_path / "heads", corpus, model)
    said = r"shard 1 could not be computed: its executor cancelled it\."
    with CancellingExecutor() as pool, pytest.raises(SurveyError, match=said):
        survey.run(pool)
    assert survey.missing() == [1]


def test_an_executor_that_takes_no_more_shards_computes_none_of_those_that_wait(
    tmp_path, corpus, model
):
    survey = started(tmp_path / "heads", corpus, model)
    with CancellingExecutor(most=3) as pool, pytest.raises(RuntimeError, match="after shutdown"):
        survey.run(pool)
    assert all(future.cancelled() for future in pool.made)


class FailingExecutor(ThreadPoolExecutor):
    def submit(self, function, task, number):
        if number == 1:
            future = Future()
            future.set_exception(OSError("the disk is full"))
            return future
        return super().submit(function, task, number)


def test_a_shard_that_fails_is_named_and_the_others_are_done(tmp_path, corpus, model):
    survey = started(tmp_path / "heads", corpus, model)
    with (
        FailingExecutor(2) as pool,
        pytest.raises(
            SurveyError, match=r"shard 1 could not be computed: OSError: the disk is full"
        ),
    ):
        survey.run(pool)
    assert survey.missing() == [1]


def test_a_full_disk_is_told_by_the_name_of_the_file(tmp_path):
    resource = pytest.importorskip("resource", reason="this system limits no file")
    for n in range(2):
        (tmp_path / f"{n}.txt").write_text("import os")
    survey = started(tmp_path / "heads", tmp_path / "*.txt", None, shard_tokens=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(
            SurveyError, match=r"computed: \S+heads/00000.parquet: File too large\."
        ):
            survey.run(workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in survey.folder.rglob("*.*")] == ["survey.json"]


def test_a_shard_that_fails_in_this_process_does_not_stop_the_others(tmp_path, model):
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("import os")
    survey = started(tmp_path / "heads", tmp_path / "*.txt", model, shard_tokens=1)
    (tmp_path / "1.txt").write_text("import sys")
    with pytest.raises(SurveyError, match=r"shard 1 could not be computed: .*1.txt has changed"):
        survey.run(workers=1)
    assert survey.missing() == [1]


@pytest.mark.parametrize("engine", [{"workers": 1}, {"workers": 2}, {"executor": "threads"}])
def test_progress_counts_no_token_of_a_shard_that_failed(engine, tmp_path, model):
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_text('{"text": "import os"}\n' * 3)
    survey, seen = started(tmp_path / "heads", tmp_path / "*.jsonl", model, shard_tokens=27), []
    (tmp_path / "2.jsonl").write_text("gone")
    with ThreadPoolExecutor(1) as pool, pytest.raises(SurveyError, match=r"2\.jsonl has changed"):
        survey.run(pool if "executor" in engine else None, workers=engine.get("workers"),
                   progress=seen.append)  # fmt: skip
    assert seen[-1].tokens == seen[-1].total == survey.heads().tokens
    assert (seen[-1].shards, seen[-1].of) == (1, 2)


def test_a_shard_that_ends_its_process_is_tried_three_times_and_named(
    tmp_path, corpus, model, monkeypatch
):
    survey = started(tmp_path / "heads", corpus, model)
    ran = []

    def pool(task, batch, workers, shared, meter, failed):
        ran.append(list(batch))
        for number in batch[: workers + 1]:
            shared[1 + number] = 1  # it has begun
            if number == 1:
                return running.BrokenExecutor("killed")
            survey.run_shard(number)
        return None

    monkeypatch.setattr(running, "_one_pool", pool)
    with pytest.raises(
        SurveyError, match=r"shard 1 could not be computed: its process ended 3 times.* smaller max"
    ):
        survey.run(workers=2)
    assert survey.missing() == [1]
    assert ran[1:3] == [[1], [1]], "suspects by themselves, so that they take no other along"


def test_processes_that_end_as_they_begin_say_what_a_script_needs(
    tmp_path, corpus, model, monkeypatch
):
    survey = started(tmp_path / "heads", corpus, model)
    ends = running.BrokenExecutor("ended")
    monkeypatch.setattr(running, "_one_pool", lambda *_: ends)
    with pytest.raises(SurveyError, match=r"end as they begin.* under if __name__ == \"__main__\""):
        survey.run(workers=2)


class EndedPool:
    """A process has ended before the shards were handed out."""

    def __init__(self, *_):
        pass

    def submit(self, *_):
        raise running.BrokenExecutor("ended")

    def shutdown(self, **_):
        pass


def test_a_process_that_ends_before_all_shards_are_handed_out_is_no_error_of_its_own(
    tmp_path, corpus, model, monkeypatch
):
    survey = started(tmp_path / "heads", corpus, model)
    monkeypatch.setattr(running, "ProcessPoolExecutor", EndedPool)
    with pytest.raises(SurveyError, match="its processes end as they begin"):
        survey.run(workers=2)


def test_a_small_corpus_has_24_shards_of_one_size(tmp_path, model):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"a b " * 9}"}}\n' for _ in range(97)))
    survey = started(tmp_path / "heads", tmp_path / "a.jsonl", model, shard_tokens=None)
    sizes = [sum(source.rows[1] - source.rows[0] for source in x) for x in survey.manifest.shards]
    assert len(sizes) == 24
    assert sum(sizes) == 97
    assert {*sizes} <= {3, 4, 5}


def test_unfinished_files_of_killed_processes_are_swept_when_they_are_old(tmp_path, corpus, model):
    survey = started(tmp_path / "heads", corpus / "0.txt", model)
    old, new = (survey.folder / "heads" / f".regard-{n}.tmp" for n in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    survey.run(workers=1)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"
    assert survey.missing() == []


def test_one_layer_at_a_time_is_in_memory(tmp_path, corpus, model, monkeypatch):
    seen = []

    def watched(reader, ids, on_layer):
        def look(layer):
            assert all(key() is None for key in seen), "an earlier layer is still there"
            seen.append(weakref.ref(layer.key))
            on_layer(layer)

        reader.model.hidden(ids, record=look)

    monkeypatch.setattr(Own, "run", watched)
    started(tmp_path / "heads", corpus / "1.txt", model).run(workers=1)
    assert len(seen) == 2


def test_memory_does_not_grow_with_the_corpus(tmp_path, model):
    peaks = []
    gc.freeze()
    for count in (2, 2, 20):  # what is loaded once belongs to neither
        path, folder = tmp_path / f"{count}.jsonl", tmp_path / f"{len(peaks)}"
        if not path.exists():
            rows = (json.dumps({"text": WORDS[n : n + 150]}) + "\n" for n in range(count))
            path.write_text("".join(rows))
        survey = started(folder, path, model, shard_tokens=10**6)
        gc.collect()
        tracemalloc.start()
        survey.run(workers=1, progress=lambda _: gc.collect())  # free lists are no growth
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    gc.unfreeze()
    assert peaks[2] <= 1.1 * peaks[1]


def test_queries_that_are_read_whole_are_spaced_by_a_prime():
    assert [spacing(n) for n in (1, 1024, 2048, 8192)] == [7, 17, 37, 131]


def test_the_picture_has_six_statistics_with_their_numbers(survey, tmp_path):
    figure = survey.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "first, share of weight", "previous, share of weight", "induction, share of weight",
        "entropy, nats", "distance, tokens", "nucleus, keys",
    ]  # fmt: skip
    assert len(figure.axes[3].texts) == 8
    figure.savefig(tmp_path / "a.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        HeadSums.of_nothing().plot()
    with pytest.raises(ValueError, match="no document yet"):
        HeadSums.of_nothing().means()
    assert repr(survey.heads()).startswith("HeadSums(8 heads over 10 documents, ")


def test_a_style_neither_turns_the_picture_over_nor_strikes_its_numbers_through(survey):
    import matplotlib

    with matplotlib.rc_context({"image.origin": "lower", "axes.grid": True}):
        first = survey.plot().axes[0]
    assert first.images[0].origin == "upper"
    assert not any(line.get_visible() for line in first.get_xgridlines())


def made_of(head_numbers, tmp_path, lost=None):
    """Sums of one recording whose layers have heads of these numbers; ``lost`` has a NaN."""
    layers = []
    for at, own in enumerate(head_numbers):
        q, k = (numbers(len(own), 40, 4, seed=2 * at + n) for n in range(2))
        if lost is not None and lost[0] == at:
            q[own.index(lost[1]), 3, 0] = np.nan
        layers.append(Layer(q, k, causal=True, number=at, head_numbers=own))
    Recording(list("abcd" * 10), layers).save(tmp_path / "a.safetensors")
    survey = Survey(tmp_path / "heads", corpus=tmp_path / "a.safetensors")
    survey.run(workers=1)
    return survey.heads()


def test_the_picture_has_heads_by_their_numbers_and_grey_where_there_is_none(tmp_path):
    sums = made_of([(0, 1, 5), (1, 7)], tmp_path, lost=(0, 1))
    axes = sums.plot().axes[3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["H0", "H1", "H5", "H7"]
    drawn, mean = axes.images[0].get_array(), sums.mean("entropy")
    assert drawn.mask.tolist() == [[False, True, False, True], [True, False, True, False]]
    np.testing.assert_array_equal(drawn.compressed(), mean[np.isfinite(mean)])
    (lost,) = [text for text in axes.texts if text.get_text() == "–"]
    assert lost.get_position() == (1, 0)
    paper, colours = axes.get_facecolor(), axes.images[0].cmap(np.arange(256))
    assert np.abs(colours - paper).max(1).min() > 0.2, "no colour of a number"


def test_the_picture_of_many_heads_has_bars_of_colours_for_its_numbers(tmp_path):
    figure = made_of([tuple(range(20))], tmp_path).plot()
    assert len(figure.axes) == 12
    for axes, bar in zip(figure.axes[:6], figure.axes[6:]):
        assert not axes.texts
        assert bar.get_ylim() == axes.images[0].get_clim()
    assert figure.axes[6].get_ylim() == (0, 1)
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == [f"H{n}" for n in range(0, 20, 2)]
