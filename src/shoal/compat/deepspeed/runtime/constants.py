"""Published constants that scripts import: routes of loaders, keys of the configuration, marks of parameters."""

ROUTE_TRAIN, ROUTE_EVAL, ROUTE_PREDICT, ROUTE_ENCODE = "train", "eval", "predict", "encode"

TRAIN_BATCH_SIZE = "train_batch_size"
TRAIN_MICRO_BATCH_SIZE_PER_GPU = "train_micro_batch_size_per_gpu"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
OPTIMIZER, SCHEDULER, TYPE = "optimizer", "scheduler", "type"
OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"
MAX_GRAD_NORM = "max_grad_norm"
LEGACY_FUSION = "legacy_fusion"
ZERO_ALLOW_UNTESTED_OPTIMIZER = "zero_allow_untested_optimizer"
STEPS_PER_PRINT = "steps_per_print"
GRADIENT_CLIPPING = "gradient_clipping"
GRADIENT_CLIPPING_DEFAULT = 1.0
COMMUNICATION_DATA_TYPE = "communication_data_type"
PRESCALE_GRADIENTS = "prescale_gradients"
GRADIENT_PREDIVIDE_FACTOR = "gradient_predivide_factor"
GRADIENT_ALLREDUCE_OP = "gradient_allreduce_op"
DATALOADER_DROP_LAST = "dataloader_drop_last"
DUMP_STATE = "dump_state"
VOCABULARY_SIZE = "vocabulary_size"
WALL_CLOCK_BREAKDOWN = "wall_clock_breakdown"
MEMORY_BREAKDOWN = "memory_breakdown"
FP16, BFLOAT16, BFLOAT16_OLD = "fp16", "bf16", "bfloat16"
DATA_TYPES, GRAD_ACCUM_DTYPE = "data_types", "grad_accum_dtype"
CHECKPOINT = "checkpoint"
CHECKPOINT_TAG_VALIDATION = "tag_validation"
CHECKPOINT_TAG_VALIDATION_MODES = ["WARN", "IGNORE", "FAIL"]
LOAD_UNIVERSAL_CHECKPOINT = "load_universal"
USE_NODE_LOCAL_STORAGE_CHECKPOINT = "use_node_local_storage"
PIPE_REPLICATED = "ds_pipe_replicated"
DATA_PARALLEL_GROUP, GLOBAL_RANK = "data_parallel_group", "global_rank"


class ValidationMode:
    """What becomes of checkpoint tags that differ between ranks."""

    WARN, IGNORE, FAIL = "WARN", "IGNORE", "FAIL"
