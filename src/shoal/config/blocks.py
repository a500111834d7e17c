"""The published top-level keys that Shoal does not implement, with the defaults at which they request nothing."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.config.published import Published, inert, later, later_block, old

__all__ = ["BLOCKS", "SCALARS"]

SCALARS: Mapping[str, Published] = {
    "managed_gradient_accumulation": later("false: every `step()` is an accumulation boundary", True),
    "seq_parallel_communication_data_type": later("the dtype of sequence-parallel reduction", "fp32"),
    "use_data_before_expert_parallelism": later("the order of data and expert ranks", False),
    "graph_harvesting": later("capture CUDA graphs", False),
    "disable_python_gc": later("run garbage collection at fixed points only", False),
    "wall_clock_breakdown": later("time forward, backward and step", False),
    "memory_breakdown": later("report memory at each phase", False),
    "zero_force_ds_cpu_optimizer": inert(
        "demand a CPU optimizer when offloading", True, False, reason="any optimizer may be offloaded"
    ),
    "disable_allgather": inert("no effect in DeepSpeed since 2020", False, reason="the stage decides which collectives run"),
    "allgather_size": old(
        'elements per gather, taken beside `"zero_optimization": true`',
        reason="write zero_optimization.allgather_bucket_size",
    ),
    "fp32_allreduce": old("reduce gradients in fp32", False, reason='write "communication_data_type": "fp32"'),
    "allreduce_always_fp32": old("reduce gradients in fp32", False, reason='write "communication_data_type": "fp32"'),
    "msamp": inert("written by accelerate for its FP8 recipe", reason="accelerate reads it, training does not"),
}

_CURRICULUM = ("schedule difficulty in the training loop: deepspeed.runtime.data_pipeline.curriculum_scheduler."
               "CurriculumScheduler gives the sequence length or the difficulty of a step, to which the script cuts or "
               "selects its samples")

BLOCKS: Mapping[str, Published] = {
    "amp": later_block("Apex mixed precision; fp16 and bf16 are built in", switch="enabled"),
    "torch_autocast": later_block(
        "torch's autocast",
        {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": None},
        switch="enabled",
    ),
    "progressive_layer_drop": later_block(
        "drop layers during training", {"enabled": False, "theta": 1.0, "gamma": 0.001}, switch="enabled"
    ),
    "timers": later_block(
        "timers",
        {
            "throughput": later_block(
                "the throughput timer", {"enabled": later("", True, False), "synchronized": later("", True, False)}
            )
        },
    ),
    "flops_profiler": later_block(
        "the FLOPs profiler",
        {
            "enabled": False,
            "recompute_fwd_factor": 0.0,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
        switch="enabled",
    ),
    "tensorboard": later_block(
        "the TensorBoard monitor",
        {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
        switch="enabled",
    ),
    "wandb": later_block(
        "the Weights & Biases monitor",
        {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
        switch="enabled",
    ),
    "csv_monitor": later_block(
        "the CSV monitor", {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"}, switch="enabled"
    ),
    "comet": later_block(
        "the Comet monitor",
        {
            "enabled": False,
            "samples_log_interval": 100,
            "project": None,
            "workspace": None,
            "api_key": None,
            "experiment_name": None,
            "experiment_key": None,
            "online": None,
            "mode": None,
        },
        switch="enabled",
    ),
    "autotuning": later_block(
        "automatic search for a fast configuration",
        {
            "enabled": False,
            "fast": True,
            "results_dir": "autotuning_results",
            "exps_dir": "autotuning_exps",
            "overwrite": True,
            "start_profile_step": 3,
            "end_profile_step": 5,
            "metric": "throughput",
            "metric_path": None,
            "tuner_type": "gridsearch",
            "tuner_early_stopping": 5,
            "tuner_num_trials": 50,
            "arg_mappings": None,
            "mp_size": 1,
            "max_train_batch_size": None,
            "min_train_batch_size": 1,
            "max_train_micro_batch_size_per_gpu": 1024,
            "min_train_micro_batch_size_per_gpu": 1,
            "num_tuning_micro_batch_sizes": 3,
            "model_info": None,
            "model_info_path": None,
        },
        switch="enabled",
    ),
    "expert_parallel": later_block("expert parallelism", switch="enabled"),
    "hybrid_engine": later_block(
        "training and generation in one engine",
        {
            "enabled": False,
            "max_out_tokens": 512,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
            "enable_cuda_graph": False,
        },
        switch="enabled",
    ),
    "compile": later_block(
        "passes over the compiled graph",
        {
            "deepcompile": False,
            "free_activation": False,
            "free_activation_threshold": 10 * 1024 * 1024,
            "offload_activation": False,
            "offload_activation_pin_memory": True,
            "offload_opt_states": False,
            "offload_parameters": False,
            "double_buffer": True,
            "symmetric_memory": False,
            "debug_log": False,
            "sync_before_reduce": False,
            "sync_after_reduce": False,
            "sync_before_allgather": False,
            "sync_after_allgather": False,
            "keep_int_input_tensors": True,
            "keep_all_input_tensors": False,
            "passes": None,
        },
    ),
    "data_efficiency": later_block("curriculum learning and token dropping", switch="enabled", instead=_CURRICULUM),
    "curriculum_learning": later_block("the older form of curriculum learning", switch="enabled", instead=_CURRICULUM),
    "quantize_training": later_block("mixture of quantization (MoQ)", switch="enabled"),
    "eigenvalue": later_block("eigenvalues of the Hessian", switch="enabled"),
    "compression_training": later_block("pruning and quantization during training"),
    "nebula": later_block("asynchronous checkpoints (Nebula)", switch="enabled"),
    "datastates_ckpt": later_block("asynchronous checkpoints (DataStates)"),
}
