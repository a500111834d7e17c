"""Planted faults: waits of Shoal, each of which a test removes to see that the late device notices.

A fault names a function and the source that it loses; `plant` compiles the function without it. Source that has changed, or
is there twice, is an error, so that the list follows the code.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["FAULTS", "Fault", "plant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One removed wait."""

    name: str
    where: str
    """`module:function` or `module:class.method`, below `shoal`."""
    removes: str
    leaves: str = "pass"
    """What stands there instead."""
    program: str
    """The program of `tests.late.programs` that must notice."""


FAULTS = (
    Fault(name="a copy stream does not wait for the compute stream", where="tier.streams:_SideStream.follow_compute",
          removes="self._stream.wait_for_current()", program="offloaded"),
    Fault(name="compute does not wait for weights copied to the device", where="tier.device_mirror:ResidentCopy.wait",
          removes="self._event.stream_wait()", program="published and offloaded"),
    Fault(name="the host writes weights whose copy is queued", where="tier.device_mirror:ResidentCopy.finish",
          removes="self._event.synchronize()", program="written on the host"),
    Fault(name="a step on the host reads gradients too early", where="tier.device_mirror:DeviceMirror.finish_commit",
          removes="event.synchronize()", program="offloaded"),
    Fault(name="a disk gets gradients too early", where="tier.device_mirror:DeviceMirror.finish_commit",
          removes="event.synchronize()", program="on disk"),
    Fault(name="a buffer of gradients is lent to two copies", where="tier.device_mirror:DeviceMirror.commit",
          removes="self._staged = self._buffers.borrow(target.nbytes)",
          leaves="self._buffers.give_back(self._buffers.borrow(target.nbytes)); self._staged = self._buffers._free[0]",
          program="on disk"),
    Fault(name="the host does not ask whether a gradient arrived", where="tier.device_mirror:_MirroredSpan.fetch",
          removes="CopiesEnded(self._mirror.finish_copies)", leaves="DONE", program="offloaded"),
    Fault(name="a step within backward reads gradients too early", where="tier.device_mirror:CopiesEnded.wait",
          removes="self._finish()", program="stepped in backward"),
    Fault(name="a mirror comes back before it has gone", where="tier.device_mirror:DeviceMirror.fetch",
          removes="self.finish_commit()", program="a mirror brought back"),
    Fault(name="a mirror is freed under its own copy", where="tier.device_mirror:DeviceMirror.commit",
          removes="self._arriving.wait()", program="a mirror freed unused"),
    Fault(name="host memory is written while a mirror reads it", where="tier.device_mirror:DeviceMirror.finish_copies",
          removes="arriving.finish()", program="a mirror written on the host"),
    Fault(name="a fetch does not wait for copies of weights", where="tier.elastic:CopiedSpan.fetch",
          removes="CopiesEnded(self._last.finish)", leaves="DONE", program="written on the host"),
    Fault(name="memory is used again under a dropped copy to it", where="tier.device_mirror:_Upload.__del__",
          removes="self._stream.keep(self._target)", program="dropped under a copy"),
    Fault(name="memory is used again under a dropped copy from it", where="tier.device_mirror:DeviceMirror.__del__",
          removes="d2h_stream(self._device).keep(self.tensor)", program="dropped under its copy down"),
    Fault(name="a staging buffer is used again too early", where="tier.streams:StagingBuffers.borrow",
          removes="event.synchronize()", program="stepped on the host"),
    Fault(name="compute does not wait for stepped weights", where="zero.optimizer_state:OptimizerState.receive_weights",
          removes="sent.stream_wait()", program="stepped on the host"),
    Fault(name="weights stepped in backward are read early", where="zero.optimizer_state:OptimizerState.receive_weights",
          removes="sent.stream_wait()", program="stepped in backward"),
    Fault(name="a step overwrites weights that are still read", where="optim.step_scheduler:StepScheduler.run",
          removes="h2d_stream(self._device).follow_compute()", program="read before a step on the host"),
    Fault(name="weights stepped in backward are given back early", where="zero.trainable_unit:TrainableUnit.end_step",
          removes="self.state.receive_weights()", program="destroyed in backward"),
    Fault(name="memory is used again under dropped stepped weights", where="zero.optimizer_state:OptimizerState.__del__",
          removes="self._staging.keep(self.separate_weights.tensor)", program="dropped in backward"),
    Fault(name="a collective is not waited for", where="transport.collectives:_Native.wait",
          removes="work.wait()", program="sharded"),
    Fault(name="weights are used before they are gathered", where="zero.unit:Unit._arrive",
          removes="self._handle.wait()", program="sharded"),
    Fault(name="a stream uses weights that arrived in another one", where="zero.weight_memory:WeightMemory.use",
          removes="follow(self._arrived_in, self.full)", program="gathered in two streams"),
    Fault(name="weights of another stream are freed too early", where="tier.elastic:ResizedBuffer.use",
          removes="record_use(self.full)", program="in several streams"),
    Fault(name="addends are summed before they arrive", where="transport.reduction:Reduction.wait",
          removes="self._transfer.wait()", program="sharded"),
    Fault(name="a sum is used before it is replicated", where="zero.gradient:Gradient.wait_reduced",
          removes="self._flight.handle.wait()", program="gradients read"),
    Fault(name="a step uses a sum that copies of the state still send", where="zero.gradient:Gradient.wait_reduced",
          removes="self._flight.handle.wait()", program="replicas"),
    Fault(name="a stepped part is kept before others publish theirs", where="zero.trainable_unit:TrainableUnit.publish",
          removes="self._publication().wait()", leaves="self._publication()", program="published and offloaded"),
    Fault(name="compressed gradients are added before they arrive", where="zero.unit_transport:_HandleWithCallback.wait",
          removes="self._transfer.wait()", program="compressed"),
    Fault(name="the step thread is not waited for", where="optim.step_scheduler:StepScheduler.finish_deferred",
          removes="self._changed.wait_for(lambda: self._num_stepped or self._failure is not None)",
          leaves="self._num_stepped = max(1, self._num_stepped)", program="on disk"),
    Fault(name="a stage uses a message before it arrives", where="pipeline.channel:Receiver.receive",
          removes="arrival.event.stream_wait()", program="pipeline"),
    Fault(name="a received message is freed under its reader", where="pipeline.channel:Receiver.receive",
          removes="self._stream.keep_for_compute(tensor)", program="pipeline"),
    Fault(name="a message is taken before it is received", where="pipeline.wire:WireTransfer.wait",
          removes="work.wait()", program="pipeline"),
    Fault(name="collectives of a tensor axis are not watched", where="tensor_parallel.axis:Axis._wait_for",
          removes="launched.add(work)", leaves="None", program="abandoned by a tensor rank"),
    Fault(name="a load overwrites weights whose copy is queued", where="engine.training_state:weights_to_load",
          removes="with fetched(unit.high_precision, 0, 0, changed=False):", leaves="if True:", program="loaded"),
    Fault(name="a tensor-parallel sum is used too early", where="tensor_parallel.axis:Axis._wait_for",
          removes="work.wait()", program="tensor parallel"),
    Fault(name="weights are gathered before their copy to the device", where="tier.device_mirror:ResidentCopy.following",
          removes="self._stream.following()", leaves="nullcontext()", program="offloaded"),
    Fault(name="weights are gathered before a disk has them", where="tier.device_mirror:DiskCopy.following",
          removes="self.finish()", program="sharded on disk"),
    Fault(name="weights are gathered before their copy from a disk", where="tier.device_mirror:DiskCopy.following",
          removes="self._stream.following()", leaves="nullcontext()", program="sharded on disk"),
    Fault(name="compute does not wait for what a disk delivered", where="tier.device_mirror:DiskCopy.wait",
          removes="event.stream_wait()", program="on disk"),
    Fault(name="compute does not wait for a disk", where="tier.device_mirror:DiskCopy.finish",
          removes="self._arriving.wait()", program="on disk"),
    Fault(name="what a disk delivered goes up too early", where="tier.streams:UploadRing.send",
          removes="after.stream_wait()", program="on disk"),
    Fault(name="a slot on its way up is filled again", where="tier.streams:UploadRing.send",
          removes="last.synchronize()", program="up through a ring"),
    Fault(name="a ring copies what is not computed yet", where="tier.streams:PinnedRing.download",
          removes="self._stream.use()", leaves="self._stream.following()", program="through a ring"),
    Fault(name="a ring does not keep what it copies", where="tier.streams:PinnedRing.download",
          removes="part, slot, into))", leaves="slot, slot, into))", program="through a ring"),
    Fault(name="a slot of a ring is read before it is full", where="tier.streams:PinnedRing._empty_oldest",
          removes="event.synchronize()", program="through a ring"),
    Fault(name="a checkpoint is written before it is staged", where="checkpoint.rank_file:Staging._stage",
          removes="ring.finish()", program="staged"),
    Fault(name="a thread saves what a stream has not computed", where="checkpoint.rank_file:Staging._stage_later",
          removes="with within(stream):", leaves="if True:", program="saved in a stream"),
    Fault(name="what is staged is released under its copy", where="checkpoint.rank_file:Staging._stage",
          removes="self._ring(piece.data.device).finish()", program="staged and released"),
    Fault(name="the order of collectives is not compared", where="transport.native_watch:IssuedOrder.add",
          removes="self._checksum = zlib.crc32(name.encode(), self._checksum)", program="issued in other orders"),
    Fault(name="collectives of a device are not watched", where="transport.native_watch:LaunchedCollectives.add",
          removes="self._running[self._launches] = work", program="abandoned"),
    Fault(name="broadcasts of a device are not watched", where="transport.collectives:Communicator.broadcast",
          removes='over(call, self._launch(f"broadcast of {what}", launch).wait)', leaves="launch().wait()",
          program="abandoned in a broadcast"),
    Fault(name="parts of a state dict are not watched", where="transport.collectives:Communicator._wait_for_message",
          removes="self._launch(_STATE_DICT, launch).wait()", leaves="launch().wait()", program="abandoned by a collector"),
    Fault(name="messages of a device are not watched", where="pipeline.wire:WireTransfer.add",
          removes="self._launched.add(work)", leaves="0", program="abandoned by a sender"),
    Fault(name="collectives without their rank are not aborted", where="transport.native_watch:LaunchedCollectives._abort",
          removes="group._get_backend(current_device()).abort()", leaves="pass", program="abandoned"),
)


def plant(fault: Fault) -> None:
    """Remove a wait in this process."""
    module_name, _, path = fault.where.partition(":")
    module = importlib.import_module(f"shoal.{module_name}")
    *owners, name = path.split(".")
    owner = vars(module)[owners[0]] if owners else module
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(vars(owner)[name])))
    assert source.count(fault.removes) == 1, f"{fault.where} has no longer, or not only once, {fault.removes!r}"
    mutated = textwrap.indent(source.replace(fault.removes, fault.leaves), "    ")
    made = _compiled(f"def outer(__class__):\n{mutated}\n    return {name}", fault.where, module)(owner)
    assert isinstance(made, FunctionType)
    if owners:
        setattr(owner, name, made)
        return
    for other in [each for key, each in sys.modules.items() if key.startswith("shoal")]:
        if vars(other).get(name) is vars(module)[name] and other is not module:
            setattr(other, name, made)
    setattr(module, name, made)


def _compiled(source: str, where: str, module: ModuleType) -> Any:
    """Return the one function of `source`, which sees the names of `module`."""
    found: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{source}", where, "exec"), vars(module), found)
    return found["outer"]
