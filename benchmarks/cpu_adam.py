"""DeepSpeedCPUAdam in its own environment: builds its op, says so, then takes a step of a slice for each line it reads.

    OMP_NUM_THREADS=N .venv-peers/bin/python benchmarks/cpu_adam.py ELEMENTS DTYPE

Its master is fp32. Where DTYPE, of gradient and weight, is another, a step casts the gradient before and the weight after.
The cast goes into a buffer that it keeps.
It sleeps between lines, and answers each with the seconds of its step. What libraries print goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time

import torch


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore  here alone; it prints while it is imported

    elements, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    master = torch.nn.Parameter(torch.randn(elements))
    gradient, weight = torch.randn(elements).to(dtype), torch.empty(elements, dtype=dtype)
    master.grad = buffer = gradient.to(torch.float32)
    optimizer = DeepSpeedCPUAdam([master], lr=1e-3, weight_decay=0.01, adamw_mode=True)
    answers.write("ready\n")
    answers.flush()
    for _ in sys.stdin:
        start = time.perf_counter()
        if dtype != torch.float32:
            buffer.copy_(gradient)
        optimizer.step()
        if dtype != torch.float32:
            weight.copy_(master.detach())
        answers.write(f"{time.perf_counter() - start}\n")
        answers.flush()


if __name__ == "__main__":
    main()
