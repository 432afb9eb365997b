"""Peak memory, each in a process of its own, beside torch's and NumPy's.

    python benchmarks/memory.py [--limit-gb 8] [--limit-s 120] [--quick] [--json FILE]

One head of D = 64, causal, float32, one thread; Linux only. A figure is what the process's resident
memory rose by at its peak, results included, inputs not; '>' says that the limit of memory or time
came first. torch leaves its fused operator for dropout and for a bias that needs a gradient.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import common
import numpy as np
import torch

import regard

LENGTHS = [2048, 4096, 8192, 16_384, 32_768]
LONGEST = {"forward": 100_000}
HEAD_SIZE = 64
PLAIN = "torch's plain operator"
OUT_OF_MEMORY = 3  # exit status of a child


def attend_torch(q, k, v, **options):
    """torch's operator; it picks the fused kernel where it can."""
    from torch.nn.functional import scaled_dot_product_attention

    causal = options.pop("is_causal", True)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, **options)


def attend_regard(q, k, v, **options):
    return regard.attention(q, k, v, causal=True, **options)


def with_gradient(attend):
    """Forward and backward pass; ``attend`` gets leaves."""

    def run(q, k, v):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves).sum(), leaves)

    return run


def learned_bias(q):
    """A bias of every key, as relative positions have it, that needs a gradient."""
    return torch.zeros(1, 1, 1, q.shape[2], requires_grad=True)


def torch_bias(q, k, v):
    hidden = torch.zeros(q.shape[2], q.shape[2]).masked_fill(~common.lower(q.shape[2]), -torch.inf)
    return attend_torch(q, k, v, attn_mask=hidden + learned_bias(q), is_causal=False)


def summarised(q, k, v):
    output, weights = regard.attention(q, k, v, causal=True, return_weights=True)
    return output, weights.summary()


def torch_weights(q, k, v):
    """Output and some of what the summary has, from weights that are stored."""
    scores = q @ k.mT / HEAD_SIZE**0.5
    w = scores.masked_fill(~common.lower(q.shape[2]), -torch.inf).softmax(-1)
    return w @ v, w.sum(-2), torch.special.entr(w).sum(-1), w.topk(8)


def numpy_forward(q, k, v):
    arrays = (x.detach().numpy() for x in (q, k, v))
    return common.plain_numpy(*arrays, np.tri(q.shape[2], dtype=bool))


def plain_forward(q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return attend_torch(q, k, v)


JOBS = {
    "forward": {
        "regard": attend_regard,
        "torch": attend_torch,
        PLAIN: plain_forward,
        "NumPy": numpy_forward,
    },
    "forward + backward": {
        "regard": with_gradient(attend_regard),
        "torch": with_gradient(attend_torch),
        PLAIN: with_gradient(plain_forward),
    },
    "forward, dropout of 0.1": {
        "regard": lambda q, k, v: attend_regard(q, k, v, dropout=0.1),
        PLAIN: lambda q, k, v: attend_torch(q, k, v, dropout_p=0.1),
    },
    "forward + backward, learned bias": {
        "regard": with_gradient(lambda q, k, v: attend_regard(q, k, v, bias=learned_bias(q))),
        PLAIN: with_gradient(torch_bias),
    },
    "output and summary": {"regard": summarised, PLAIN: torch_weights},
}
CONTESTANTS = list(JOBS["forward"])


def child(job, contestant, length, limit_bytes):
    """Runs one job, and prints the bytes that memory rose by and the seconds."""
    regard.set_num_threads(1)
    run = JOBS[job][contestant]
    run(*inputs(64))  # what is loaded at the first call is no memory of attention's
    tensors = inputs(length)
    limit = _status("VmSize") + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = reset_peak()
    start = time.process_time()
    try:
        result = run(*tensors)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise SystemExit(OUT_OF_MEMORY) from error
        raise
    seconds = time.process_time() - start
    del result
    print(json.dumps({"bytes": peak() - before, "seconds": seconds}))


def inputs(length):
    """Query, key and value, ``(1, 1, length, D)``."""
    return common.draw(*3 * [(1, 1, length, HEAD_SIZE)], dtype="float32")


def _status(name):
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name + ":")))


def peak():
    """The largest number of bytes that were resident since ``reset_peak``."""
    return _status("VmHWM")


def reset_peak():
    """Lowers the peak to what is resident now, and returns it."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def measure(job, contestant, length, options):
    """What the child printed; or the limit that it met, as text."""
    command = [sys.executable, __file__, "--child", job, contestant, str(length)]
    command.append(str(int(options.limit_gb * 1e9)))
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=options.limit_s, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"> {options.limit_s:g} s"
    if result.returncode == OUT_OF_MEMORY:
        return f"> {options.limit_gb:g} GB"
    result.check_returncode()
    return json.loads(result.stdout)


def cell(found):
    """``12.5 MB``."""
    return found if isinstance(found, str) else f"{found['bytes'] / 1e6:.1f} MB"


def main():
    """A row for each job and length; a contestant that met a limit is not asked for longer ones."""

    def add(parser):
        parser.add_argument("--limit-gb", type=float, default=8)
        parser.add_argument("--limit-s", type=float, default=120)

    options = common.read_options(__doc__, add=add)
    report = common.Report("memory", options)
    report.table("Peak memory, one head, D = 64, causal", "job", "T", *CONTESTANTS)
    for job, runs in JOBS.items():
        found = {}
        longest = [LONGEST[job]] if job in LONGEST else []
        for length in [256] if options.quick else LENGTHS + longest:
            for name in runs:
                if not isinstance(found.get(name), str):
                    found[name] = measure(job, name, length, options)
            report.row(
                job, str(length), *(cell(found[n]) if n in found else "-" for n in CONTESTANTS),
                job=job, length=length, dtype="float32", found=dict(found),
            )  # fmt: skip
    report.save()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        job, contestant, length, limit_bytes = sys.argv[2:]
        with torch.set_grad_enabled("backward" in job):
            child(job, contestant, int(length), int(limit_bytes))
    else:
        main()
