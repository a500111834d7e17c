"""Every published name of the engine exists, and works or raises an error that says why it does not."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

import shoal
from shoal.engine import Engine, PipelineEngine
from shoal.errors import NotSupportedYet, PipelineError, ReleasedError, UsageError
from shoal.testing import run_ranks
from shoal.zero.unit_state import Phase

from ..pipeline.small import Block, Embed, Head, loss_fn
from ..zero.models import Plain, batch
from .trained import ADAMW, build, configured, loss, model, same, train, weights


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build(2, gradient_accumulation_steps=3, gradient_clipping=0.5, bf16={"enabled": True},
                 scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}}, steps_per_print=7)


def test_configuration_accessors_have_their_published_names(engine: Engine) -> None:
    assert engine.train_batch_size() == 6 and engine.train_micro_batch_size_per_gpu() == 2
    assert engine.gradient_accumulation_steps() == 3
    assert engine.get_batch_info() == (6, 2, 3)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert not engine.zero_gather_16bit_weights_on_model_save()
    assert engine.bfloat16_enabled() and not engine.fp16_enabled() and not engine.amp_enabled()
    assert not engine.dynamic_loss_scale() and engine.loss_scale() == 1
    assert engine.gradient_clipping() == 0.5
    assert engine.optimizer_name() == "AdamW" and engine.scheduler_name() == "WarmupLR"
    assert engine.steps_per_print() == 7
    assert not engine.dump_state() and not engine.wall_clock_breakdown() and not engine.memory_breakdown()
    assert engine.postscale_gradients() and engine.gradient_predivide_factor() == 1
    assert engine.communication_data_type == torch.bfloat16


def test_the_communication_dtype_of_an_engine_cannot_change(engine: Engine) -> None:
    engine.communication_data_type = torch.bfloat16
    with pytest.raises(UsageError, match=r"communication_data_type: got torch\.float32, but the buffers of this engine were "
                                         r"made for torch\.bfloat16"):
        engine.communication_data_type = torch.float32


def test_object_and_rank_accessors_have_their_published_names(engine: Engine) -> None:
    assert isinstance(engine.module, Plain) and engine.device == torch.device("cpu")
    assert engine.optimizer is not None and engine.basic_optimizer is engine.optimizer.optimizer
    assert isinstance(engine.basic_optimizer, torch.optim.AdamW) and engine.client_optimizer is None
    assert engine.lr_scheduler is not None and engine.training_dataloader is None
    assert (engine.global_rank, engine.local_rank, engine.world_size) == (0, 0, 1)
    assert (engine.dp_world_size, engine.mp_world_size, engine.mpu.get_data_parallel_world_size()) == (1, 1, 1)
    assert engine.param_names[engine.module.embed.weight] == "embed.weight"
    assert engine.enable_backward_allreduce and not engine.has_moe_layers
    assert engine.monitor is None and engine.timers is None and engine.flops_profiler is None
    assert engine.get_wall_clock_timers() == {}
    assert (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps) == (0, 0, 0, 0)
    assert engine.get_type() == ["AdamW"] and engine.get_mom() == [(0.9, 0.999)] and len(engine.get_lr()) == 1
    assert engine.optimizer.cur_scale == 1 and not engine.optimizer.overflow
    assert engine.get_global_grad_norm() is None and not engine.was_step_applied()


def test_get_mom_of_sgd_is_its_momentum() -> None:
    assert build(optimizer={"type": "SGD", "params": {"lr": 1, "momentum": 0.5}}).get_mom() == [0.5]


def test_config_is_a_copy_of_the_given_configuration() -> None:
    given = configured(zero_optimization=True, train_batch_size="auto")
    before = copy.deepcopy(given)
    engine = shoal.initialize(model=model(), config=given)[0]
    assert given == before
    assert engine.config == before and engine.config.get("train_batch_size") == "auto"
    assert engine.config is engine.config and engine.config is not given
    assert engine._config.zero_optimization.stage == 1


def test_missing_attributes_are_looked_up_in_the_module() -> None:
    engine = build()
    assert engine.hidden(batch(0, 0, 0)[0]).shape == (2, 5, 12)
    assert engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match="neither Engine nor its module Plain has an attribute 'nonsense'"):
        _ = engine.nonsense
    assert not hasattr(engine, "nonsense")


def test_the_engine_is_a_torch_module_around_the_model(engine: Engine) -> None:
    assert isinstance(engine, nn.Module)
    inner = dict(engine.module.named_parameters())
    assert dict(engine.named_parameters()) == {f"module.{name}": p for name, p in inner.items()}
    assert list(engine.parameters()) == list(inner.values())
    assert set(engine.state_dict()) == {f"module.{name}" for name in engine.module.state_dict()}
    assert set(engine.module_state_dict()) == set(engine.module.state_dict())
    assert set(engine.module_state_dict(prefix="a.")) == {f"a.{name}" for name in inner}
    engine.eval()
    assert not engine.module.training
    engine.train()
    assert engine.module.training


def test_a_state_dict_can_exclude_frozen_parameters() -> None:
    assert "embed.weight" in (frozen := build(1, "frozen")).module_state_dict()
    assert "embed.weight" not in frozen.module_state_dict(exclude_frozen_parameters=True)


def test_moving_or_casting_the_engine_is_refused_unless_it_is_a_no_op(engine: Engine) -> None:
    assert engine.to("cpu") is engine and engine.bfloat16() is engine
    for cast in (engine.float, engine.half, lambda: engine.to(torch.float64), lambda: engine.to("meta")):
        with pytest.raises(UsageError, match=r"the engine's model is torch\.bfloat16 on cpu and cannot become .*views of "
                                             r"the engine's buffers\. Convert the model before initialize"):
            cast()


def resize(stage: int) -> list[int]:
    """Return the number of optimizer steps that were taken after each microbatch, while the batch changes."""
    engine = build(stage, train_batch_size=4)
    done: list[int] = []

    def microbatch() -> None:
        engine.backward(loss(engine, len(done)))
        engine.step()
        done.append(engine.global_steps)

    for _ in range(3):
        microbatch()
    engine.set_train_batch_size(8)
    assert engine.get_batch_info() == (8, 2, 2)
    microbatch()
    with pytest.raises(UsageError, match="set_train_batch_size: called within an accumulation; call it right after a step"):
        engine.set_train_batch_size(4)
    for _ in range(3):
        microbatch()
    engine.set_train_micro_batch_size(1)
    assert engine.get_batch_info() == (4, 1, 2)
    with pytest.raises(UsageError, match=r"set_train_batch_size: got 3; it must be a multiple of 2 \(microbatches of 1 on 2 "
                                         r"data ranks\)"):
        engine.set_train_batch_size(3)
    with pytest.raises(UsageError, match="set_train_micro_batch_size: got 0; it must be 1 or more"):
        engine.set_train_micro_batch_size(0)
    return done


@pytest.mark.parametrize("stage", [0, 3])
def test_the_batch_size_can_change_between_steps(stage: int) -> None:
    assert run_ranks(2, resize, stage)[0] == [1, 2, 3, 3, 4, 4, 5]


def by_hand(stage: int) -> bool:
    """Reduce the gradients of unsynchronised backward passes by hand, and train as with automatic reduction."""
    usual, manual = build(stage, gradient_accumulation_steps=2), build(stage, gradient_accumulation_steps=2)
    manual.enable_backward_allreduce = False
    for step in range(3):
        for micro in range(2):
            for engine in (usual, manual):
                engine.backward(loss(engine, step, micro))
                if engine is manual and micro == 1:
                    manual.allreduce_gradients() if step else manual.buffered_allreduce_fallback()
                engine.step()
    with pytest.raises(UsageError, match="buffered_allreduce_fallback: grads is not supported"):
        manual.buffered_allreduce_fallback(grads=[])
    gap = max((a - b).abs().max().item() for a, b in zip(weights(usual).values(), weights(manual).values(), strict=True))
    return gap < (1e-7 if stage < 2 else 1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_allreduce_gradients_reduces_by_hand(stage: int) -> None:
    assert all(run_ranks(2, by_hand, stage))


def carry(stage: int, dtype: str) -> None:
    half: dict[str, Any] = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    source, target = build(0, "tied"), build(stage, "tied", **half)
    train(source, 2)
    state = source.module_state_dict()
    target.load_module_state_dict({"module": state, "other": 1})
    assert target.sharded is not None
    expected = weights(source)
    for unit in target.sharded.units:  # the masters took the whole precision
        master, span = unit.high_precision.tensor, unit.high_precision_range
        for part in unit.layout.parts(span):
            value = expected[unit.layout.slots[part.slot].name].flatten()[part.start:part.stop]
            assert torch.equal(master[part.offset:part.offset + part.stop - part.start], value)
    rounded = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert same(weights(target), {name: value.to(rounded).float() for name, value in expected.items()})
    train(target, 1)
    bad = {**state, "embed.weight": torch.zeros(3)}
    with pytest.raises(UsageError, match=r"load_module_state_dict: embed\.weight: got \(3,\), the model has \(17, 12\)\. "
                                         r"Nothing was loaded"):
        target.load_module_state_dict(bad)
    del bad["embed.weight"], bad["head.weight"]
    with pytest.raises(UsageError, match=r"embed\.weight: missing; .*extra: the model has no such tensor"):
        target.load_module_state_dict({**bad, "extra": torch.zeros(1)})
    target.load_module_state_dict({"head.weight": state["head.weight"], "extra": 0}, strict=False)
    assert torch.equal(weights(target)["embed.weight"], expected["embed.weight"].to(rounded).float())
    with pytest.raises(UsageError, match="load_module_state_dict: custom_load_fn is not supported"):
        target.load_module_state_dict(state, custom_load_fn=print)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_plain_state_dict_loads_into_any_stage_in_full_precision(stage: int) -> None:
    run_ranks(2, carry, stage, "fp32")
    run_ranks(2, carry, stage, "bf16")


def consolidate(folder: str) -> None:
    engine = build(3, "tied", bf16={"enabled": True})
    train(engine, 1)
    whole = weights(engine)
    for state in (engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict()):
        if engine.global_rank:
            assert state is None
        else:
            assert state is not None and set(state) == set(Plain().state_dict())
            assert all(value.dtype == torch.bfloat16 for value in state.values())
            assert all(torch.equal(state[name].float(), value) for name, value in whole.items())
    assert engine.save_fp16_model(folder) is False  # not asked for in the configuration
    asked = build(3, zero_optimization={"stage3_gather_16bit_weights_on_model_save": True})
    assert asked.zero_gather_16bit_weights_on_model_save()
    assert asked.save_fp16_model(folder, "weights.bin") is True


def test_the_weights_are_consolidated_on_rank_0(tmp_path: Path) -> None:
    run_ranks(2, consolidate, str(tmp_path))
    assert set(torch.load(tmp_path / "weights.bin")) == set(Plain().state_dict())


class Counting(Plain):
    """Holds an integer parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mean", torch.ones(2))


def test_a_consolidated_state_dict_holds_integers_and_buffers() -> None:
    engine = shoal.initialize(model=Counting(), config=configured(3))[0]
    state = engine.consolidated_state_dict()
    assert state is not None and set(state) == set(engine.module.state_dict(keep_vars=True))
    assert state["count"].tolist() == [0, 1, 2]


def pruned(stage: int) -> tuple[dict[str, Tensor] | None, dict[str, Tensor]]:
    """Prune a layer, which renames its weight, and step; return the consolidated state, and a pruned model's own."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    engine = shoal.initialize(model=whole, optimizer=optimizer, config=configured(stage))[0]
    with shoal.gathered(whole):
        torch.nn.utils.prune.l1_unstructured(whole[0], "weight", 0.5)
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    state = engine.consolidated_state_dict()
    with shoal.gathered(whole):
        return state, {name: value.detach().clone() for name, value in whole.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_consolidated_state_dict_has_the_names_that_parameters_have_now(stage: int) -> None:
    state, own = run_ranks(2, pruned, stage)[0]
    assert state is not None and sorted(state) == sorted(own) and "0.weight_orig" in own
    for name, value in own.items():
        torch.testing.assert_close(state[name], value)


def released() -> None:
    engine = build(3)
    block = engine.module.blocks[2]
    error = (r"rank \d: '\w+' read the data of parameter '\S+' \(.*\), which is sharded over 2 ranks and released at "
             r"present\. .* gather it first, on every rank: `with shoal\.gathered\(parameter\): \.\.\.`")
    for states in (engine.state_dict, engine.module_state_dict, block.state_dict):
        names = states()
        assert all(isinstance(value, Tensor) for value in names.values())
        with pytest.raises(ReleasedError, match=error):
            torch.save(names, io.BytesIO())
    with pytest.raises(ReleasedError, match=error):
        copy.deepcopy(engine.module)
    assert "up.weight" in dict(block.named_parameters()) and "released" in repr(block.up.weight)
    with shoal.gathered(engine.module):
        assert set(engine.module_state_dict()) == set(Plain().state_dict())


def test_values_of_a_state_dict_of_released_parameters_are_refused() -> None:
    run_ranks(2, released)


def copied(stage: int) -> None:
    engine = build(stage, "tied")
    train(engine, 1)
    with shoal.gathered(engine.module):
        average = copy.deepcopy(engine.module)
    before = {name: p.detach().clone() for name, p in average.named_parameters()}
    assert same(before, weights(engine)) and average.head.weight is average.embed.weight
    train(engine, 1, 1)
    assert same(before, dict(average.named_parameters())) and not same(before, weights(engine))
    average(batch(0, 0, 0)[0]).sum().backward()
    assert average.embed.weight.grad is not None
    assert pickle.loads(pickle.dumps(average))(batch(0, 0, 0)[0]).shape == (2, 5, 17)
    assert train(engine, 1, 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_deep_copy_of_the_model_is_an_independent_plain_model(stage: int) -> None:
    run_ranks(2, copied, stage)


def empty_cache() -> None:
    engine = build(3, zero_optimization={"stage3_prefetch_bucket_size": 1000})
    train(engine, 2)
    assert engine.sharded is not None
    engine.empty_partition_cache()
    assert all(unit.phase is Phase.RELEASED for unit in engine.sharded.units)
    assert train(engine, 1)


def test_empty_partition_cache_releases_every_unit() -> None:
    run_ranks(2, empty_cache)


def compiled(stage: int) -> None:
    plain, fast = build(stage), build(stage)
    assert not fast.is_compiled
    fast.compile(backend="aot_eager")
    fast.compile(backend="aot_eager")
    assert fast.is_compiled
    assert train(fast, 3) == pytest.approx(train(plain, 3), rel=1e-5)
    fast.destroy()
    assert not fast.is_compiled and "forward" not in vars(fast.module.blocks[0])
    with pytest.raises(NotSupportedYet, match="compile: schedule and compiled_autograd_enabled are not supported yet"):
        fast.compile(schedule=[])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stage", [1, 3])
def test_compile_compiles_blocks_and_leaves_collectives_outside(stage: int) -> None:
    run_ranks(2, compiled, stage)


def test_an_engine_has_one_trace_at_a_time(engine: Engine) -> None:
    unused = engine.trace()
    with engine.trace() as outer:
        with pytest.raises(UsageError, match="trace: this engine is traced already, and one trace may run at a time"):
            unused.__enter__()
        engine(batch(0, 0, 0)[0])
    assert "forward" in {event.lane for event in outer.events}
    with engine.trace() as later:
        engine(batch(0, 0, 0)[0])
    assert "forward" in {event.lane for event in later.events} and len(outer.events) == len(later.events)


def test_offload_states_is_not_supported_yet(engine: Engine) -> None:
    with pytest.raises(NotSupportedYet, match="offload_states: not supported yet: state rests where the"):
        engine.offload_states()
    with pytest.raises(NotSupportedYet, match="reload_states: not supported yet"):
        engine.reload_states()


def test_state_dicts_of_other_optimizers_and_groups_are_refused(engine: Engine) -> None:
    assert engine.optimizer is not None
    with pytest.raises(UsageError, match=r"optimizer\.load_state_dict: rank 0: got a dict of nothing; give what"):
        engine.optimizer.load_state_dict({})
    with pytest.raises(UsageError, match=r"optimizer\.load_state_dict: .* the dict has groups of \[1\] parameters, this"):
        engine.optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    with pytest.raises(UsageError, match=r"optimizer\.add_param_group: .* by initialize; .* requires_grad_\(False\)"):
        engine.optimizer.add_param_group({"params": []})


def test_optimizer_name_of_an_instance_is_its_class() -> None:
    net = model()
    config = configured()
    del config["optimizer"]
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    engine = shoal.initialize(model=net, optimizer=optimizer, config=config)[0]
    assert engine.client_optimizer is optimizer and type(engine.basic_optimizer) is torch.optim.RMSprop
    assert engine.optimizer_name() == "RMSprop" and engine.get_mom() == [0]
    assert ADAMW["type"] == build().optimizer_name()


def test_a_pipeline_engine_refuses_calls_of_single_passes() -> None:
    module = shoal.PipelineModule([Embed(), Block(), Head()], num_stages=1, loss_fn=loss_fn)
    engine: Any = shoal.initialize(model=module, config=configured())[0]
    assert isinstance(engine, PipelineEngine) and not isinstance(engine, Engine)
    for name, arguments in (("forward", (0,)), ("backward", (0,)), ("step", ()), ("scale", (0,)), ("no_sync", ()),
                            ("set_gradient_accumulation_boundary", (True,))):
        with pytest.raises(PipelineError, match=rf"{name}: a pipeline .*engine\.train_batch\(data_iter\)"):
            getattr(engine, name)(*arguments)


def masters(stage: int) -> None:
    engine = build(stage, "frozen", bf16={"enabled": True})
    train(engine, 2)
    own, wide = (engine.consolidated_state_dict(dtype) or {} for dtype in (None, torch.float32))
    with torch.random.fork_rng():
        plain = model("frozen")
    for name, parameter in plain.named_parameters() if engine.global_rank == 0 else ():
        assert own[name].dtype is torch.bfloat16 and wide[name].dtype is torch.float32
        assert torch.equal(wide[name].bfloat16(), own[name])
        assert torch.equal(wide[name], own[name].float()) is not parameter.requires_grad, "only these have masters"
    for unit in engine.sharded.trainable if engine.sharded is not None and engine.global_rank == 0 else ():
        flat = torch.zeros(unit.layout.size)
        for view, member in zip(unit.layout.views(flat), unit.members, strict=True):
            view.copy_(wide[member.name])
        assert unit.master is not None
        assert torch.equal(flat[:len(unit.master_range)], unit.master), "rank 0 has the first shard"


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_fp32_state_dict_holds_the_masters_of_16_bit_training(stage: int) -> None:
    run_ranks(2, masters, stage)
