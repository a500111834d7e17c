"""Accelerate's `ParallelismConfig(sp_size=N)`: ranks train on parts of the sequences, in Accelerate's loop or the Trainer.

    --ranks-of-a-sequence 1    the same data on one rank, to compare with
    --trainer                  by the Trainer, which joins the loss itself
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import DataLoader

import tiny


def main() -> None:
    args = tiny.arguments(**{"ranks-of-a-sequence": {"type": int, "default": 2}, "trainer": {"action": "store_true"}})
    PartialState(cpu=not torch.cuda.is_available())
    (by_trainer if args.trainer else by_accelerate)(args, args.ranks_of_a_sequence)


def parallelism(ranks: int) -> ParallelismConfig | None:
    if ranks == 1:
        return None
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    return ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, sp_handler=DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"))


def by_accelerate(args: Any, ranks: int) -> None:
    plugin = DeepSpeedPlugin(zero_stage=args.stage, gradient_clipping=1.0)
    accelerator = Accelerator(deepspeed_plugin=plugin, parallelism_config=parallelism(ranks),
                              mixed_precision="no" if args.dtype == "fp32" else args.dtype)
    model = tiny.build(args)
    data = DataLoader(tiny.Sequences(4 * args.steps), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    clock = tiny.Clock()
    losses = []
    for batch in data:
        loss = model(**batch).loss if ranks == 1 else of_sequence(accelerator, model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.tick()
    assert len(losses) == args.steps, f"{len(losses)} steps of {args.steps}"
    tiny.report(losses=losses, seconds=clock.median)
    accelerator.end_training()


def of_sequence(accelerator: Accelerator, model: Any, batch: Any) -> torch.Tensor:
    """Return the loss of whole sequences, joined as Accelerate's guide says."""
    from deepspeed.utils import groups

    labels = batch["shift_labels"]
    outputs = model(**batch)
    loss = model.module.loss_function(logits=outputs.logits, labels=None, shift_labels=labels,
                                      vocab_size=model.module.config.vocab_size)
    group = groups._get_sequence_parallel_group()
    losses = torch.distributed.nn.functional.all_gather(loss, group=group)
    counts = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
    return sum(each * count for each, count in zip(losses, counts, strict=True) if count > 0) / sum(counts)


def by_trainer(args: Any, ranks: int) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

    seen: list[float] = []

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            if "loss" in (logs or {}):
                seen.append(float(logs["loss"]))

    config = tiny.zero(args)
    trainer = Trainer(
        model=tiny.build(args), train_dataset=tiny.Sequences(4 * args.steps), eval_dataset=tiny.Sequences(8, seed=1),
        data_collator=default_data_collator, callbacks=[Losses()],
        args=TrainingArguments(
            output_dir=str(args.folder / "sequence"), per_device_train_batch_size=4, per_device_eval_batch_size=4,
            max_steps=args.steps, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            deepspeed=config, parallelism_config=parallelism(ranks), disable_tqdm=True))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    tiny.report(losses=seen, evaluated=evaluated, seconds=0)


main()
