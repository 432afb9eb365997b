"""Every example runs by itself, without a warning, and prints what it says it shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

# Lines that each must print, in this order.
PRINTS = {
    "000_causal_attention_in_numpy.py": [
        "variance of the scores 4.06, scaled 0.68",
        " [ 1.33 -0.9   -inf  -inf]",
        " [0.9  0.1  0.   0.  ]",
        "each row of weights sums to [1. 1. 1. 1.]",
        "same output: True",
        "a batch: (8, 2, 4, 6)",
    ],
    "001_a_sentence_step_by_step.py": [
        "journey, scores : Your 0.9544  journey 1.4950  starts 1.4754  with 0.8434  one 0.7070  "
        "step 1.0865",
        "journey, weights: Your 0.1385  journey 0.2379  starts 0.2333  with 0.1240  one 0.1082  "
        "step 0.1581",
        "journey, in context: [0.4419 0.6515 0.5683]",
        "starts, weights : Your 0.1503  journey 0.2256  starts 0.2192  with 0.1315  one 0.0914  "
        "step 0.1819",
        "starts, in context:  [0.3058 0.8203]",
        "query 2 'starts', key 4 'one'",
        "loss 0.6054, after one step of gradient descent 0.4094",
        "the layer agrees: True",
    ],
    "002_batches_roles_and_heads.py": [
        "two products: True",
        "symmetric scores: True",
        "with roles:       False",
        "output (2, 5, 16) weights (2, 4, 5, 5)",
    ],
    "003_one_token_and_its_context.py": [
        "query    (3,)",
        "key      (3, 3)",
        "value    (3, 2)",
        "output   (2,)",
        "scaled scores [24349.54 36524.31 48699.08]",
        "weights       [0. 0. 1.]",
        "output        [ 40.  80. 120. 160. 200. 240. 280. 320. 360. 400.]",
        "by the sum    [0.2222 0.3333 0.4444]",
    ],
    "004_words_to_several_heads.py": [
        "14 ids; 'How are you doing ?' is [2, 3, 4, 5, 6]; back: 'How are you doing ?'",
        "one head: (1, 5, 12) rows sum to [1. 1. 1. 1. 1.]",
        "training: (1, 5, 12) two passes differ: True",
        "evaluation: two passes are equal: True",
        "3,000 words: (1, 3000, 12)",
    ],
    "005_losses_on_weights.py": [
        "entropy: 3.537 before, less after 8 steps: True",
        "guidance: 0.579 before, less after 8 steps: True",
        "relations: 4.588 before, less after 8 steps: True",
    ],
}


# Each example in a process of its own, forked from one that has loaded torch and, as its first
# operator does, torch's compiler: that takes longer than an example.
FORKING = """
import gc, os, runpy, sys
import torch._dynamo
gc.freeze()
for path in sys.argv[1:]:
    name = os.path.basename(path)
    if os.fork() == 0:
        os.mkdir(name)
        for number, stream in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{name}.{stream}", os.O_CREAT | os.O_WRONLY), number)
        os.chdir(name)
        sys.argv, sys.path[0] = [path], os.path.dirname(path)
        runpy.run_path(path, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)  # at once: taking down torch would copy what the forks share
    with open(f"{name}.status", "w") as file:
        print(os.waitstatus_to_exitcode(os.wait()[1]), file=file)
"""
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with the folder of each example, what it printed, and how it ended."""
    folder = tmp_path_factory.mktemp("examples")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKING, *(str(EXAMPLES / name) for name in NAMES)],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "random"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.xdist_group("examples")
@pytest.mark.parametrize("name", NAMES)
def test_example_runs_and_prints_what_it_shows(name, ran):
    printed, complained, status = (
        (ran / f"{name}.{what}").read_text() for what in ("out", "err", "status")
    )
    assert status == "0\n", complained
    lines = iter(printed.splitlines())
    for expected in PRINTS[name]:
        assert expected in lines, f"{expected!r} is missing, or out of its order:\n{printed}"
    assert not list((ran / name).iterdir()), "an example leaves no files behind"


@pytest.mark.parametrize("seed", ["000", "001", "002", "003", "004"])
def test_every_seed_has_one_example(seed):
    assert len(list(EXAMPLES.glob(f"{seed}_*.py"))) == 1
