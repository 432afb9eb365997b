"""What type checkers say of calls of regard: which they refuse, and what the README's names are.

`tests/typing/user.py` holds the types one by one; `./check types` reads it.
"""

import ast
import doctest
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# One process of each checker reads all; mypy parses torch for half a minute where nothing is kept.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("types")]

BEFORE = (
    "import numpy as np\nimport regard\nx = np.eye(3)\nweights = regard.AttentionWeights(x, x)\n"
)
REFUSED = [
    'regard.attention("a", 3, None)',
    "regard.attention(x, x, None)",
    'regard.attention(x, x, x, backend="kernle")',
    "regard.attention(x, x, x, causl=True)",
    "regard.attention(x, x, x, scale='big')",
    "regard.attention(x, x, x, edits=regard.Edit(keys=1))",
    "regard.attention(x, x, x).topk(3)",
    "regard.attention(x, x, x, return_weights=True).shape",
    "regard.steps(x, x, x, causl=True)",
    "regard.steps(x, x, x, return_weights=True)",
    "regard.Steps.from_inputs(x, causl=True)",
    "regard.Layer(x, x, dropout=0.5)",
    'regard.AttentionWeights(x, x, backend="kernle")',
    "regard.AttentionWeights(x, x, causl=True)",
    "regard.scaled_dot_product_attention(x, x, x, causal=True)",
    'weights.pool(how="maxx")',
    'weights.received("median")',
    'weights.blocks([0], [0], "median")',
    "weights.diagonals(edges=0.5)",
    "weights.reshape(9)",
    'weights.summary(only=["entropi"])',
    'weights["a"]',
    'regard.Recording.from_weights(["a"], 3)',
    'regard.Recording.from_weights(["a"], x).figure(0, 0, scale="ln")',
    "weights.entropi()",
    "regard.atention",
]


def readme():
    """The README's Python; in place of each value that it shows, and after each assignment of a
    name, a reveal_type."""
    lines = ["# mypy: allow-redefinition"]  # its sections name their outputs alike
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        for example in doctest.DocTestParser().get_examples(block):
            (statement,) = ast.parse(example.source).body
            if isinstance(statement, ast.Expr):
                lines.append(f"reveal_type({ast.unparse(statement)})")
                continue
            lines.append(example.source.rstrip())
            stored = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
            names = [node.id for node in stored if isinstance(node.ctx, ast.Store)]
            lines += [f"reveal_type({name})" for name in names if name != "_"]
    return "\n".join(lines) + "\n"


def environment():
    """Nothing is asked for elsewhere: a proxy where nothing listens."""
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    return {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", **nowhere}


def mypy(folder):
    """``(file, line, kind, message)`` of all that mypy says."""
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *sorted(folder.glob("*.py"))],
        cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment(),
    )  # fmt: skip
    assert not ran.stderr
    said = re.findall(r"^(.*?):(\d+): (error|note): (.*)$", ran.stdout, re.MULTILINE)
    assert said, ran.stdout
    return [(Path(file).name, int(line), kind, text) for file, line, kind, text in said]


def pyright(folder):
    """The same of pyright, in strict mode."""
    settings = {
        "include": ["."],
        "typeCheckingMode": "strict",
        "extraPaths": [str(ROOT / "src")],
        "reportUnusedExpression": False,
        "reportUnusedCoroutine": False,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    ran = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=folder, capture_output=True, text=True, timeout=600, env=environment(),
    )  # fmt: skip
    return [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["severity"], one["message"])
        for one in json.loads(ran.stdout)["generalDiagnostics"]
    ]


@pytest.fixture(scope="module", params=[mypy, pyright])
def said(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    (folder / "refused.py").write_text(BEFORE + "\n".join(REFUSED) + "\n")
    (folder / "readme.py").write_text(readme())
    return request.param(folder)


def test_a_call_that_cannot_be_right_is_refused(said):
    errors = {line for file, line, kind, _ in said if (file, kind) == ("refused.py", "error")}
    start = BEFORE.count("\n") + 1
    assert min(errors) >= start, "what comes before is refused already"
    assert [call for n, call in enumerate(REFUSED, start) if n not in errors] == []


def test_nothing_in_the_readme_is_of_any_type(said):
    of_readme = [(kind, text) for file, _, kind, text in said if file == "readme.py"]
    assert not [text for kind, text in of_readme if kind == "error"]
    revealed = [text for _, text in of_readme if re.match(r"Revealed type is|Type of", text)]
    assert len(revealed) == readme().count("reveal_type(") >= 20
    # NumPy's own name for any shape.
    plain = [text.replace("tuple[Any, ...]", "AnyShape") for text in revealed]
    assert not [text for text in plain if re.search(r"\b(Any|Unknown)\b", text)]
