"""Processes of a group over gloo, which run many cases each; what they found, as JSON.

python tests/ranks.py
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GROUP_SECONDS = 20  # that a rank waits for another
ALIVE_SECONDS = 100  # whatever hangs, no rank is left behind


def run(size, cases, before=None, keeps_store=False):
    """By case the error of every rank: its traceback, or nothing; "died" where a rank has.

    Args:
        before: cases that make the group themselves, of what torchrun tells a process.
        keeps_store: rank 0 keeps the store of the group, as without torchrun; else a file does.
    """
    named = (before or {}) | cases
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        init_method = f"tcp://127.0.0.1:{port}" if keeps_store else f"file://{folder}/store"
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    _rank(rank, size, before or {}, cases, Path(folder), init_method)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    multiprocessing.util._exit_function()  # as at the end of any process
                    os._exit(status)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        found = {}
        for rank in range(size):
            file = Path(folder, f"{rank}.json")
            found[rank] = json.loads(file.read_text()) if file.exists() else {}
    return {name: [found[rank].get(name, "died") for rank in range(size)] for name in named}


def _rank(rank, size, before, cases, folder, init_method):
    signal.alarm(ALIVE_SECONDS)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    found = {}

    def try_all(named):
        for name, case in named.items():
            try:
                case()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
            Path(folder, f"{rank}.json").write_text(json.dumps(found))

    try_all(before)
    dist.init_process_group(
        "gloo", init_method=init_method, rank=rank, world_size=size,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )  # fmt: skip
    try_all(cases)
    dies = any("dies" in name for name in cases)
    if size > 1 and not dies:  # nobody leaves while another still asks
        with contextlib.suppress(RuntimeError):
            dist.barrier()


if __name__ == "__main__":
    import distributed_cases as own

    own.prepare()
    found = {
        size: run(size, own.of_size(size) | own.at_the_end(size), own.at_the_beginning(size))
        for size in (1, 2, 4)
    }
    found["no torchrun"] = {}
    for dying in own.CHAIN:
        found["no torchrun"] |= run(own.CHAIN_SIZE, own.in_a_chain(dying), keeps_store=True)
    sys.stdout.write(json.dumps(found))
