"""What a processor or GPU is called in tables, and the folder in ``results`` of its figures."""

import re
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
# (vendor, family, first and last model): many processors in the cloud hide all but these numbers.
ARCHITECTURES = {
    ("AuthenticAMD", 23, 0x00, 0x2F): "Zen",
    ("AuthenticAMD", 23, 0x30, 0xAF): "Zen 2",
    ("AuthenticAMD", 25, 0x00, 0x0F): "Zen 3",
    ("AuthenticAMD", 25, 0x10, 0x1F): "Zen 4",
    ("AuthenticAMD", 25, 0x20, 0x5F): "Zen 3",
    ("AuthenticAMD", 25, 0x60, 0x7F): "Zen 4",
    ("AuthenticAMD", 25, 0xA0, 0xAF): "Zen 4",
    ("AuthenticAMD", 26, 0x00, 0x4F): "Zen 5",
    ("AuthenticAMD", 26, 0x60, 0x7F): "Zen 5",
    ("GenuineIntel", 6, 85, 85): "Skylake or Cascade Lake",
    ("GenuineIntel", 6, 106, 108): "Ice Lake",
    ("GenuineIntel", 6, 143, 143): "Sapphire Rapids",
    ("GenuineIntel", 6, 173, 174): "Granite Rapids",
    ("GenuineIntel", 6, 207, 207): "Emerald Rapids",
}
VENDORS = ("AMD", "Intel")  # of which the README shows one each


def architecture(vendor, family, model):
    """``Zen 5``; the numbers of one that has no name here; empty where there are none."""
    for (of, number, first, last), name in ARCHITECTURES.items():
        if (vendor, family) == (of, number) and first <= model <= last:
            return name
    return f"family {family} model {model}" if vendor else ""


def name(machine):
    """``AMD EPYC (Zen 5)``, of the machine of a result; ``NVIDIA H200`` of a GPU's."""
    if machine.get("gpu", "none") != "none":
        return machine["gpu"]
    brand = re.sub(r"\((R|TM)\)|@ .*| with .*|\b(CPU|Processor|\d+-Core)\b", " ", machine["cpu"])
    brand = " ".join(brand.split())
    kind = machine.get("architecture")
    return f"{brand} ({kind})" if kind else brand


def folder(machine):
    """``results/amd-epyc-zen-5``."""
    return RESULTS / re.sub(r"[^a-z0-9.]+", "-", name(machine).lower()).strip("-")
