"""TRL's trainers of preferences (DPO, KTO), of rewards, and of samples of the model itself (GRPO, RLOO).

GRPO and RLOO load the model from a folder, twice where a divergence from the reference counts, and generate in each step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

import tiny

PROMPTS = [" ".join(f"w{(start + i) % 80}" for i in range(6)) for start in range(64)]
PAIRS = {"prompt": PROMPTS, "chosen": [" w1 w2"] * 64, "rejected": [" w3 w4"] * 64}
JUDGED = {"prompt": PROMPTS, "completion": [" w1 w2"] * 64, "label": [True, False] * 32}


def distinct_words(completions: list[str], **_: object) -> list[float]:
    return [float(len(set(each.split()))) for each in completions]


def preferring(kind: str, args: Any, common: dict[str, Any]) -> Any:
    """Return the trainer that learns from `PAIRS` or `JUDGED`, beside a reference model for DPO and KTO."""
    tokenizer = tiny.tokenizer()
    if kind == "reward":
        config = tiny.model_config(args)
        config.num_labels = 1
        torch.manual_seed(0)
        return RewardTrainer(model=LlamaForSequenceClassification(config), args=RewardConfig(**common, max_length=32),
                             train_dataset=Dataset.from_dict(PAIRS), processing_class=tokenizer)
    models = {"model": tiny.build(args), "ref_model": tiny.build(args), "processing_class": tokenizer}
    if kind == "dpo":
        return DPOTrainer(**models, args=DPOConfig(**common, max_length=32), train_dataset=Dataset.from_dict(PAIRS))
    return KTOTrainer(**models, args=KTOConfig(**common, max_length=32), train_dataset=Dataset.from_dict(JUDGED))


def sampling(kind: str, folder: Path, common: dict[str, Any]) -> Any:
    """Return the trainer that learns from the rewards of samples of the model in `folder`."""
    options = {"num_generations": 4, "max_completion_length": 8, "beta": 0.05}
    if kind == "grpo":
        trainer: Callable[..., Any] = GRPOTrainer
        settings: Any = GRPOConfig(**common, **options)
    else:
        trainer, settings = RLOOTrainer, RLOOConfig(**common, **options)
    return trainer(model=str(folder), reward_funcs=distinct_words, args=settings,
                   train_dataset=Dataset.from_dict({"prompt": PROMPTS}), processing_class=tiny.tokenizer())


def main() -> None:
    args = tiny.arguments(trainer={"choices": ["dpo", "kto", "reward", "grpo", "rloo"], "default": "dpo"})
    folder = args.folder / f"trl-{args.trainer}-{args.stage}-{args.dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.zero(args)
    config["optimizer"]["params"]["torch_adam"] = True
    (folder / "ds_config.json").write_text(json.dumps(config))
    common = {"output_dir": str(folder / "run"), "deepspeed": str(folder / "ds_config.json"),
              "use_cpu": not torch.cuda.is_available(), "max_steps": args.steps, "per_device_train_batch_size": 4,
              "gradient_accumulation_steps": args.accumulation, "learning_rate": 1e-3, "warmup_steps": 1,
              "bf16": args.dtype == "bf16", "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
              "seed": 0, "gradient_checkpointing": False}
    if args.trainer in ("grpo", "rloo"):
        own = folder / f"model-{tiny.rank()}"  # a folder for each rank, so that none waits for another to write it
        tiny.build(args).save_pretrained(own)
        trainer = sampling(args.trainer, own, common)
    else:
        trainer = preferring(args.trainer, args, common)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    tiny.report(losses=[row["loss"] for row in rows], norms=[row["grad_norm"] for row in rows])
    trainer.accelerator.wait_for_everyone()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
