"""What a caller of torch may compute in, by name."""

import contextlib

import torch


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CALLERS = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default(torch.float64),
    "bfloat16": lambda: default(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}
