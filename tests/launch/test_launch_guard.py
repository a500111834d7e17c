"""The launcher restarts a job that its guard sends back, and ends one that no restart helps."""

import sys

import pytest

TRAIN = """
import torch, shoal

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"},
          "resilience": {"vault": {"every": 2}, "guard": {"enabled": True, "max_skips": 0}}}
rows = [torch.full((4,), float("nan" if index == 9 else index)) for index in range(40)]
engine, _, loader, _ = shoal.initialize(model=torch.nn.Linear(4, 1), training_data=rows, config=config)
engine.load_checkpoint("nowhere")
for row in loader:
    engine.backward(engine(row).square().mean())
    engine.step()
"""


def test_a_job_that_its_guard_gives_up_is_replayed_once_and_then_ends(run, script):
    code, _, err = run("--ranks", "2", "--max-restarts", "9", "--no-spares", script(TRAIN)).end()
    assert code == 1
    assert err.count("GuardRewind: step ") >= 1
    assert "restarting all ranks: attempt 2 of 10" in err
    assert "attempt 3 of 10" not in err
    last = err.split("attempt 2 of 10")[1]
    assert "GuardError: step " in last
    assert "the loss is nan, as before it was replayed" in last
    assert "Warning" not in err.replace("WARNING", "")


LARGE = """
import torch, shoal

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "resilience": {"vault": {"every": 5}}}
engine, *_ = shoal.initialize(model=torch.nn.Sequential(*(torch.nn.Linear(1000, 1000) for _ in range(3))), config=config)
print("herring")
"""


def test_a_vault_larger_than_memory_ends_the_job_before_its_first_step(start, script):
    small = 'mount -t tmpfs -o size=60M none /dev/shm && exec "$@"'
    launch = start("unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-m", "shoal", "run", "--ranks", "2",
                   "--max-restarts", "3", "--no-spares", script(LARGE))
    code, out, err = launch.end()
    if "unshare failed" in err or "mount: " in err:
        pytest.skip(f"needs a mount namespace: {err.strip()}")
    assert (code, out) == (1, "")
    assert "INFO: resilience.vault: 103.1 MiB on a node (2 generations, and the next) of memory, a copy every 5 steps" in err
    assert "attempt 2" not in err
    assert "Traceback" not in err
    (line,) = (line for line in err.splitlines() if line.startswith("VaultTooLarge: "))
    assert ":/dev/shm has 59.9" in line
    assert " MiB free, and copies need 103.1 MiB of memory on this node (2 generations, and the next). Another " in line
    assert "enlarge /dev/shm (mount -o remount,size=SIZE /dev/shm; docker run --shm-size SIZE), put less state on a" in line


def test_a_number_of_ranks_that_no_elastic_batch_fits_ends_the_job(run, script):
    """A restart would have as many; the message says which numbers are valid."""
    launch = run("--ranks", "1", "--max-restarts", "3", script("""
import torch, shoal
shoal.initialize(model=torch.nn.Linear(4, 4), config={"optimizer": {"type": "AdamW"}, "elasticity": {
    "enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [6], "min_gpus": 2, "version": 0.1}})
"""))
    code, _, err = launch.end()
    assert code == 1
    assert err.count("restarting all ranks") == 0
    (line,) = (line for line in err.splitlines() if line.startswith("WorldSizeError: "))
    assert "1 data ranks cannot share a batch of 24 in micro-batches of 6; run on 2, 4" in line


def test_a_wrong_configuration_ends_the_job_and_shows_the_line(run, script):
    """A restart would read the same configuration."""
    launch = run("--ranks", "1", "--max-restarts", "3", script("""
import torch, shoal
shoal.initialize(model=torch.nn.Linear(4, 4), config={"zero_optimization": {"stage": 7}})
"""))
    code, _, err = launch.end()
    assert code == 1
    assert err.count("restarting all ranks") == 0
    assert "ConfigError: zero_optimization.stage: got 7" in err
    assert "script.py" in err
