"""One sequence over several processes, beside one process with all of it.

    python benchmarks/distributed.py [--ranks N] [--quick] [--json FILE]

Processes of one machine over gloo, one thread each. Time is the process CPU time of the slowest
rank, of regard's own and the transport's threads. ``sent`` is what the fullest rank sends.
``memory`` is by how much the largest resident memory of a rank grows, its inputs and output
included, in multiples of what these take; where all keys are seen, two buffers of keys and values
are as much again.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import common
import torch
import torch.distributed as dist

import regard
from regard.distributed import Layout, attention

QUERY_HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 64


def over_ranks(size, run):
    """What a function of the rank gives on every rank of a new group."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            if not (child := os.fork()):
                dist.init_process_group(
                    "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
                )
                Path(folder, f"{rank}.json").write_text(json.dumps(run(rank)))
                dist.barrier()
                os._exit(0)
            children.append(child)
        for child in children:
            assert os.waitpid(child, 0)[1] == 0, "a rank failed"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def count_bytes(layout):
    """Counts what this rank sends from now on."""
    sent, exchange = [0], layout.peers.exchange

    def counted(what, sends, receives):
        sent[0] += sum(x.nbytes for _, x in sends)
        return exchange(what, sends, receives)

    layout.peers.exchange = counted
    return sent


def work(what, attend, q, k, v):
    """One run of a kind."""
    if what == "forward":
        attend(q, k, v)
    elif what == "with backward":
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        attend(*leaves).sum().backward()
    else:
        attend(q, k, v, return_weights=True)[1].summary()


def seconds(run, *values, **options):
    """CPU seconds of this process."""
    start = time.process_time()
    run(*values, **options)
    return time.process_time() - start


def causal(size, length, rounds):
    """By kind: of each round the seconds of the ranks and of one process, and the bytes sent."""

    def on_rank(rank):
        whole = common.draw(
            *((1, heads, length, HEAD_SIZE) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)),
            dtype="float32",
        )
        layout = Layout(length)
        own = [layout.shard(x, -2).contiguous() for x in whole]
        sent, found = count_bytes(layout), {}

        def ranks(*arrays, **options):
            return attention(*arrays, layout=layout, causal=True, **options)

        def one(*arrays, **options):
            return regard.attention(*arrays, causal=True, **options)

        for what in ("forward", "with backward", "with summary"):
            found[what] = {"ranks": [], "one": []}
            for _ in range(rounds):
                dist.barrier()
                sent[0] = 0
                found[what]["ranks"].append(seconds(work, what, ranks, *own))
                found[what]["sent"] = sent[0]
                dist.barrier()
                if rank == 0:
                    found[what]["one"].append(seconds(work, what, one, *whole))
        return found

    return over_ranks(size, on_rank)


def resident():
    """Largest resident memory of this process so far, in bytes."""
    told = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    return 1024 * int(told.split()[0])


def long(size, length, head_size, window):
    """One head of a long sequence: seconds, bytes sent, and growth of memory, of each rank."""

    def on_rank(rank):
        layout, options = Layout(length), {"causal": True, "window": window and (window - 1, None)}
        few = Layout(16 * size)  # what is loaded once is no part of it
        attention(*(torch.ones(1, few.count, head_size),) * 3, layout=few, **options)
        Path("/proc/self/clear_refs").write_text("5")  # the largest so far begins anew
        before = resident()
        torch.manual_seed(rank)
        own = [torch.randn(1, layout.count, head_size) for _ in range(3)]
        sent = count_bytes(layout)
        spent = seconds(attention, *own, layout=layout, **options)
        grown = (resident() - before) / (4 * own[0].nbytes)
        return {"seconds": spent, "sent": sent[0], "memory": grown}

    return over_ranks(size, on_rank)


def main():
    """Two tables."""
    options = common.read_options(
        __doc__, add=lambda parser: parser.add_argument("--ranks", type=int, default=2)
    )
    torch.set_num_threads(1)
    report = common.Report("distributed", options)
    length, rounds = (512, 1) if options.quick else (16_384, 2)
    shape = f"{length} tokens, {QUERY_HEADS} on {KEY_HEADS} heads of {HEAD_SIZE}, float32, causal"
    report.table(
        f"{shape}, {options.ranks} ranks, zigzag",
        "", "one process", "slowest rank", "ratio", "spread", "sent MB",
    )  # fmt: skip
    ranks = causal(options.ranks, length, rounds)
    for what in ranks[0]:
        slowest = [max(times) for times in zip(*(rank[what]["ranks"] for rank in ranks))]
        ratios = [a / b for a, b in zip(slowest, ranks[0][what]["one"])]
        one, ratio = statistics.median(ranks[0][what]["one"]), statistics.median(ratios)
        sent = max(rank[what]["sent"] for rank in ranks)
        report.row(
            what, f"{one:.2f} s", f"{statistics.median(slowest):.2f} s", f"{ratio:.2f}",
            f"{min(ratios):.2f}-{max(ratios):.2f}", f"{sent / 1e6:.1f}",
            one=one, slowest=slowest, ratios=ratios, sent=sent,
        )  # fmt: skip
    report.table("one head, float32, causal, 4 ranks", "", "slowest rank", "sent MB", "memory")
    shapes = [(2**20, 64, 4096), (2**16, 128, None)]
    for length, size, window in [(4096, 64, 64)] if options.quick else shapes:
        found = long(4, length, size, window)
        most = {name: max(rank[name] for rank in found) for name in found[0]}
        told = f", window of {window}" if window else ""
        report.row(
            f"{length} tokens, head of {size}{told}", f"{most['seconds']:.2f} s",
            f"{most['sent'] / 1e6:.2f}", f"{most['memory']:.2f}x",
            length=length, head_size=size, window=window, **most,
        )  # fmt: skip
    report.save()


if __name__ == "__main__":
    main()
