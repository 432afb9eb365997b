"""What a release is made of: source distribution, wheel without kernels, licences, workflows."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
SITE = PROJECT["urls"]["Documentation"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command, cwd=ROOT):
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(hook, folder, settings=(), source=ROOT):
    """What a hook of the build backend writes into the folder."""
    code = f"from scikit_build_core import build; build.{hook}({str(folder)!r}, {dict(settings)})"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = folder.iterdir()
    return built


def test_the_source_distribution_holds_every_file_of_the_repository(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout: nothing says which files there are")
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    here = {name for name in tracked if (ROOT / name).exists()}
    # A copy: beside the checkout lie an environment and node_modules, whose 190,000 files the build
    # backend would look at one by one.
    source, made = tmp_path / "source", ["build/a/b.o", "src/regard/_kernels.so", "node_modules/a"]
    for name in here | {*made}:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"" if name in made else (ROOT / name).read_bytes())
    folder = tmp_path / "built"
    folder.mkdir()
    with tarfile.open(build("build_sdist", folder, source=source)) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert here - packed == set()
    assert packed.isdisjoint(made)
    assert not [name for name in packed if name.startswith("build/") or name.endswith(".so")]


def test_the_wheel_without_kernels_is_for_every_system(tmp_path):
    wheel = build("build_wheel", tmp_path, {"wheel.cmake": "false"})
    assert wheel.name == f"regard-{PROJECT['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "regard/__init__.py" in names
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]
    assert "pip install . -C wheel.cmake=false" in read("docs/install.md")
    assert "-C wheel.cmake=false" in read(".github/workflows/wheels.yml")


def test_the_notice_keeps_the_copyright_of_what_the_model_was_trained_on():
    def plain(text):
        return " ".join(text.split())

    licence = plain(read("LICENSE-PYTHON"))
    line = re.search(r"\"(Copyright \(c\) 2001, .*? Software Foundation; All Rights.*?)\"", licence)
    assert line[1] in plain(read("NOTICE"))
    assert "Python 3.11.7" in read("NOTICE")
    assert "Python 3.11.7" in read("docs/model.md")
    assert {"LICENSE", "LICENSE-PYTHON", "NOTICE"} == set(PROJECT["license-files"])


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == REPOSITORY


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md", "NOTICE"])
def test_links_to_the_project_lead_to_files_that_are_there(page):
    text = read(page)
    links = re.findall(rf"{REPOSITORY}/(?:blob|tree)/main/([^)#\s]*)", text)
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    links += re.findall(rf"{raw}/main/([^\")\s]*)", text)
    links += [f"docs/{name.strip('/')}.md" for name in re.findall(rf"{SITE}([\w/-]+)", text)]
    assert links or page != "README.md"
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_readme_reads_the_same_anywhere():
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", read("README.md"))
    relative = [t for pair in targets for t in pair if t and not re.match(r"https://|#", t)]
    assert not relative


def steps(workflow):
    for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_actions_of_one_version_and_commands_of_this_project(workflow):
    actions = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert actions
    assert not [name for name in actions if not re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", name)]
    commands = " ".join(step.get("run", "") for step in steps(workflow))
    for script in re.findall(r"(?:^|\s)(\./check|\.ci/run|scripts/\w+|examples/\S+)", commands):
        assert (ROOT / script).exists(), script


def test_the_workflows_are_those_of_the_documents():
    assert [path.stem for path in WORKFLOWS] == ["docs", "test", "wheels"]


def test_every_python_of_the_classifiers_is_tested_and_has_wheels():
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    jobs = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]
    assert jobs["pythons"]["strategy"]["matrix"]["python"] == pythons
    tool = tomllib.loads(read("pyproject.toml"))["tool"]["cibuildwheel"]
    assert tool["build"].split() == [f"cp{version.replace('.', '')}-*" for version in pythons]


def test_both_ends_of_the_tested_versions_of_transformers_are_tested():
    hf = pytest.importorskip("regard.hf", reason="needs the hf extra", exc_type=ImportError)
    ends = [f"{major}.{minor}" for major, minor in hf.TESTED]
    jobs = yaml.safe_load(read(".github/workflows/test.yml"))["jobs"]
    assert jobs["transformers"]["strategy"]["matrix"]["version"] == ends
