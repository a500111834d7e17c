"""Fine-tune a causal language model of Hugging Face: all weights or adapters, at any stage; it answers before and after.

Without `--model` a small Llama is built, and nothing is downloaded. `MODEL` is a folder, or a name that
`from_pretrained` knows.

    shoal run --ranks 2 examples/finetune/finetune.py --shoal-config examples/finetune/zero3.json --adapters 8
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shoal
from facts import PROMPT, SENTENCES, Bytes, batch
from lora import add_adapters, merged

ASKED = ("Norway", "Japan", "Iceland")


def build(name: str | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=Bytes.vocabulary, hidden_size=96, intermediate_size=192, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
                         bos_token_id=1, eos_token_id=0)
    return LlamaForCausalLM(config), Bytes()


def answers(engine: shoal.Engine, tokenizer: Any) -> list[str]:
    """Let the model complete a few prompts; every rank does the same, as every rank holds a part of the weights."""
    engine.eval()
    said = []
    with torch.no_grad(), shoal.gathered(engine.module):
        for country in ASKED:
            prompt = torch.tensor([tokenizer.encode(PROMPT.format(country))], device=engine.device)
            tokens = engine.module.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12,
                                            do_sample=False)
            said.append(tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True).splitlines()[0])
    engine.train()
    return said


def train(engine: shoal.Engine, tokenizer: Any, steps: int, say: Any) -> None:
    """Train on this rank's share of the sentences."""
    share = SENTENCES[engine.global_rank::engine.world_size]
    data = {name: value.to(engine.device) for name, value in batch(tokenizer, share).items()}
    for step in range(steps):
        loss = engine(**data).loss
        engine.backward(loss)
        engine.step()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            say(f"step {step:4}  loss {loss.item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--adapters", type=int, default=0, metavar="RANK", help="train adapters of this rank alone")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("out/finetune"))
    args = shoal.add_config_arguments(parser).parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    model, tokenizer = build(args.model)
    if args.adapters:
        add_adapters(model, args.adapters)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = shoal.initialize(args, model=model, model_parameters=learning)
    say = print if engine.global_rank == 0 else lambda *_: None
    say(f"{sum(p.numel() for p in learning):,} of {sum(p.numel() for p in model.parameters()):,} weights learn")
    for line in answers(engine, tokenizer):
        say(f"before: {line!r}")
    train(engine, tokenizer, args.steps, say)
    for line in answers(engine, tokenizer):
        say(f"after:  {line!r}")

    state = engine.consolidated_state_dict()  # on rank 0; every rank calls it
    if state is not None:
        plain = merged(state, args.adapters) if args.adapters else state
        model.save_pretrained(args.out, state_dict=plain)
        if args.model:
            tokenizer.save_pretrained(args.out)
        say(f"saved in {args.out}: from_pretrained loads it")


if __name__ == "__main__":
    main()
