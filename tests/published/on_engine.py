"""The engine's members: what they return, take and count, as scripts and clients use them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from .case import case, raised
from .on_zero import batch, config, network, start, train, whole


@case(stage=[0, 1, 2, 3])
def return_values(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=2)
    out = [engine.train(), engine.eval(), engine.module.training, engine.train(False), engine.train(True)]
    loss = engine(batch()).square().mean()
    out += [engine.backward(loss) / loss, engine.step(), engine.zero_grad()]
    loss = engine(batch()).square().mean()
    out += [engine.backward(loss, scale_wrt_gas=False) / loss, engine.step()]
    return out


@case(stage=[0, 1, 2, 3], steps=[1, 2])
def counters(stage: int, steps: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=steps)
    found: list[Any] = []
    for index in range(3):
        loss = engine(batch(index)).square().mean()
        before = engine.is_gradient_accumulation_boundary()
        engine.backward(loss)
        engine.step()
        found.append([before, engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps,
                      engine.was_step_applied()])
    engine.global_steps = 40
    engine.global_samples = 400
    for index in range(2):
        engine.backward(engine(batch(index)).square().mean())
        engine.step()
    return [found, engine.global_steps, engine.global_samples]


@case(stage=[0, 1, 2, 3], clip=[0.0, 1.0])
def norm_values(stage: int, clip: float) -> Any:
    engine = start(stage, gradient_clipping=clip)
    found = [engine.get_global_grad_norm()]
    train(engine, 2)
    norm = engine.get_global_grad_norm()
    return [*found, None if norm is None else float(norm)]


@case(stage=[0, 1, 2, 3])
def wrong_losses(stage: int) -> Any:
    engine = start(stage)
    out = engine(batch())
    return [
        raised(lambda: engine.backward(out)),
        raised(lambda: engine.backward(out.detach().sum())),
        raised(lambda: engine.backward(3.0)),
        raised(lambda: engine.backward(None)),
    ]


@case(stage=[0, 1, 2, 3])
def keywords_of_backward(stage: int) -> Any:
    engine = start(stage)
    loss = engine(batch()).square().mean()
    engine.backward(loss, retain_graph=True)
    engine.step()
    return whole(engine)


@case(stage=[0, 1, 2, 3])
def lr_and_groups(stage: int) -> Any:
    model = network()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0, "lr": 0.2},
    ]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config(stage))[0]
    train(engine, 2)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.01
    train(engine, 1)
    return [
        engine.get_lr(), engine.get_mom(), engine.get_type(), len(engine.optimizer.param_groups),
        [[g.get("weight_decay"), g.get("lr"), g.get("name")] for g in engine.optimizer.param_groups], whole(engine),
    ]


@case(stage=[0, 1, 2, 3], kind=["SGD", "RMSprop", "Adagrad", "AdamW"])
def moms(stage: int, kind: str) -> Any:
    params: dict[str, Any] = {"lr": 0.1, "momentum": 0.5} if kind in ("SGD", "RMSprop") else {"lr": 0.1}
    engine = start(stage, optimizer={"type": kind, "params": params}, zero_allow_untested_optimizer=True)
    train(engine, 2)
    return [engine.get_lr(), engine.get_mom(), engine.optimizer_name(), whole(engine)]


@case(stage=[0, 1, 2, 3], form=["callable", "object", "config", "lambda"])
def schedulers(stage: int, form: str) -> Any:
    model = network()
    more: dict[str, Any] = {}
    if form == "callable":
        more["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    settings = config(stage)
    if form == "config":
        settings["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    if form in ("object", "lambda"):
        settings.pop("optimizer")
        more["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.1)
        more["lr_scheduler"] = (
            torch.optim.lr_scheduler.StepLR(more["optimizer"], 1, 0.5)
            if form == "object"
            else torch.optim.lr_scheduler.LambdaLR(more["optimizer"], lambda step: 1 / (1 + step))
        )
    engine, _, _, scheduler = deepspeed.initialize(model=model, config=settings, **more)
    train(engine, 2)
    return [type(scheduler).__name__, scheduler.get_last_lr(), engine.get_lr(), engine.scheduler_name(),
            scheduler is engine.lr_scheduler]


@case(form=["callable", "object", "generator", "list", "empty"])
def parameters_given(form: str) -> Any:
    deepspeed.init_distributed("gloo")
    model = network()
    settings = config(1)
    more: dict[str, Any] = {}
    if form == "callable":
        settings.pop("optimizer")
        more["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    elif form == "object":
        settings.pop("optimizer")
        more["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.1)
        more["model_parameters"] = []
    else:
        more["model_parameters"] = {
            "generator": model.parameters(), "list": list(model[0].parameters()), "empty": [],
        }[form]
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings, **more)
    train(engine, 2)
    return [len(optimizer.param_groups), whole(engine)]


@case(stage=[0, 1, 2, 3])
def state_dicts(stage: int) -> Any:
    engine = start(stage)
    train(engine, 2)
    found = engine.module_state_dict()
    return [sorted(found), [list(value.shape) for value in found.values()]]


@case(stage=[0, 1, 2, 3], gather=[True, False])
def exported(stage: int, gather: bool) -> Any:
    engine = start(stage, zero={"stage3_gather_16bit_weights_on_model_save": gather})
    train(engine, 2)
    done = engine.save_16bit_model("out")
    path = Path("out/pytorch_model.bin")
    held = torch.load(path, weights_only=True) if path.exists() else None
    more = engine.save_16bit_model("out", "other.bin")
    return [done, held, more, sorted(each.name for each in Path("out").glob("*")) if Path("out").exists() else None]


@case(stage=[0, 1, 2, 3])
def frozen_exports(stage: int) -> Any:
    engine = start(stage, network(frozen=True), zero={"stage3_gather_16bit_weights_on_model_save": True})
    train(engine, 2)
    engine.save_16bit_model("out", exclude_frozen_parameters=True)
    return sorted(torch.load("out/pytorch_model.bin", weights_only=True))


@case(stage=[0, 1, 2, 3])
def unknown_attributes(stage: int) -> Any:
    model = network()
    model.hello = 3
    engine = start(stage, model)
    return [engine.hello, raised(lambda: engine.nothing_of_this_name), hasattr(engine, "nope")]


@case(stage=[0, 1, 2, 3])
def boundaries(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=3)
    found: list[Any] = []
    for index, last in enumerate([False, True, False, False, True]):
        engine.set_gradient_accumulation_boundary(last)
        engine.backward(engine(batch(index)).square().mean(), scale_wrt_gas=False)
        found.append([engine.is_gradient_accumulation_boundary()])
        if last:
            engine.step()
        found.append([engine.global_steps, engine.micro_steps])
    return [found, whole(engine)]


@case(ranks=2, stage=[0, 1])
def unsynced(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=2)
    with engine.no_sync():
        engine.backward(engine(batch(0)).square().mean())
    engine.step()
    engine.backward(engine(batch(1)).square().mean())
    engine.step()
    return [engine.global_steps, whole(engine)]


@case(stage=[0, 1, 2, 3])
def data_loaders(stage: int) -> Any:
    deepspeed.init_distributed("gloo")
    data = torch.utils.data.TensorDataset(torch.arange(20.0).view(5, 4), torch.arange(5.0))
    engine, _, loader, _ = deepspeed.initialize(model=network(), training_data=data, config=config(stage))
    shapes = [[list(part.shape) for part in each] for each in loader]
    second = engine.deepspeed_io(data, batch_size=3, route="eval")
    seen = [each[1].tolist() for each in second]
    return [len(loader), shapes, len(second), seen, raised(lambda: engine.deepspeed_io([1, 2]))]


@case()
def loader_with_parts() -> Any:
    deepspeed.init_distributed("gloo")
    data = list(range(7))
    loader = deepspeed.initialize(
        model=network(), training_data=torch.utils.data.TensorDataset(torch.tensor(data)),
        collate_fn=lambda items: [int(item[0]) for item in items],
        config=config(1, dataloader_drop_last=True))[2]
    return [len(loader), sorted(x for each in loader for x in each)[:0], [len(each) for each in loader]]


@case(stage=[0, 1, 2, 3])
def batch_sizes(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=2)
    found: list[Any] = [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
                        engine.gradient_accumulation_steps()]
    engine.set_train_batch_size(8)
    found += [engine.train_batch_size(), engine.gradient_accumulation_steps()]
    engine.set_train_micro_batch_size(3)
    found += [engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()]
    found.append(raised(lambda: engine.set_train_batch_size(7)))
    return found


@case(stage=[0, 1, 2, 3])
def accessors_again(stage: int) -> Any:
    engine = start(stage, steps_per_print=7, wall_clock_breakdown=False, gradient_clipping=0.5)
    names = ["zero_optimization", "zero_optimization_stage", "zero_optimization_partition_gradients",
             "zero_optimization_partition_weights", "fp16_enabled", "bfloat16_enabled", "dynamic_loss_scale", "loss_scale",
             "gradient_clipping", "optimizer_name", "scheduler_name", "steps_per_print", "wall_clock_breakdown",
             "postscale_gradients", "gradient_predivide_factor", "dump_state", "memory_breakdown",
             "zero_gather_16bit_weights_on_model_save", "zero_allow_untested_optimizer", "zero_cpu_offload",
             "optimizer_params", "scheduler_params", "train_batch_size", "sparse_gradients_enabled",
             "checkpoint_tag_validation_enabled", "load_universal_checkpoint", "graph_harvesting",
             "zero_offload_optimizer", "zero_offload_param", "get_data_types", "fp16_auto_cast",
             "fp16_master_weights_and_gradients", "amp_enabled", "swap_tensor_config", "aio_config",
             "initial_dynamic_scale", "dynamic_loss_scale_args", "flops_profiler_enabled", "log_level",
             "zero_grad_hooks", "communication_data_type"]
    found: dict[str, Any] = {}
    for name in names:
        try:
            value = getattr(engine, name)
            found[name] = str(value() if callable(value) else value)
        except Exception as error:
            found[name] = type(error).__name__
    return found


@case(stage=[0, 1, 2, 3])
def attributes(stage: int) -> Any:
    engine = start(stage)
    names = ["global_steps", "global_samples", "micro_steps", "skipped_steps", "local_rank", "global_rank", "world_size",
             "dp_world_size", "mp_world_size", "mpu", "enable_backward_allreduce", "has_moe_layers", "gas_boundary_ctr",
             "seq_dp_world_size", "sequence_parallel_size", "pipeline_parallelism", "eigenvalue", "progressive_layer_drop",
             "is_compiled", "gradient_average", "warn_unscaled_loss", "losses", "use_node_local_storage",
             "client_optimizer", "training_dataloader", "communication_data_type", "scale_wrt_gas",
             "use_ds_comm", "custom_load", "dist_backend", "has_sequence_parallel_params"]
    found = {name: str(getattr(engine, name, "absent")) for name in names}
    found["param_names"] = sorted(engine.param_names.values())
    found["config"] = [type(engine.config).__name__, engine.config.get("train_micro_batch_size_per_gpu")]
    found["device"] = str(engine.device)
    found["types"] = [isinstance(engine, nn.Module), type(engine.basic_optimizer).__name__]
    return found


@case(stage=[0, 1, 2, 3])
def optimizer_members(stage: int) -> Any:
    engine = start(stage)
    train(engine, 2)
    found: dict[str, Any] = {}
    for name in ["loss_scale", "cur_scale", "overflow", "dynamic_loss_scale", "clip_grad", "defaults", "param_names"]:
        found[name] = hasattr(engine.optimizer, name)
    groups = engine.optimizer.param_groups
    found["keys"] = sorted(set(groups[0]) - {"decoupled_weight_decay"})
    found["state"] = [sorted(state) for state in engine.optimizer.state.values()][:1]
    found["class"] = type(engine.optimizer).__name__
    return found


@case(stage=[0, 1, 2, 3])
def destroyed(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    engine.destroy()
    again = deepspeed.initialize(model=network(), config=config(stage))[0]
    return train(again, 1)


@case(stage=[0, 1, 2, 3])
def module_functions(stage: int) -> Any:
    engine = start(stage)
    counted = sum(getattr(p, "ds_numel", p.numel()) for p in engine.parameters())
    return [
        counted, [name for name, _ in engine.named_parameters()], len(list(engine.modules())),
        [name for name, _ in engine.named_modules()][:3], sorted(engine.state_dict()),
        [n for n, _ in engine.named_children()], engine.training, len(list(engine.buffers())),
    ]


@case(stage=[1, 2, 3])
def loss_backward_alone(stage: int) -> Any:
    engine = start(stage)
    for index in range(2):
        engine(batch(index)).square().mean().backward()
        engine.step()
    return whole(engine)


@case(stage=[0, 1, 2, 3])
def optimizer_step_by_hand(stage: int) -> Any:
    engine = start(stage)
    loss = engine(batch()).square().mean()
    engine.backward(loss)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return whole(engine)


@case(stage=[0, 1, 2, 3])
def several_losses(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=2)
    one, two = engine(batch(0)).square().mean(), engine(batch(1)).square().mean()
    engine.backward(one)
    engine.step()
    engine.backward(two)
    engine.step()
    return whole(engine)


@case(stage=[0, 1, 2, 3])
def one_forward_two_heads(stage: int) -> Any:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            held = self.body(x)
            return self.left(held), self.right(held)

    engine = start(stage, Heads())
    left, right = engine(batch())
    engine.backward(left.square().mean() + right.mean())
    engine.step()
    return whole(engine)


@case(kind=["both", "neither", "no_model", "bad_optimizer", "no_optimizer_z1", "missing_file", "bad_scheduler"])
def wrong_calls(kind: str) -> Any:
    from argparse import Namespace

    deepspeed.init_distributed("gloo")
    good = config(1)
    bare = {key: value for key, value in good.items() if key != "optimizer"}
    calls: dict[str, dict[str, Any]] = {
        "both": {"model": network(), "args": Namespace(deepspeed_config="x.json", local_rank=0), "config": good},
        "neither": {"model": network()},
        "no_model": {"config": good},
        "bad_optimizer": {"model": network(), "config": bare, "optimizer": 3},
        "no_optimizer_z1": {"model": network(), "config": bare},
        "missing_file": {"model": network(), "config": "nowhere.json"},
        "bad_scheduler": {"model": network(), "config": good | {"scheduler": {"type": "Nope", "params": {}}}},
    }
    return raised(lambda: deepspeed.initialize(**calls[kind]))


@case()
def configuration_kept() -> Any:
    given = config(1)
    before = copy.deepcopy(given)
    engine = deepspeed.initialize(model=network(), config=given)[0]
    return [given == before, engine.config == before]


@case(keyword=["config", "config_params", "args"])
def configuration_by(keyword: str) -> Any:
    import json
    from argparse import Namespace

    deepspeed.init_distributed("gloo")
    Path("x.json").write_text("// a comment\n" + json.dumps(config(2)))
    given = Namespace(deepspeed_config="x.json", local_rank=0) if keyword == "args" else "x.json"
    engine = deepspeed.initialize(model=network(), **{keyword: given})[0]
    return [engine.zero_optimization_stage(), train(engine, 1)]


@case(stage=[0, 1, 2, 3])
def managed_off(stage: int) -> Any:
    engine = start(stage, managed_gradient_accumulation=False, gradient_accumulation_steps=2, zero={"overlap_comm": False})
    for index in range(2):
        engine.backward(engine(batch(index)).square().mean())
    engine.step()
    return [engine.global_steps, whole(engine), raised(lambda: engine.set_gradient_accumulation_boundary(True))]


@case(stage=[0, 1, 2, 3])
def reload_states(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    failed = raised(lambda: engine.offload_states())
    engine.reload_states()
    return [failed, train(engine, 1)]


@case(stage=[0, 1, 2, 3])
def gradients_seen(stage: int) -> Any:
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = start(stage)
    engine.backward(engine(batch()).square().mean())
    weight = next(engine.module.parameters())
    held = safe_get_full_grad(weight)
    safe_set_full_grad(weight, torch.ones_like(held))
    engine.step()
    return [held, whole(engine)]


@case(stage=[0, 1, 2, 3], backend=["eager"])
def compiled(stage: int, backend: str) -> Any:
    engine = start(stage)
    before = engine.is_compiled
    engine.compile(backend=backend)
    return [before, engine.is_compiled, train(engine, 2)]


@case(ranks=2, stage=[0, 1, 2, 3])
def reduced_by_hand(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=1)
    engine.backward(engine(batch()).square().mean())
    engine.allreduce_gradients()
    engine.step()
    return whole(engine)


@case(ranks=2, stage=[0, 1, 2, 3])
def scaled_and_divided(stage: int) -> Any:
    engine = start(stage, gradient_accumulation_steps=2, prescale_gradients=stage < 2)
    for index in range(4):
        engine.backward(engine(batch(index)).square().mean())
        engine.step()
    return [whole(engine), engine.get_global_grad_norm() is None]


@case(ranks=2, stage=[0, 1, 2, 3])
def evaluated(stage: int) -> Any:
    engine = start(stage)
    train(engine, 1)
    engine.eval()
    with torch.no_grad():
        found = engine(batch(5))
    engine.train()
    return [found, train(engine, 1)]


@case(ranks=2, stage=[0, 1, 2, 3])
def consolidated(stage: int) -> Any:
    engine = start(stage, zero={"stage3_gather_16bit_weights_on_model_save": True})
    if stage < 3:
        return raised(engine._zero3_consolidated_16bit_state_dict)
    return engine._zero3_consolidated_16bit_state_dict()


@case(ranks=2, stage=[0, 1, 2, 3], coalesced=[False, True])
def two_backwards(stage: int, coalesced: bool) -> Any:
    engine = start(stage)
    for index in range(2):
        with engine.coalesce_grad_reduction() if coalesced else nullcontext():
            engine.backward(engine(batch(index)).square().mean())
            engine.backward(engine(batch(index + 7)).square().mean())
        engine.step()
    return [engine.global_steps, engine.micro_steps, whole(engine)]
