"""Whether ``torch.autocast`` is on, for every device that torch has."""

from regard._base import loaded


def is_autocast(device: str) -> bool:
    """Whether it is on for a type of device, where torch is loaded; meta and others have none."""
    torch = loaded.torch
    return (
        torch._C._is_any_autocast_enabled()  # a third of the time of the others, and mostly False
        and torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
    )
