"""Training: reproducible, killed or not."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")

from callers import CALLERS  # noqa: E402
from regard import MaterializeError  # noqa: E402
from regard.lm import LanguageModel, training  # noqa: E402
from regard.lm.corpus import encode_texts  # noqa: E402
from regard.lm.training import CHECKPOINT, Settings, train, train_texts  # noqa: E402

TEXTS = {"a": "def run(self):\n    return self.value\n\nimport os\nimport sys\n" * 40}
SETTINGS = Settings(
    steps=8,
    batch=2,
    length=48,
    vocab_size=300,
    embed_dim=32,
    num_heads=2,
    windows=(15, None),
    save_every=3,
)
FILES = ("model.safetensors", "config.json", "tokenizer.json")


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return folder, train_texts(TEXTS, folder, SETTINGS)


def test_the_model_learns_and_is_loaded(trained):
    folder, losses = trained
    assert len(losses) == 8
    assert losses[0] == pytest.approx(np.log(300), abs=0.3)
    settings = dataclasses.replace(SETTINGS, steps=150)
    longer = train_texts(TEXTS, folder / "longer", settings)
    assert longer[-1] < 1
    model = LanguageModel.load(folder / "longer")
    assert model.loss(TEXTS["a"][:300]) < 1
    assert "return self.value" in "def run(self):" + model.generate("def run(self):", 12)


def test_the_same_run_twice_gives_the_same_bytes(trained, tmp_path):
    folder, losses = trained
    assert train_texts(TEXTS, tmp_path, SETTINGS) == losses
    assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_a_run_is_the_same_whatever_the_caller_computes_in(trained, tmp_path, caller):
    folder, losses = trained
    dtypes = []
    with caller():
        before = torch.get_default_dtype()
        found = train_texts(
            TEXTS, tmp_path, SETTINGS, lambda _: dtypes.append(torch.get_default_dtype())
        )
        assert dtypes == [before] * 8
    assert found == losses
    assert contents(tmp_path) == contents(folder)


def test_the_random_numbers_of_the_caller_stay_as_they_were(tmp_path):
    before = torch.get_rng_state()
    train_texts(TEXTS, tmp_path, dataclasses.replace(SETTINGS, steps=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_another_seed_gives_another_model(trained, tmp_path):
    losses = train_texts(TEXTS, tmp_path, dataclasses.replace(SETTINGS, seed=1))
    assert losses != trained[1]


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("stop", [1, 3, 5, 8])
def test_an_interrupted_run_goes_on_to_the_same_bytes(trained, tmp_path, stop):
    folder, losses = trained
    steps = []

    def progress(progress):
        steps.append(progress.step)
        if len(steps) == stop:
            raise StoppedError

    with pytest.raises(StoppedError):
        train_texts(TEXTS, tmp_path, SETTINGS, progress)
    assert train_texts(TEXTS, tmp_path, SETTINGS, progress) == losses
    assert contents(tmp_path) == contents(folder)
    # Checkpoints are written after progress is reported: step 3's is lost when stopped at 3.
    saved = (stop - 1) // 3 * 3
    assert steps == [*range(1, stop + 1), *range(saved + 1, 9)]


KILLED = """
    import sys
    from regard.lm.training import Settings, train
    file, folder, settings = sys.argv[1], sys.argv[2], eval(sys.argv[3])
    train([file], folder, settings, lambda p: print(p.step, flush=True))
"""


def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path):
    (tmp_path / "a.txt").write_text(TEXTS["a"])
    settings = dataclasses.replace(SETTINGS, steps=20, save_every=1)
    whole = train([tmp_path / "a.txt"], tmp_path / "whole", settings)
    code, run = textwrap.dedent(KILLED), tmp_path / "run"
    command = [sys.executable, "-c", code, tmp_path / "a.txt", run, repr(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    steps = [int(process.stdout.readline()) for _ in range(6)]
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert steps == list(range(1, 7))
    assert not (run / "model.safetensors").exists()
    left = []
    assert train([tmp_path / "a.txt"], run, settings, lambda p: left.append(p.step)) == whole
    assert 1 < left[0] < 20
    assert contents(run) == contents(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(trained, tmp_path):
    folder, losses = trained
    before, calls = contents(folder), []
    assert train_texts(TEXTS, folder, SETTINGS, calls.append) == losses
    assert not calls
    assert contents(folder) == before


def test_an_interrupted_run_in_bfloat16_goes_on_to_the_same_bytes(tmp_path):
    settings = dataclasses.replace(SETTINGS, bfloat16=True)
    whole = train_texts(TEXTS, tmp_path / "whole", settings)

    def progress(progress):
        if progress.step == 5:
            raise StoppedError

    with pytest.raises(StoppedError):
        train_texts(TEXTS, tmp_path / "run", settings, progress)
    assert train_texts(TEXTS, tmp_path / "run", settings) == whole
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_the_last_steps_read_other_texts_where_some_are_given(trained, tmp_path):
    other = {"b": "The old man went home. He was tired, and the door was open.\n" * 40}
    finish = dataclasses.replace(SETTINGS, finish=3, repeats=0)
    vocabulary = [*TEXTS.values(), *other.values()]
    read = train_texts(TEXTS, tmp_path / "a", finish, None, vocabulary, other)
    same = train_texts(TEXTS, tmp_path / "b", finish, None, vocabulary)
    assert read[:5] == same[:5]
    assert min(read[5:]) > max(same[5:]), "new words cost more"
    without = dataclasses.replace(finish, finish=0)
    assert train_texts(TEXTS, tmp_path / "c", without, None, vocabulary) == same
    resumed = []

    def progress(progress):
        resumed.append(progress.step)
        if len(resumed) == 7:
            raise StoppedError

    with pytest.raises(StoppedError):
        train_texts(TEXTS, tmp_path / "d", finish, progress, vocabulary, other)
    assert train_texts(TEXTS, tmp_path / "d", finish, None, vocabulary, other) == read


def test_a_run_of_a_version_with_fewer_settings_goes_on(trained, tmp_path):
    folder, losses = trained
    for name in (*FILES, CHECKPOINT, "run.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    facts = json.loads((folder / "run.json").read_text())
    assert facts.pop("finish") == 0
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert train_texts(TEXTS, tmp_path, SETTINGS) == losses


def test_progress_tells_step_and_loss(tmp_path):
    seen = []
    losses = train_texts(TEXTS, tmp_path, SETTINGS, seen.append)
    assert [(p.step, p.steps, p.loss) for p in seen] == [
        (n, 8, loss) for n, loss in enumerate(losses, 1)
    ]


def test_a_folder_with_another_run_says_what_differs(trained):
    folder, _ = trained
    other = dataclasses.replace(SETTINGS, steps=9, windows=(15, 15))
    message = r"holds another run: it has steps 8, not 9; windows \[15, None\], not \[15, 15\]"
    with pytest.raises(ValueError, match=message):
        train_texts(TEXTS, folder, other)
    with pytest.raises(ValueError, match=r"it has other texts\. Give the same files"):
        train_texts({"a": "other"}, folder, SETTINGS)


def test_a_run_that_began_while_the_texts_were_read_is_not_written_over(tmp_path, monkeypatch):
    other = dataclasses.replace(SETTINGS, seed=1)

    def encode_slowly(texts, tokenizer):
        monkeypatch.undo()
        train_texts(TEXTS, tmp_path, other)
        return encode_texts(texts, tokenizer)

    monkeypatch.setattr(training, "encode_texts", encode_slowly)
    with pytest.raises(ValueError, match=r"holds another run: it has seed 1, not 0"):
        train_texts(TEXTS, tmp_path, SETTINGS)
    assert json.loads((tmp_path / "run.json").read_bytes())["seed"] == 1


def test_of_two_runs_that_begin_at_once_the_second_is_refused(tmp_path, monkeypatch):
    other = dataclasses.replace(SETTINGS, seed=1)

    def begin_late(path, **options):
        monkeypatch.undo()
        train_texts(TEXTS, tmp_path, other)
        return training.replaced_when_complete(path, **options)

    monkeypatch.setattr(training, "replaced_when_complete", begin_late)
    with pytest.raises(ValueError, match=r"holds another run: it has seed 1, not 0"):
        train_texts(TEXTS, tmp_path, SETTINGS)
    assert json.loads((tmp_path / "run.json").read_bytes())["seed"] == 1


def test_a_folder_with_something_else_is_not_written_to(tmp_path):
    for content in ("[1, 2]", "[" * 100_000):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match=r"run.json: not the settings of a run"):
            train_texts(TEXTS, tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", [*FILES, CHECKPOINT])
def test_a_folder_with_a_model_but_no_run_is_left_alone(trained, tmp_path, name):
    (tmp_path / name).write_bytes((trained[0] / name).read_bytes())
    message = rf"holds something else: it has {name} and no run\.json, .* Give another folder\."
    with pytest.raises(ValueError, match=message):
        train_texts(TEXTS, tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_another_vocabulary_or_finish_is_another_run(tmp_path):
    settings = dataclasses.replace(SETTINGS, steps=2, finish=1)
    other = {"b": "The old man went home. He was tired, and the door was open.\n" * 40}
    for name, given in (("a", {}), ("b", {"vocabulary": TEXTS.values()}), ("c", {"finish": TEXTS})):
        losses = train_texts(TEXTS, tmp_path / name, settings, **given)
        assert train_texts(TEXTS, tmp_path / name, settings, **given) == losses
        for changed in ({"vocabulary": other.values()}, {"finish": other}):
            with pytest.raises(ValueError, match="it has other texts"):
                train_texts(TEXTS, tmp_path / name, settings, **given | changed)
    with pytest.raises(ValueError, match="it has other texts"):
        train_texts(TEXTS, tmp_path / "b", settings)


def test_the_vocabulary_may_be_an_iterator(trained, tmp_path):
    train_texts(TEXTS, tmp_path, SETTINGS, vocabulary=iter(TEXTS.values()))
    assert contents(tmp_path) == contents(trained[0])


def test_the_texts_of_a_run_are_digested_as_before(trained):
    digest = "33271954a4b00940c8e382f7c6df9330ba3f3d0d7af902651ff54ea59212d59c"
    assert json.loads((trained[0] / "run.json").read_text())["texts"] == digest


def cut(data):
    return data[:5000]


def without_metadata(data):
    return safetensors.numpy.save(safetensors.numpy.load(data))


def with_losses(losses):
    def damaged(data):
        return safetensors.numpy.save(safetensors.numpy.load(data), {"losses": losses})

    return damaged


def changed(name, value):
    def damaged(data):
        tensors = safetensors.numpy.load(data)
        if tensors.pop(name) is not None and value is not None:
            tensors[name] = value
        length = int.from_bytes(data[:8], "little")
        return safetensors.numpy.save(tensors, json.loads(data[8 : 8 + length])["__metadata__"])

    return damaged


def flipped(data):
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def with_other_losses(data):
    digit = data.index(b'"losses":"[') + len(b'"losses":"[')
    return data[:digit] + (b"3" if data[digit : digit + 1] != b"3" else b"4") + data[digit + 1 :]


def with_another_key(data):
    return data.replace(b'"sha256":"', b'"sha257":"')


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (cut, ""),
        (flipped, "its checksum is another"),
        (with_another_key, "its checksum is another"),
        (with_other_losses, "its checksum is another"),
        (without_metadata, "no losses"),
        (with_losses("[1.0, "), ""),
        (with_losses("5"), "no losses"),
        (with_losses("[]"), "0 losses of 8 steps"),
        (with_losses('["a"]'), "no losses"),
        (with_losses(json.dumps([1.0] * 9)), "9 losses of 8 steps"),
        (changed("embedding", None), r"embedding is missing, needed \(\d+, 32\)"),
        (changed("norm", np.ones(1, np.float32)), r"norm is \(1,\), needed \(32,\)"),
        (changed("optimizer.0.1.momentum_buffer", None), "optimizer.0.1.momentum_buffer is miss"),
        (changed("optimizer.1.0.exp_avg", None), "optimizer.1.0.exp_avg is missing"),
    ],
)
def test_a_damaged_checkpoint_is_an_error(trained, tmp_path, damaged, said):
    folder, _ = trained
    for name in ("run.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / CHECKPOINT).write_bytes(damaged((folder / CHECKPOINT).read_bytes()))
    message = rf"a damaged checkpoint \(.*{said}.*\)\. Delete it to start the run anew"
    with pytest.raises(ValueError, match=message):
        train_texts(TEXTS, tmp_path, SETTINGS)


def test_a_checkpoint_of_an_earlier_version_has_no_checksum_and_goes_on(trained, tmp_path):
    for name in ("run.json", "tokenizer.json", CHECKPOINT):
        (tmp_path / name).write_bytes((trained[0] / name).read_bytes())
    data = (tmp_path / CHECKPOINT).read_bytes()
    length = int.from_bytes(data[:8], "little")
    losses = json.loads(data[8 : 8 + length])["__metadata__"]["losses"]
    (tmp_path / CHECKPOINT).write_bytes(with_losses(losses)(data))
    train_texts(TEXTS, tmp_path, SETTINGS)
    assert contents(tmp_path) == contents(trained[0])


def test_a_model_too_large_for_float16_is_not_written(tmp_path):
    settings = dataclasses.replace(SETTINGS, adam_rate=1e6)
    message = r"embedding: .* of \d+ weights are .* float16.* smaller adam_rate"
    with pytest.raises(ValueError, match=message):
        train_texts(TEXTS, tmp_path, settings)
    assert not {"model.safetensors", "config.json"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("rate", ["muon_rate", "adam_rate"])
def test_a_loss_that_is_no_number_ends_the_run_and_the_checkpoint_before_stays(tmp_path, rate):
    settings = dataclasses.replace(SETTINGS, **{rate: 1e38}, save_every=1)
    steps = []
    message = (
        r"the loss of step (\d+) of 8 is (nan|inf): .* another folder, .* smaller adam_rate or muon"
    )
    for _ in range(2):  # what was killed is resumed, and says the same
        with pytest.raises(ValueError, match=message):
            train_texts(TEXTS, tmp_path, settings, lambda p: steps.append(p.step))
    assert 1 <= len(steps) < 8
    assert steps == list(range(1, len(steps) + 1))
    assert not {"model.safetensors", "config.json"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("wrong", [{"embed_dim": 2 * 10**7}, {"batch": 10**9}])
def test_a_model_or_batch_larger_than_memory_is_refused(tmp_path, wrong):
    message = (
        r"weights, with [\d,]+ tokens in a step, needs .* GB, and .* free\. Take a smaller embed"
    )
    with pytest.raises(MaterializeError, match=message):
        train_texts(TEXTS, tmp_path / "run", dataclasses.replace(SETTINGS, **wrong))
    assert not (tmp_path / "run").exists()


def test_too_little_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="corpus is too short"):
        train_texts({"a": "def"}, tmp_path, SETTINGS)


def test_a_run_that_was_refused_leaves_no_trace_and_the_corrected_one_is_taken(tmp_path):
    folder = tmp_path / "run"
    for wrong, message in (
        ({"length": 100_000}, "corpus is too short.*Give more text, or a smaller length"),
        ({"vocab_size": 20}, "vocab_size 20 is too small"),
    ):
        with pytest.raises(ValueError, match=message):
            train_texts(TEXTS, folder, dataclasses.replace(SETTINGS, **wrong))
        assert not folder.exists()
    train_texts(TEXTS, folder, dataclasses.replace(SETTINGS, steps=1))
    assert {*FILES, "run.json", CHECKPOINT} == {path.name for path in folder.iterdir()}


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"x.bin: not a text"):
        train([tmp_path / "x.bin"], tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps 0; at least 1"),
        ({"batch": -1, "length": 0}, "batch -1, length 0; at least 1"),
        ({"windows": ()}, "no layers; at least 1"),
        ({"embed_dim": 36, "num_heads": 4}, "36 cannot be 4 heads of even size; .* multiple of 8"),
        ({"repeats": 3, "batch": 2}, "3 repeats in a batch of 2.*must be 0 to 2"),
        ({"repeats": 1, "length": 20}, "length 20; .*need a length of 32"),
        ({"vocab_size": 70_000}, "vocab_size 70000; at most 65536"),
        ({"steps": 5, "finish": 6}, "finish 6; 0 to 5, the steps, is possible"),
        ({"windows": (63, -1)}, f"windows has -1; 0 or more, up to {2**53}, or None"),
        ({"windows": (2**53 + 1,)}, f"windows has {2**53 + 1}; 0 or more, up to {2**53}, or"),
        ({"seed": -1}, "seed -1; 0 to 18446744073709551615 is possible"),
        ({"seed": 2**64}, "seed 18446744073709551616; 0 to 18446744073709551615 is possible"),
    ],
)
def test_settings_that_are_impossible_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Settings(**options)


@pytest.mark.parametrize("rate", ["muon_rate", "adam_rate", "weight_decay", "rope"])
def test_rates_that_are_negative_or_not_finite_are_errors(rate):
    for x in (math.nan, math.inf, -0.1):
        with pytest.raises(ValueError, match=f"{rate} {x}; .*, and finite, is needed"):
            Settings(**{rate: x})
    for wrong in ("0.1", None, True):
        with pytest.raises(TypeError, match=f"{rate} is {wrong!r}; a number is needed"):
            Settings(**{rate: wrong})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": math.nan}, "steps is nan; an int is needed"),
        ({"save_every": 2.5}, "save_every is 2.5; an int is needed"),
        ({"seed": True}, "seed is True; an int is needed"),
        ({"windows": (63, 1.5)}, r"windows\[1\] is 1.5; an int is needed"),
        ({"bfloat16": 1}, "bfloat16 is 1; True or False is needed"),
    ],
)
def test_settings_of_a_wrong_type_are_errors(options, message):
    with pytest.raises(TypeError, match=message):
        Settings(**options)


def test_a_half_written_file_is_never_under_its_name(trained, tmp_path, monkeypatch):
    import regard.lm.training as training

    def half(path, data, write=training._write):
        if path.name != CHECKPOINT:
            return write(path, data)
        with training.replaced_when_complete(path) as file:
            file.write(data[:9])
            raise StoppedError

    monkeypatch.setattr(training, "_write", half)
    with pytest.raises(StoppedError):
        train_texts(TEXTS, tmp_path, SETTINGS)
    assert {file.name for file in tmp_path.iterdir()} == {"run.json", "tokenizer.json"}
    monkeypatch.undo()
    assert train_texts(TEXTS, tmp_path, SETTINGS) == trained[1]


def test_settings_are_written_beside_the_model(trained):
    run = json.loads((trained[0] / "run.json").read_text())
    assert run["steps"] == 8
    assert run["windows"] == [15, None]
