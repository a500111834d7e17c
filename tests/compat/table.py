"""The table of published names and keys in docs/migrating.md, made from the lists that the tests check.

    python -m tests.compat.table      # rewrites the part of the page between the two marks
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path

from shoal.compat.tolerance import INERT

PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
FACTS: dict[str, dict[str, list[str] | None]] = json.loads((Path(__file__).parent / "published.json").read_text())
"""The parameters of every published function and class that has a counterpart, by module; None: a set of named values."""

BEGIN, END = "<!-- published names: begin -->", "<!-- published names: end -->"

BETTER = {
    "deepspeed.module_inject.replace_transformer_layer": "on the CPU too; parameters and state dict stay",
    "deepspeed.ops.transformer.DeepSpeedTransformerLayer": "on the CPU too, any batch and length, deterministic",
    "deepspeed.ops.sparse_attention.BSLongformerSparsityConfig": "an unknown `attention` is refused",
    "deepspeed.ops.sparse_attention.SparseAttentionUtils": "padding without a mask makes one",
    "deepspeed.ops.sparse_attention.SparseSelfAttention": "fp32 and bf16 too, on the CPU too",
    "deepspeed.ops.sparse_attention.VariableSparsityConfig": "unidirectional layouts draw no later random blocks",
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters": "nests, works at every stage, takes None; "
                                                                         "edits reach the masters",
    "deepspeed.runtime.zero.stage3.unwrap_model_for_generation": "no hook has to be removed",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.SequenceTiledCompute": "every tensor gets its gradient",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss": "the loss may be scaled afterwards",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP": "parameters learn where x needs no gradient",
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": "pads what the ranks do not divide",
    "deepspeed.sequence.layer.DistributedAttention": "any number of heads, and of key heads",
    "deepspeed.utils.tensor_fragment.safe_get_full_fp32_param": "at stage 0 too",
    "deepspeed.utils.tensor_fragment.safe_get_full_grad": "without the loss scale",
    "deepspeed.utils.tensor_fragment.safe_set_full_fp32_param": "the weights follow at once",
    "deepspeed.utils.tensor_fragment.safe_get_full_optimizer_state": "zeros before the first step, in place of an error",
}
"""Names that do more than published, and what."""

REFUSED = {
    "deepspeed.init_inference": "generate with the module of a training engine, or with vLLM",
    "deepspeed.moe.layer.MoE": "write the experts as modules; they train like any others",
    "deepspeed.profiling.flops_profiler.get_model_profile": "torch.utils.flop_counter.FlopCounterMode; engine.trace()",
    "deepspeed.autotuning.autotuner.Autotuner": "`shoal config show FILE --ranks N` prices a configuration",
    "deepspeed.elasticity.DSElasticAgent": "`shoal run --nodes MIN:MAX`",
    "deepspeed.runtime.zero.MiCS_Init": "zero.Init, and `zero_optimization.mics_shard_size`",
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam": "an elementwise optimizer",
    "deepspeed.runtime.eigenvalue.Eigenvalue": "torch.autograd.functional.hvp, before initialize",
    "deepspeed.runtime.quantize.Quantizer": "torch.ao, before initialize",
    "deepspeed.runtime.domino.transformer.DominoTransformer": "`tensor_parallel.autotp_size`",
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler.DeepSpeedDataSampler":
        "a sampler of your own; CurriculumScheduler gives the difficulty",
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer": "the metric of each sample, before training",
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset.MMapIndexedDataset": "a Dataset over numpy.memmap",
    "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd": "`progressive_layer_drop`",
    "deepspeed.nebula.config.DeepSpeedNebulaConfig": "`checkpoint.async_save`",
    "deepspeed.io.FastFileWriter": "engine.save_checkpoint",
    "deepspeed.ops.fp_quantizer.FP_Quantize": "frozen weights in bf16, which stage 3 shards",
    "deepspeed.utils.get_full_hp_param": "safe_get_full_fp32_param, safe_get_full_optimizer_state",
    "deepspeed.utils.link_hp_params": "safe_get_full_fp32_param, safe_get_full_optimizer_state",
    "deepspeed.compression.compress.init_compression": "prune and quantize with torch.ao, before initialize",
    "deepspeed.linear.OptimizedLinear": "adapters of peft, whose frozen weights are sharded",
    "deepspeed.sequence.fpdt_layer.FPDT_Attention": "sequence.layer.DistributedAttention",
    "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine": "generate within zero.GatheredParameters(model)",
}
"""Names that import and raise `NotSupportedYet` when they are used, and what to use instead."""


def find(name: str) -> object:
    """Return the object of a published name."""
    module, _, attribute = f"shoal.compat.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def rows() -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| published | here |"
    yield "|---|---|"
    for module, names in FACTS.items():
        listed = ", ".join(f"`{name}`" for name in names if f"{module}.{name}" not in BETTER)
        if listed:
            yield f"| `{module}`: {listed} | same |"
    for name, why in BETTER.items():
        yield f"| `{name}` | better: {why} |"
    for name, instead in REFUSED.items():
        yield f"| `{name}` | refused: {instead} |"
    for key, inert in INERT.items():
        yield f"| key `{key}` | accepted, without effect: {inert.reason} |"


def page() -> str:
    """Return docs/migrating.md with the table as it should be."""
    text = PAGE.read_text()
    before, after = text[:text.index(BEGIN)], text[text.index(END):]
    return f"{before}{BEGIN}\n" + "\n".join(rows()) + f"\n{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
