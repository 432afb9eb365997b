"""How every test runs."""

import collections
import functools
import gc
import importlib.util
import os
import sys

if "numpy" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
    raise RuntimeError(
        "a plugin of pytest has loaded NumPy, which computes with several threads then; leave it"
        " out by -p no:NAME in pyproject.toml, as jaxtyping, or set OMP_NUM_THREADS=1"
    )
# One thread, here and in every process that a test starts, set before NumPy and torch are loaded:
# two threads that wait for each other on a busy machine make small tests 15 times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Garbage is looked for below; torch's compiler would look after each of a hundred functions.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import pytest
from hypothesis import settings

from compiled import Compiler

# torch and regard are imported where they are used: a process that hands out tests needs neither.

# Torch's compiler makes objects by the million: looking for garbage among them, and among all that
# is loaded, was a fifth of the time of its tests.
gc.set_threshold(50_000, 20, 50)

# The same examples on every machine, and no deadline: a slow machine is no failure.
settings.load_profile("ci")


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def asks_for_paths(config):
    return config.args_source is config.ArgsSource.ARGS


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """A worker of xdist, which is given paths in any case, is told whether any was asked for."""
    node.workerinput["asks_for_paths"] = asks_for_paths(node.config)


def pytest_ignore_collect(collection_path, config):
    """Where no path is asked for, the interpreter's run reads the files of its tests alone."""
    here = getattr(config, "workerinput", None)
    if not INTERPRETED or (here["asks_for_paths"] if here else asks_for_paths(config)):
        return None
    is_other = collection_path.suffix == ".py" and not collection_path.match("test_triton*.py")
    return True if is_other else None


def pytest_collection_modifyitems(config, items):
    """Tests that are marked ``interpreted`` run where TRITON_INTERPRET=1 is set, others where not.

    A process either interprets kernels in Triton or compiles them.
    """
    runs = [bool(item.get_closest_marker("interpreted")) == INTERPRETED for item in items]
    config.hook.pytest_deselected(items=[item for item, here in zip(items, runs) if not here])
    items[:] = [item for item, here in zip(items, runs) if here]
    if hasattr(config, "workerinput"):
        items[:] = in_order(items)
    if INTERPRETED and importlib.util.find_spec("triton") is None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason="triton is not installed"))
    elif INTERPRETED:
        import interpreter  # which loads triton

        interpreter.hasten()


def pytest_make_parametrize_id(config, val, argname):
    """Calls a long text by its beginning: processes inherit the name of a test, up to 128 KiB."""
    return ascii(val[:60]) if isinstance(val, str | bytes) and len(val) > 400 else None


# Groups whose tests take longest, those with the longest first: at the end of a run nothing is left
# that would keep one worker busy while the others wait.
FIRST = ("interpreted calls", "tiles", "stored cases", "instruction sets", "survey", "install",
         "fuzz", "faults", "benchmarks", "onnx True", "distributed", "bits", "types", "docs",
         "examples", "builtin")  # fmt: skip


def in_order(items):
    """The tests as workers begin with them: groups of ``FIRST``, then the others.

    Those of the viewer, which wait for a browser much of their time, are strewn evenly among them.
    """
    groups, viewer, others = [], [], []
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        name = marker and (marker.args or [marker.kwargs["name"]])[0]
        if name in FIRST:
            groups.append((FIRST.index(name), item))
        else:
            (viewer if item.path.parent.name == "viewer" else others).append(item)
    groups.sort(key=lambda placed: placed[0])
    strewn = [(i / len(part), item) for part in (viewer, others) for i, item in enumerate(part)]
    strewn.sort(key=lambda placed: placed[0])
    return [item for _, item in groups + strewn]


TOGETHER = 8


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives out a few tests of a file at a time, and a group whole.

    They share what the file's fixtures make, and for each that is given out xdist goes through all
    that was: with 8,000 that is seconds of a processor.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        @functools.cached_property
        def seen(self):
            return collections.defaultdict(dict)

        def _split_scope(self, nodeid):
            group = super()._split_scope(nodeid)
            if group != nodeid:
                return group
            file = nodeid.partition("::")[0]
            number = self.seen[file].setdefault(nodeid, len(self.seen[file]))
            return f"{file} {number // TOGETHER}"

        def remove_node(self, node):
            """A test that ended its process is not run again, as by xdist; those behind it are."""
            units = self.assigned_work.pop(node)
            left = [(unit, test) for unit in units.values() for test in unit if not unit[test]]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            again = {name: unit for name, unit in units.items() if not all(unit.values())}
            self.workqueue.update(again)
            for other in self.nodes:
                self._reschedule(other)
            return crashed

        def _reschedule(self, node):
            """Gives a process two tests: it begins one when it has the next, or is to end."""
            if node not in self.registered_collections:  # it still collects
                return
            super()._reschedule(node)
            while (
                self.workqueue
                and not node.shutting_down
                and self._pending_of(self.assigned_work[node]) < 2
            ):
                self._assign_work_unit(node)

    return Together(config, log)


def pytest_collection_finish():
    """What is loaded and collected stays, and is no garbage to be looked for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def compile(pytestconfig, tmp_path_factory):
    """Compiles what no run compiled before; ``--cache-clear`` forgets that."""
    cache = getattr(pytestconfig, "cache", None)
    return Compiler(cache.mkdir("compiled") if cache else tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def threads():
    """As many as torch has before any test."""
    import torch

    return torch.get_num_threads()


def no_time(*_):
    """In place of the time that guards take, before which torch clears the cache: 20 ms a graph."""
    return 0.0


@pytest.fixture(autouse=True)
def same_start(threads):
    """Whatever ran before, torch has its first random numbers before it, and its first threads.

    ``torch.manual_seed`` would keep a traceback of each call for every kind of device: 2 ms. With
    another number of threads all later tests would take five times as long.
    """
    import torch

    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = no_time
    torch.default_generator.manual_seed(0)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["auto", "torch"])
def by_both_backends(request):
    """Runs a module's tests by what is chosen for the CPU, and by torch's operations alone."""
    if request.param == "auto":
        yield request.param
        return
    import regard

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regard, "attention", functools.partial(regard.attention, backend="torch"))
        yield request.param
