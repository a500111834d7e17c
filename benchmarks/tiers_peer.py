"""DeepSpeed's stage 3 with its state on the host or on disk, in a process of .venv-peers. Started by tiers.py.

    python benchmarks/tiers_peer.py '{"device": "nvme", "path": FOLDER, "layers": 12, "dim": 640, "threads": 1, "aio": {}}'

It says `ready`, then runs iterations when told to: a line of JSON `{"tokens": 64, "count": 3}` is answered with the seconds
of one. Its optimizer is DeepSpeedCPUAdam, which steps after backward; its disk reads and writes are pipelined, with the
settings `aio`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")  # what other libraries deprecate is not what is measured here

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from workloads import _example  # noqa: E402

LARGEST = 20_000_000
"""Elements of a buffer of parameters: each must hold the largest parameter."""


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    torch.set_num_threads(job["threads"])
    with tempfile.NamedTemporaryFile() as store:
        dist.init_process_group("gloo", store=dist.FileStore(store.name, 1), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
        import deepspeed  # pyright: ignore[reportMissingImports]  lives in .venv-peers

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        torch.manual_seed(0)
        model = _example("gpt/model.py").Shape(layers=job["layers"], dim=job["dim"], heads=job["dim"] // 64).build()
        engine = deepspeed.initialize(model=model, config=config(job["device"], job["path"], job["aio"]))[0]
        _say(answers, "ready")
        for line in sys.stdin:
            order = json.loads(line)
            tokens = order["tokens"]
            x = torch.randint(256, (max(1, tokens // 256), min(tokens, 256)), generator=torch.Generator().manual_seed(0))
            start = time.perf_counter()
            for _ in range(order["count"]):
                engine.backward(engine(x, x))
                engine.step()
            _say(answers, str((time.perf_counter() - start) / order["count"]))
    os._exit(0)


def config(device: str, path: str, aio: dict[str, int]) -> dict[str, Any]:
    """Return DeepSpeed's configuration with parameters and the optimizer on `device`."""
    place = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "steps_per_print": 1_000_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
            "aio": {**aio, "single_submit": False, "overlap_events": True},
            "zero_optimization": {"stage": 3, "sub_group_size": LARGEST, "offload_param": {
                **place, "buffer_count": 5, "buffer_size": LARGEST}, "offload_optimizer": {
                **place, "buffer_count": 4, "pipeline_read": device == "nvme", "pipeline_write": device == "nvme"}}}


def _say(answers: Any, words: str) -> None:
    answers.write(words + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
