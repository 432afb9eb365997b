"""What works with NumPy and safetensors alone, and what a missing extra's error says."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from regard._base.extras import EXTRA_OF, needed_by

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PACKAGE = ROOT / "src" / "regard"
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"
)

BLOCK = """
    import sys

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if is_missing(name.partition(".")[0]):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
"""
CORE = """
    import sys
    there = {*sys.stdlib_module_names, "numpy", "safetensors", "regard"}
    is_missing = lambda name: name not in there
"""


def run_python(*parts):
    """What a fresh interpreter does with the parts of a program, one after the other."""
    program = "".join(map(textwrap.dedent, parts))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def names(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_the_core_depends_on_numpy_and_safetensors_alone():
    assert names(PROJECT["dependencies"]) == {"numpy", "safetensors"}


def test_the_errors_know_what_each_extra_installs():
    of_tools = {"all", "docs", "test"}
    installs = {extra: names(EXTRAS[extra]) for extra in EXTRAS.keys() - of_tools}
    assert {
        package: extra for extra, packages in installs.items() for package in packages
    } == EXTRA_OF


def test_all_is_every_extra_for_users_but_those_that_need_torch():
    (requirement,) = EXTRAS["all"]
    assert requirement == "regard[lm,cli,viewer,plot,jupyter,survey,remote]"
    assert {*re.findall(r"\w+", requirement)} - {"regard"} == {*EXTRA_OF.values()} - {
        "torch", "hf",
    }  # fmt: skip


USES = {
    "operator": """
        output, weights = regard.attention(x, x, x, causal=True, return_weights=True)
        assert np.allclose(np.asarray(weights) @ x, output, atol=1e-6)
        assert weights.summary().entropy.shape == (2, 5)
    """,
    "steps": """
        assert "scores" in str(regard.steps(x, x, x)) and regard.steps(x, x, x)._repr_html_()
    """,
    "recording": """
        import pathlib, tempfile
        from regard.recording import Layer
        made = regard.Recording(list("abcde"), [Layer(x, x, x, causal=True)])
        assert made._repr_html_()
        with tempfile.TemporaryDirectory() as folder:
            made.save(pathlib.Path(folder, "a.safetensors"))
            read = regard.Recording.load(pathlib.Path(folder, "a.safetensors"))
            assert np.array_equal(read.weights[0][:], made.weights[0][:])
            made.export(pathlib.Path(folder, "a.html"))
    """,
    "words": """
        assert regard.lm.WordTokenizer("how are you").encode("you are") == [4, 3]
    """,
    "testing": """
        regard.testing.assert_matches(x, x, x)
    """,
}


@pytest.mark.parametrize("use", USES)
def test_works_with_numpy_and_safetensors_alone(use):
    start = """
        import numpy as np
        import regard
        x = np.random.default_rng(0).standard_normal((2, 5, 4), dtype=np.float32)
    """
    ran = run_python(CORE, BLOCK, start, USES[use])
    assert not ran.returncode, ran.stderr


NEED_AN_EXTRA = {
    "capture", "cli", "distributed", "hf", "nn", "lm.decoder", "lm.muon", "lm.training", "survey",
    "viewer._server", "viewer.notebook",
}  # fmt: skip
# Imported by others alone, where what they need is there.
NEED_WHAT_IS_THERE = {
    "_backends.kernel_ops", "_backends.onnx", "_backends.torch_gradients", "_backends.torch_ops",
    "_backends.torch_questions", "_backends.torch_reductions", "_base.torch_arrays",
    "_backends.triton_backward", "_backends.triton_gradients", "_backends.triton_jit",
    "_backends.triton_ops", "_backends.triton_reduce", "_backends.triton_split",
    "_backends.triton_weights",
    "_base.torch_state",
    "_operator.torch_calls", "_weights.traced", "viewer._connections",
}  # fmt: skip


def test_every_module_imports_with_the_core_or_names_its_extra():
    program = """
        import importlib
        for name in modules:
            try:
                importlib.import_module(f"regard.{name}")
            except ModuleNotFoundError as error:
                print(name, error, sep=" | ")
    """
    ran = run_python(CORE, BLOCK, f"modules = {MODULES}", program)
    assert not ran.returncode, ran.stderr
    failed = dict(line.split(" | ") for line in ran.stdout.splitlines())
    way_out = re.compile(r'.* needs \w+\. Install it with pip install "regard\[\w+\]"\.')
    explained = {name for name, error in failed.items() if way_out.fullmatch(error)}
    assert failed.keys() - explained == NEED_WHAT_IS_THERE
    assert {name for name in explained if not name.startswith((*NEED_AN_EXTRA,))} == set()


@pytest.mark.parametrize(
    ("package", "program", "what"),
    [
        ("tokenizers", "regard.lm.LanguageModel.load()", "BytePairTokenizer"),
        ("tokenizers", "regard.lm.BytePairTokenizer.train(['a'], 300)", "BytePairTokenizer"),
        ("typer", "import regard.cli", "The command line"),
        ("uvicorn", "recording.view(open_browser=False)", "The viewer"),
        ("starlette", "recording.view(open_browser=False)", "The viewer"),
        ("matplotlib", "recording.weights[0].plot()", "weights.plot"),
        ("matplotlib", "recording.figure(0, 0)", "recording.figure"),
        ("anywidget", "import regard.viewer.notebook", "regard.viewer.notebook"),
        ("pyarrow", "regard.survey", "regard.survey"),
        ("fsspec", "Recording.load('https://a.b/c')", "Recording.load of https://a.b/c"),
        ("aiohttp", "Recording.load('https://a.b/c')", "Recording.load of https://a.b/c"),
        ("torch", "regard.nn", "regard.nn"),
        ("torch", "import regard.lm.training", "Training a model"),
    ],
)
def test_what_needs_a_missing_package_names_the_extra(package, program, what):
    block = f"is_missing = {package!r}.__eq__\n"
    start = """
        import numpy as np
        import regard
        from regard.recording import Layer, Recording
        x = np.ones((1, 3, 2))
        recording = regard.Recording(list("abc"), [Layer(x, x, x)])
    """
    ran = run_python(block, BLOCK, start, program)
    assert ran.returncode == 1
    way_out = f'Install it with pip install "regard[{EXTRA_OF[package]}]".'
    assert ran.stderr.splitlines()[-1].endswith(f"Error: {what} needs {package}. {way_out}")


@pytest.mark.parametrize(
    ("package", "arguments", "what"),
    [
        ("typer", ["show", "a text"], "The command line"),
        ("tokenizers", ["show", "a text"], "BytePairTokenizer"),
        ("tokenizers", ["generate", "a text"], "BytePairTokenizer"),
        ("uvicorn", ["view", "a text", "--no-open"], "The viewer"),
        ("torch", ["train", "a.txt", "-o", "model"], "Training a model"),
    ],
)
def test_a_command_whose_extra_is_missing_says_so_in_one_sentence(package, arguments, what):
    block = f"is_missing = {package!r}.__eq__\n"
    program = f"""
        from regard.__main__ import main
        sys.argv = ["regard", *{arguments!r}]
        main()
    """
    ran = run_python(block, BLOCK, program)
    assert ran.returncode == 1
    way_out = f'Install it with pip install "regard[{EXTRA_OF[package]}]".'
    assert ran.stderr == f"regard: {what} needs {package}. {way_out}\n"
    assert not ran.stdout


def test_the_command_is_the_one_that_says_so():
    assert PROJECT["scripts"] == {"regard": "regard.__main__:main"}


def test_a_package_of_no_extra_is_reported_as_it_is():
    unknown = pytest.raises(ModuleNotFoundError, match="No module named 'regard_elsewhere'")
    with unknown, needed_by("this test"):
        import regard_elsewhere  # noqa: F401
