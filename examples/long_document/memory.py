"""Print how many bytes the peak of this process grows by in one training pass, and the seconds of processor time it takes.

    python examples/long_document/memory.py --length 3200           # whole matrices of scores
    python examples/long_document/memory.py --length 32000 --sparse
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

import torch

import structure
from reader import SHAPES, Reader

STATUS, PAGES = Path("/proc/self/status"), Path("/proc/self/statm")


def resident() -> int:
    """Return the bytes that this process holds now."""
    return int(PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the most that it has held. (getrusage also counts the process that started this one.)"""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def text(length: int) -> bytes:
    """Return made-up source in which a name is defined every ten lines or so."""
    generator = random.Random(0)
    lines: list[str] = []
    while sum(map(len, lines)) < length:
        lines.append(f"def name_{generator.randrange(1000)}(first, second):\n")
        lines += [f"    first = name_{generator.randrange(1000)}(second, first)\n" for _ in range(10)]
    return "".join(lines).encode()[:length]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, required=True, help="bytes that the model reads at once")
    parser.add_argument("--model", choices=SHAPES, default="small", help="size of the model (default small)")
    parser.add_argument("--sparse", action="store_true", help="block-sparse attention in place of matrices of scores")
    options = parser.parse_args()
    content = text(options.length)
    model = Reader(SHAPES[options.model])
    whole = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)[None]
    blocks = structure.sparse(content, SHAPES[options.model].heads) if options.sparse else None
    model(whole[:, :structure.BLOCK + 1], None).mean().backward()  # loads what any pass needs
    before, began = resident(), time.process_time()
    model(whole, blocks).mean().backward()
    print(peak() - before, time.process_time() - began)


if __name__ == "__main__":
    main()
