"""The model, the data and the configuration of the client scripts: small, built here, downloaded from nowhere.

The scripts know nothing of Shoal: they import `deepspeed` only through their libraries, so that the same files run with the
published package too, and their losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH = 96, 12


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upward from a start of their own: easily learned, the same at every call."""

    def __init__(self, count: int, seed: int = 0):
        starts = torch.randint(VOCABULARY - LENGTH, (count, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = starts + torch.arange(LENGTH)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def arguments(**more: dict[str, Any]) -> argparse.Namespace:
    """Parse the options of all scripts, and `more` of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("out/clients"))
    for name, options in more.items():
        parser.add_argument(f"--{name}", **options)
    return parser.parse_args()


def model_config(args: argparse.Namespace) -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCABULARY, hidden_size=args.dim, intermediate_size=2 * args.dim, num_attention_heads=4,
                       num_hidden_layers=args.layers, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
                       bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """Build the model with the same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(model_config(args))


def tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of words: a token is a number, or a role of a chat."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *(f"w{i}" for i in range(VOCABULARY - 4))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]",
                                   unk_token="[UNK]")


def zero(args: argparse.Namespace, *, auto: bool = True) -> dict[str, Any]:
    """Return the configuration as users write it for the Trainer: with `auto` wherever it is allowed."""
    offload = {"device": "cpu"} if args.offload else {"device": "none"}
    config: dict[str, Any] = {
        "zero_optimization": {
            "stage": args.stage, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "offload_optimizer": offload, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR",
                      "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    if args.stage == 3:
        config["zero_optimization"]["offload_param"] = offload
    return config


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def report(**facts: Any) -> None:
    """Print the facts of a run as one line of JSON, on rank 0."""
    if rank() == 0:
        facts["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print("REPORT " + json.dumps(facts), flush=True)


class Clock:
    """The seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.perf_counter()

    def start(self) -> None:
        self._began = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._began)
        self._began = now

    @property
    def median(self) -> float:
        ordered = sorted(self.seconds[1:] or self.seconds)
        return ordered[len(ordered) // 2]
