"""`from_pretrained` under ZeRO-3: no rank ever holds the whole model; then new tokens, training, and generation."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import tiny


class Peak:
    """The largest memory of this process within the context, above that at its begin, in bytes.

    Pages of files count for nothing: those of the folder that rank 0 reads are the system's cache, which it drops at need.
    """

    def __enter__(self) -> Peak:
        gc.collect()
        self.first = self.most = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = self.most - self.first

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, _resident())


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def arguments(args: Any, folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "run"), use_cpu=not torch.cuda.is_available(), report_to=[], max_steps=args.steps,
        per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, bf16=args.dtype == "bf16", disable_tqdm=True,
        save_strategy="no", seed=0, **more)


def main() -> None:
    args = tiny.arguments(measure={"action": "store_true"})
    folder = args.folder / f"pretrained-{args.dtype}"
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    transformers.utils.logging.disable_progress_bar()
    settings = arguments(args, folder)
    if tiny.rank() == 0:
        tiny.build(args).to(dtype).save_pretrained(folder / "model", max_shard_size="64MB")
    torch.distributed.barrier()
    config = {**tiny.zero(args), "train_micro_batch_size_per_gpu": 4, "train_batch_size": 4 * settings.world_size,
              "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "bf16": {"enabled": args.dtype == "bf16"}}
    del config["optimizer"], config["scheduler"], config["fp16"]
    alive = HfDeepSpeedConfig(config)
    with Peak() as peak:
        model = LlamaForCausalLM.from_pretrained(folder / "model", dtype=dtype)
    if args.measure:
        whole = sum(p.numel() * p.element_size() for p in model.parameters())
        layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
        embedding = model.lm_head.weight.numel() * model.lm_head.weight.element_size()
        peaks = torch.tensor([peak.bytes], dtype=torch.float64)
        torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
        tiny.report(whole_mb=whole >> 20, layer_mb=layer >> 20, embedding_mb=embedding >> 20,
                    peak_above_mb=round(peaks.item() / 2**20))
        _end(folder)
        return
    model.resize_token_embeddings(tiny.VOCABULARY + 8)
    (folder / "ds_config.json").write_text(json.dumps({**config, "optimizer": {"type": "AdamW", "params": {
        "lr": 1e-2, "torch_adam": True}}}))
    settings = arguments(args, folder, deepspeed=str(folder / "ds_config.json"))
    trainer = Trainer(model=model, args=settings, train_dataset=tiny.Sequences(32))
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    prompt = tiny.Sequences(2, seed=2).tokens[:, :4].to(settings.device)
    generated = trainer.model.generate(prompt, max_new_tokens=4, do_sample=False, synced_gpus=True)
    del alive
    tiny.report(losses=losses, generated=generated.tolist())
    _end(folder)


def _end(folder: Path) -> None:
    torch.distributed.barrier()
    if tiny.rank() == 0:
        shutil.rmtree(folder)


main()
