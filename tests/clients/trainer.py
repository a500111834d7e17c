"""The Trainer with a JSON file: evaluation, rotation, the best model, resuming, prediction, generation, and saving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import tiny


class Losses(TrainerCallback):
    """The losses that the Trainer logs, and the seconds of its steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluated: list[float] = []
        self.clock = tiny.Clock()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.tick()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.losses += [logs["loss"]] if logs and "loss" in logs else []
        self.evaluated += [logs["eval_loss"]] if logs and "eval_loss" in logs else []


def trainer(args: Any, folder: Path, config: Path, model: Any = None) -> tuple[Trainer, Losses]:
    settings = TrainingArguments(
        output_dir=str(folder), deepspeed=str(config), use_cpu=not torch.cuda.is_available(), max_steps=args.steps,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, gradient_accumulation_steps=args.accumulation,
        learning_rate=1e-2, weight_decay=0.01, max_grad_norm=1.0, warmup_steps=1, bf16=args.dtype == "bf16",
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="loss", logging_steps=1, report_to=[], disable_tqdm=True, seed=0)
    losses = Losses()
    return Trainer(model=model or tiny.build(args), args=settings, train_dataset=tiny.Sequences(32 * args.accumulation),
                   eval_dataset=tiny.Sequences(10, seed=1), callbacks=[losses]), losses


def main() -> None:
    args = tiny.arguments(client={"action": "store_true"})
    folder = args.folder / f"trainer-{args.stage}-{args.dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    settings = tiny.zero(args)
    if args.client:  # the Trainer's own optimizer and schedule
        del settings["optimizer"], settings["scheduler"]
    else:
        settings["optimizer"]["params"]["torch_adam"] = True
    config.write_text(json.dumps(settings))
    first, seen = trainer(args, folder / "run", config)
    first.train()
    kept = sorted(int(path.name.split("-")[1]) for path in (folder / "run").glob("checkpoint-*"))
    assert len(kept) == 2, f"save_total_limit=2 kept the checkpoints of steps {kept}"
    predicted = first.predict(tiny.Sequences(6, seed=3))
    assert predicted.predictions.shape[:2] == (6, tiny.LENGTH), predicted.predictions.shape
    first.save_model(str(folder / "model"))

    again, seen_again = trainer(args, folder / "run", config)
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{kept[0]}"))
    assert seen_again.losses == seen.losses[kept[0]:], f"resumed {seen_again.losses}, had {seen.losses[kept[0]:]}"

    prompt = tiny.Sequences(2, seed=2).tokens[:, :4].to(first.args.device)
    generated = again.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    unset_hf_deepspeed_config()  # what follows is no part of the job: a plain model
    plain = LlamaForCausalLM.from_pretrained(folder / "model").to(first.args.device)
    with torch.no_grad():
        batch = torch.stack([sample["input_ids"] for sample in tiny.Sequences(6, seed=3)]).to(first.args.device)
        difference = (plain(batch).logits - torch.tensor(predicted.predictions).to(batch.device)).abs().max().item()
    assert difference < (1e-4 if args.dtype == "fp32" else 0.1), f"the saved model's logits differ by {difference}"
    tiny.report(losses=seen.losses, evaluated=seen.evaluated, generated=generated.tolist(), seconds=seen.clock.median)
    first.accelerator.wait_for_everyone()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
