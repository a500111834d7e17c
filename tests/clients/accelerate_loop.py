"""Accelerate's own loop with a `DeepSpeedPlugin`: train, evaluate, generate, save, load, and go on as before."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import tiny


def main() -> None:
    args = tiny.arguments(**{name: {"action": "store_true"} for name in ("named", "plain", "launched")})
    PartialState(cpu=not torch.cuda.is_available())
    config = None if args.plain or args.launched else plugin_config(args)
    plugin = (None if args.launched else DeepSpeedPlugin(hf_ds_config=config) if config else
              DeepSpeedPlugin(zero_stage=args.stage, gradient_accumulation_steps=args.accumulation, gradient_clipping=1.0,
                              offload_optimizer_device="cpu" if args.offload else "none", offload_param_device="none",
                              zero3_init_flag=False, zero3_save_16bit_model=True))
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="no" if args.dtype == "fp32" else args.dtype,
                              gradient_accumulation_steps=args.accumulation)
    model = tiny.build(args)
    data = DataLoader(tiny.Sequences(4 * args.steps * args.accumulation * accelerator.num_processes), batch_size=4)
    evaluation = DataLoader(tiny.Sequences(10, seed=1), batch_size=4)
    if config and "optimizer" in config:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.01)
        schedule: Any = DummyScheduler(optimizer, warmup_num_steps=2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    model, optimizer, data, evaluation, schedule = accelerator.prepare(model, optimizer, data, evaluation, schedule)
    clock = tiny.Clock()
    losses, norms = train(accelerator, model, optimizer, schedule, data, clock)
    evaluated = evaluate(accelerator, model, evaluation)

    folder = args.folder / f"accelerate-{args.stage}-{args.dtype}"
    accelerator.save_state(str(folder / "state"), client_state={"epoch": 1})
    again, _ = train(accelerator, model, optimizer, schedule, data, clock)
    accelerator.load_state(str(folder / "state"))
    resumed, _ = train(accelerator, model, optimizer, schedule, data, clock)
    assert resumed == again, f"resuming changed the losses: {again} became {resumed}"

    whole = accelerator.unwrap_model(model)
    whole.save_pretrained(folder / "model", is_main_process=accelerator.is_main_process,
                          save_function=accelerator.save, state_dict=accelerator.get_state_dict(model))
    accelerator.wait_for_everyone()
    prompt = tiny.Sequences(2, seed=2).tokens[:, :4].to(accelerator.device)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=prompt).logits.float()
        generated = whole.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    unset_hf_deepspeed_config()  # what follows is no part of the job: a plain model, on one rank
    if accelerator.is_main_process:
        saved = LlamaForCausalLM.from_pretrained(folder / "model", dtype=whole.dtype).to(accelerator.device).eval()
        with torch.no_grad():
            difference = (saved(input_ids=prompt).logits.float() - logits).abs().max().item()
        assert difference == 0, f"the saved model's logits differ by {difference}"
    tiny.report(losses=losses, norms=norms, evaluated=evaluated, resumed=resumed, generated=generated.tolist(),
                seconds=clock.median)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    accelerator.end_training()


def plugin_config(args: Any) -> dict[str, Any]:
    """Return the configuration of a file: of the optimizer too, or without it where the script builds its own."""
    config = tiny.zero(args)
    config |= {"gradient_clipping": 1.0, "gradient_accumulation_steps": args.accumulation}
    if not args.named:
        del config["optimizer"], config["scheduler"]
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    return config


def train(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, data: Any,
          clock: tiny.Clock) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    model.train()
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0) or 0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        clock.tick()
    return losses, norms


def evaluate(accelerator: Accelerator, model: Any, data: Any) -> float:
    model.eval()
    found = []
    with torch.no_grad():
        for batch in data:
            output = model(**batch)
            predicted, wanted = accelerator.gather_for_metrics((output.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]))
            found.append((predicted == wanted).float().mean(-1))
    correct = torch.cat(found)
    assert len(correct) == 10, f"gathered {len(correct)} of 10 samples"
    return correct.mean().item()


main()
