"""TRL's supervised fine-tuning on conversations, with a tokenizer and a chat template built here."""

from __future__ import annotations

import json
import shutil

import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import tiny


def main() -> None:
    args = tiny.arguments()
    folder = args.folder / f"trl-{args.stage}-{args.dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.zero(args)
    config["optimizer"]["params"]["torch_adam"] = True
    (folder / "ds_config.json").write_text(json.dumps(config))
    settings = SFTConfig(
        output_dir=str(folder / "run"), deepspeed=str(folder / "ds_config.json"), use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps, per_device_train_batch_size=4, gradient_accumulation_steps=args.accumulation,
        learning_rate=1e-2, max_grad_norm=1.0, warmup_steps=1, bf16=args.dtype == "bf16", logging_steps=1, report_to=[],
        save_strategy="no", disable_tqdm=True, seed=0, max_length=32, gradient_checkpointing=False)
    texts = [" ".join(f"w{(start + i) % 80}" for i in range(10)) for start in range(64)]
    trainer = SFTTrainer(model=tiny.build(args), args=settings, train_dataset=Dataset.from_dict({"text": texts}),
                         processing_class=tiny.tokenizer())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    trainer.save_model(str(folder / "model"))
    assert (tiny.rank() != 0) or (folder / "model" / "tokenizer.json").is_file()
    tiny.report(losses=losses)
    trainer.accelerator.wait_for_everyone()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
