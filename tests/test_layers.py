"""What may import what, and what `import regard` brings in."""

import ast
import functools
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import regard

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "regard"

# From the top down, as CONTRIBUTING.md has it. A row's cells know nothing of each other; modules of
# one cell do. A model is recorded, a recording shows its steps, and attention() gives
# AttentionWeights back.
LAYERS = [
    ["cli __main__", "testing"],
    ["viewer", "survey"],
    ["lm", "hf"],
    ["heads", "capture"],
    ["nn", "distributed", "recording"],
    ["_showing"],
    ["_operator"],
    ["_weights"],
    ["_backends _kernels"],
    ["_call"],
    ["_base"],
]
# Imports that point up, each inside the method that shows something, or for a type.
UPWARDS = {
    ("recording._showings", "heads"),  # recording.heads()
    ("recording._showings", "viewer"),  # recording.view()
    ("recording._showings", "viewer._server"),  # for its type alone
    ("lm.model", "viewer"),  # model.view()
    ("lm.model", "viewer._server"),  # for its type alone
    ("recording._showings", "viewer.export"),  # recording.export()
    ("recording._showings", "viewer._display"),  # shown in a notebook
    ("recording._words", "viewer._display"),  # as are weights of words
    ("_weights.attention_weights", "viewer._display"),
    ("_weights.attention_weights", "recording"),  # weights.layer()
    ("_weights.attention_weights", "_showing.picture"),  # in a notebook
    ("_weights.attention_weights", "_showing.figure"),  # weights.plot()
    ("_showing.picture", "recording"),  # for its type alone
}
MAY_IMPORT_TORCH = (
    "nn",
    "hf",
    "distributed",
    "capture",
    "_operator.torch_calls",
    "lm.training",
    "lm.decoder",
    "lm.muon",
    "_base.torch_arrays",
    "_base.torch_state",
    "_backends.torch_gradients",
    "_backends.torch_ops",
    "_backends.torch_reductions",
    "_backends.torch_questions",
    "_backends.onnx",
    "_backends.kernel_ops",
    "_backends.triton_ops",
    "_backends.triton_reduce",
    "_backends.triton_backward",
)
NOT_AT_IMPORT = {
    "torch", "rich", "typer", "tokenizers", "safetensors", "starlette", "uvicorn", "matplotlib",
    "transformers", "ml_dtypes", "IPython", "jaxtyping", "anywidget", "pyarrow", "triton",
    "fsspec", "aiohttp", "threadpoolctl",
}  # fmt: skip


def module_name(path):
    """`lm.training` for src/regard/lm/training.py; `` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = sorted(set(FILES) - {""})


@functools.cache
def imports(name):
    """Every module that a module imports anywhere, in a function or for its types as well."""
    return list(_imports(name))


def _imports(name):
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively, line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = inner.removeprefix("regard.") in {*FILES, "_kernels"}
                yield inner if node.module.startswith("regard") and is_module else node.module


def place(name):
    """The row of a module, 0 on top, and its cell."""
    for row, cells in enumerate(LAYERS):
        for cell in cells:
            if any(name == part or name.startswith(f"{part}.") for part in cell.split()):
                return row, cell
    raise AssertionError(f"{name} is in no layer; name its place in LAYERS, or a name it has there")


def test_the_table_is_that_of_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Layers")[2].split("```")[1].strip()
    assert [re.split(" {3,}", line) for line in table.splitlines()] == LAYERS


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down_never_up_never_sideways(name):
    row, cell = place(name)
    for imported in imports(name):
        if imported.partition(".")[0] != "regard":
            continue
        assert imported != "regard", f"{name} imports from the top of the package; name the module"
        if (name, imported.removeprefix("regard.")) in UPWARDS:
            continue
        other_row, other_cell = place(imported.removeprefix("regard."))
        assert other_row > row or other_cell == cell, f"{name} ({cell}) imports {imported}"


def test_imports_that_point_up_wait_until_they_are_used():
    for name in {name for name, _ in UPWARDS}:
        tree = ast.parse(FILES[name].read_text())
        at_import = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        modules = {f"regard.{imported}" for own, imported in UPWARDS if own == name}
        assert not modules & {node.module for node in at_import}


@pytest.mark.parametrize("name", ["", *MODULES])
def test_only_the_modules_made_for_torch_import_it(name):
    if not name.startswith(MAY_IMPORT_TORCH):
        assert "torch" not in {imported.partition(".")[0] for imported in imports(name)}


SHOWING = "viewer", "_showing.picture", "_showing.heatmap", "_showing.figure"
SHOWS = [name for name in FILES if name.startswith(SHOWING)]


@pytest.mark.parametrize("name", SHOWS)
def test_what_shows_weights_uses_no_private_name_of_theirs(name):
    weights = regard.AttentionWeights(np.eye(2), np.eye(2))
    private = {name for name in dir(weights) if name[0] == "_" and name[:2] != "__"}
    asked = {
        (node.attr, node.lineno)
        for node in ast.walk(ast.parse(FILES[name].read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in private - {"_repr_mimebundle_"}
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert not asked


def run_python(code, *options):
    """What a fresh interpreter prints. Warnings are errors there too."""
    result = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_regard_brings_in_neither_torch_nor_anything_for_the_screen():
    loaded = run_python("import regard, sys, json; print(json.dumps(sorted(sys.modules)))")
    assert not NOT_AT_IMPORT & {name.partition(".")[0] for name in json.loads(loaded)}


def test_a_call_with_tensors_loads_no_compiler_and_no_kernels_of_a_gpu():
    loaded = run_python(
        """
        import sys, torch
        import regard
        x = torch.ones(1, 5, 4, requires_grad=True)
        for backend in ("kernel", "torch"):
            out, weights = regard.attention(x, x, x, backend=backend, return_weights=True)
            (out.sum() + weights.entropy().sum() + weights.received().sum()).backward()
        print([x for x in sys.modules if x == "torch._dynamo" or "regard._backends.triton_" in x])
        """
    )
    assert loaded == "[]\n"


def test_import_regard_loads_few_modules_beyond_numpy():
    # Time is what matters, and benchmarks/import_time.py measures it; the count cannot flicker.
    more = run_python(
        """
        import sys, numpy
        before = set(sys.modules)
        import regard
        more = set(sys.modules) - before
        print(len({name for name in more if name.partition(".")[0] != "regard"}))
        """
    )
    assert int(more) <= 20  # 15 when this was written; jaxtyping alone has 141


NO_TORCH = """
    import sys

    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ImportError("torch is not here")

    sys.meta_path.insert(0, NoTorch())
    import numpy as np
    import regard
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4), dtype=np.float32)
"""

WITHOUT_TORCH = {
    "attention": """
        output, weights = regard.attention(x, x, x, causal=True, return_weights=True)
        assert output.shape == x.shape
        assert np.allclose(np.asarray(weights) @ x, output, atol=1e-6)
    """,
    "weights": """
        weights = regard.AttentionWeights(x, x, causal=True)
        assert np.allclose(weights[0, 1].sum(-1), 1)
        assert weights.summary().entropy.shape == (1, 2, 5)
    """,
    "steps": """
        steps = regard.steps(x[0, 0], x[0, 0], x[0, 0], causal=True)
        assert np.allclose(steps.output, regard.attention(x, x, x, causal=True)[0, 0])
        assert np.allclose(steps.backward(steps.output).d_scores.sum(-1), 0, atol=1e-6)
    """,
    "recording": """
        import pathlib, tempfile
        from regard.recording import Layer
        made = regard.Recording(list("abcde"), [Layer(x[0], x[0], x[0], causal=True)])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "a.safetensors")
            made.save(path)
            read = regard.Recording.load(path)
            assert np.array_equal(np.asarray(read.weights[0]), np.asarray(made.weights[0]))
    """,
    "language model": """
        from regard.lm import LanguageModel
        recording = LanguageModel.load("builtin").record("import os")
        assert np.allclose(np.asarray(recording.weights[0]).sum(-1), 1, atol=1e-5)
    """,
    "testing": """
        from regard.testing import assert_matches
        assert_matches(x, x, x)
    """,
    "command line": """
        from regard.cli import main
        sys.argv = ["regard", "show", "Your journey starts with one step"]
        try:
            main()
        except SystemExit as end:
            assert not end.code
    """,
}


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_works_without_torch(part):
    run_python(
        textwrap.dedent(NO_TORCH)
        + textwrap.dedent(WITHOUT_TORCH[part])
        + 'assert "torch" not in sys.modules\n'
    )


def test_torch_that_is_there_is_not_loaded_for_numpy_arrays():
    run_python(
        """
        import sys, numpy, regard
        x = numpy.ones((3, 2))
        regard.attention(x, x, x, return_weights=True)
        assert "torch" not in sys.modules
        """
    )


PUBLIC = [
    "regard",
    "regard.heads",
    "regard.lm",
    "regard.nn",
    "regard.recording",
    "regard.survey",
    "regard.testing",
    "regard.viewer",
    "regard.viewer.answer",
]


def test_all_equals_the_namespace():
    names = run_python("import regard; print(*(n for n in vars(regard) if n[0] != '_'))").split()
    submodules = {module.name for module in pkgutil.iter_modules(regard.__path__)}
    assert sorted(regard.__all__) == sorted(set(names) - submodules - {"TYPE_CHECKING"})
    assert not submodules & {*regard.__all__}


def test_dir_has_the_public_names_and_the_parts_that_are_loaded_when_they_are_used():
    more = {
        "Comparison", "Divergences", "Effects", "Explanation", "HeadScores", "Mix", "PairMatrix",
        "Rollout", "TopPairs", "Viewer", "__version__", "compare", "divergence", "explain", "mix",
        "patch_torch", "record", "rollout", "watch",
    }  # fmt: skip
    parts = {"distributed", "heads", "hf", "lm", "nn", "recording", "survey", "testing", "viewer"}
    assert {*dir(regard)} == {*regard.__all__, *more, *parts}
    for name in dir(regard):
        assert inspect.ismodule(getattr(regard, name)) == (name in parts)
    code = "import regard, sys; dir(regard); print(*sys.modules)"
    loaded = {*run_python(code).split()}
    assert not loaded & {
        *(f"regard.{name}" for name in parts - {"recording"}),
        "importlib.metadata",
    }


def test_the_version_is_that_of_the_distribution():
    assert regard.__version__ == importlib.metadata.version("regard")


def test_steps_is_the_function_and_no_module():
    assert inspect.isfunction(regard.steps)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("regard.steps")


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_docstring(module):
    module = __import__(module, fromlist=["_"])
    if inspect.ismodule(module):
        assert module.__doc__
        assert module.__all__
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), f"{name} has no docstring"
        if inspect.isclass(thing):
            for attribute, value in vars(thing).items():
                if attribute[0] != "_" and (callable(value) or isinstance(value, property)):
                    doc = inspect.getdoc(getattr(thing, attribute))
                    assert doc, f"{name}.{attribute} has no docstring"


@pytest.mark.parametrize("module", ["regard", "regard.testing"])
def test_every_public_function_is_annotated(module):
    module = __import__(module, fromlist=["_"])
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
            assert not bare, f"{name}: {bare}"
            assert signature.return_annotation is not signature.empty
