"""Processes of a group over gloo, which run many cases each; what they found, as JSON.

python tests/ranks.py 1 2 4
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run(size, cases, timeout=60.0, join=True):
    """By case the error of every rank: its traceback, or nothing.

    Args:
        join: make the group of all cases; else they find in the environment what torchrun tells.
    """
    if not join:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= address
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _rank(rank, size, cases, Path(folder), timeout if join else None)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found = {}
        for rank in range(size):
            file = Path(folder, f"{rank}.json")
            found[rank] = json.loads(file.read_text()) if file.exists() else {}
    return {name: [found[rank].get(name, "died") for rank in range(size)] for name in cases}


def _rank(rank, size, cases, folder, timeout):
    torch.set_num_threads(1)
    if timeout is None:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    else:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
            timeout=timedelta(seconds=timeout),
        )  # fmt: skip
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if (
        size > 1 and dist.is_initialized() and not any(found.values())
    ):  # nobody leaves while another still asks
        with contextlib.suppress(RuntimeError):
            dist.barrier()


if __name__ == "__main__":
    import distributed_cases as own

    own.prepare()
    dying, late = own.a_rank_that_dies_is_named_by_every_other, own.a_rank_that_is_late_is_named
    found = {n: run(int(n), own.of_size(int(n))) for n in ("1", "2", "4")}
    found["killed"] = run(4, {"first": functools.partial(dying, 0)}, 20) | run(
        4, {"third": functools.partial(dying, 2)}, 20
    )
    found["example"] = run(2, {"example": own.the_example_of_the_docs}, join=False)
    found["late"] = run(2, {"late": functools.partial(late, 1)}, 1)
    sys.stdout.write(json.dumps(found))
