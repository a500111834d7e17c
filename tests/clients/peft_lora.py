"""PEFT's LoRA within the Trainer: only adapters learn, only adapters are saved, and they load again.

With `--pretrained` the model comes from a folder, which stage 3 shards as it loads, and its head is trained as a whole: PEFT
copies the module, and saves the copy beside the adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import tiny


def arguments(args: Any, folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "run"), deepspeed=str(folder / "ds_config.json"), use_cpu=not torch.cuda.is_available(),
        max_steps=args.steps, per_device_train_batch_size=4, gradient_accumulation_steps=args.accumulation,
        learning_rate=3e-2, max_grad_norm=1.0, warmup_steps=1, bf16=args.dtype == "bf16", logging_steps=1, report_to=[],
        save_steps=args.steps // 2, disable_tqdm=True, seed=0)


def base(args: Any, folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder / "base") if args.pretrained else tiny.build(args)


def main() -> None:
    args = tiny.arguments(pretrained={"action": "store_true"})
    folder = args.folder / f"peft-{args.stage}-{args.dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    if args.pretrained and tiny.rank() == 0:
        tiny.build(args).save_pretrained(folder / "base")
    config = tiny.zero(args)
    config["optimizer"]["params"]["torch_adam"] = True
    (folder / "ds_config.json").write_text(json.dumps(config))
    settings = arguments(args, folder)
    settings.distributed_state.wait_for_everyone()  # rank 0 has saved the model
    torch.manual_seed(1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0,
                      target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
                      modules_to_save=["lm_head"] if args.pretrained else None)
    model = get_peft_model(base(args, folder), lora)
    trainer = Trainer(model=model, args=settings, train_dataset=tiny.Sequences(32 * args.accumulation))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]

    torch.manual_seed(2)  # adapters of other values, which the checkpoint replaces
    again = Trainer(model=get_peft_model(base(args, folder), lora), args=arguments(args, folder),
                    train_dataset=tiny.Sequences(32 * args.accumulation))
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{args.steps // 2}"))
    resumed = [row["loss"] for row in again.state.log_history if "loss" in row]
    assert resumed == losses, f"resumed {resumed}, had {losses}"

    trainer.save_model(str(folder / "adapter"))
    tokens = tiny.Sequences(2, seed=2).tokens.to(settings.device)
    with torch.no_grad():
        trained = trainer.model_wrapped(input_ids=tokens).logits.float()
    unset_hf_deepspeed_config()
    if tiny.rank() == 0:
        plain = PeftModel.from_pretrained(base(args, folder), str(folder / "adapter")).to(settings.device)
        with torch.no_grad():
            difference = (plain(input_ids=tokens).logits - trained).abs().max().item()
        assert difference < (1e-4 if args.dtype == "fp32" else 0.1), f"the saved adapter's logits differ by {difference}"
    tiny.report(losses=losses, resumed=resumed)
    trainer.accelerator.wait_for_everyone()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
