"""One complete training loop, on any number of ranks.

    shoal run --ranks 2 examples/minimal.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
inputs = torch.randn(4096, 16)
data = TensorDataset(inputs, inputs.norm(dim=1, keepdim=True))

engine, _, loader, _ = shoal.initialize(model=model, training_data=data, config={
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
})
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
    if engine.global_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
engine.save_checkpoint("out/minimal")
engine.wait_for_checkpoint()
