"""The launcher restarts a job that its guard sends back, and ends one that it gives up."""

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
