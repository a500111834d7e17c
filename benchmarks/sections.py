"""The sections of docs/measurements.md that a script makes: the command of each, about how long it takes, what it
measures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SECTIONS", "Section"]

CORE = ("src/shoal/zero", "src/shoal/transport", "src/shoal/engine", "src/shoal/optim", "src/shoal/precision",
        "src/shoal/native")
"""What a step runs through; the AdamW step is native."""
PEERS = ("benchmarks/systems.py", "benchmarks/catalogue.py")
"""Where the peers and their settings are."""
HOOKS = ("benchmarks/ddp_hooks.py",)
TIERS = (*CORE, "src/shoal/tier")
ONEBIT = (*CORE, "src/shoal/onebit")
SCHEDULES = "examples/gpt"
"""Where the configurations are whose schedules of compression the trainings use."""
COMPRESSED = (*ONEBIT, *HOOKS, *PEERS, SCHEDULES)
MANY = ("ddp ddp-fp16 ddp-powersgd-1-ordered ddp-powersgd-4-ordered torch-pipeline-zero-bubble shoal-pipeline-zb-h2-all "
        "shoal-1 onebit-adam-1 zeroone-adam-1")
"""The systems that are measured at more sequences a step too, where less of it is communication."""
SURVIVAL = ("src/shoal/resilience", "src/shoal/launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page: `command` after `python benchmarks/`, in minutes on two idle cores, and the code that it
    measures."""

    command: str
    minutes: int
    code: tuple[str, ...]
    needs: str = ""

    @property
    def watched(self) -> tuple[str, ...]:
        """The code, and the script that measures it."""
        return tuple(dict.fromkeys((f"benchmarks/{self.command.split()[0]}", *self.code)))


SECTIONS = {
    "tuning-2": Section(command="tuning.py", minutes=20, code=PEERS, needs="make peers"),
    "zero-2": Section(command="zero.py --rounds 6", minutes=10, code=(*CORE, *PEERS),
                      needs="make peers; after tuning-2"),
    "floor": Section(command="zero.py --systems ddp plain plain-shard deepspeed-0 deepspeed-1 deepspeed-3 fsdp2-kept "
                             "shoal-0 shoal-3 --rounds 6 --steps 5 --out out/benchmarks/floor.json", minutes=5,
                     code=(*CORE, *PEERS), needs="make peers; after tuning-2"),
    "zero-4": Section(command="zero.py --ranks 4 --rounds 3 --steps 4 --systems ddp fsdp2 fsdp2-kept "
                              "shoal-1 shoal-2 shoal-3 shoal-1-sockets shoal-2-sockets shoal-3-sockets "
                              "--best out/benchmarks/tuning-2.json",
                      minutes=8, code=(*CORE, *PEERS), needs="after tuning-2"),
    "layers": Section(command="layers.py --rounds 2", minutes=6, code=CORE),
    "memory": Section(command="memory.py", minutes=12, code=(*CORE, "benchmarks/memory_rank.py")),
    "startup": Section(command="startup.py", minutes=3, code=("src/shoal",)),
    "hosts-startup": Section(command="hosts_startup.py", minutes=2, code=("src/shoal/launch",),
                             needs="root, iproute2, openssh-server"),
    "optimizer": Section(command="optimizer.py", minutes=1, code=("src/shoal/native",), needs="make peers"),
    "pipeline": Section(command="pipeline.py --rounds 9", minutes=3, code=("src/shoal/pipeline", "src/shoal/transport")),
    "slow-network": Section(command="slow_network.py --rates 100mbit 200mbit 1gbit unlimited --rounds 2 --seconds 6 "
                                    "--systems ddp ddp-fp16 ddp-bf16 ddp-powersgd-1-ordered ddp-powersgd-4-ordered "
                                    "ddp-local torch-pipeline-1f1b torch-pipeline-zero-bubble shoal-pipeline-1f1b "
                                    "shoal-pipeline-zb-h2-all --plot",
                            minutes=20, code=(*CORE, *PEERS, *HOOKS, "src/shoal/pipeline"), needs="root, iproute2"),
    "communication": Section(command="communication.py --rounds 3 --seconds 6 --plot", minutes=45, code=COMPRESSED,
                             needs="root, iproute2"),
    **{f"communication-{count}": Section(
        command=f"communication.py --rounds 3 --seconds 6 --microbatch {count} --systems {MANY} --out "
                f"out/benchmarks/communication-{count}.json", minutes=minutes, code=COMPRESSED,
        needs="root, iproute2")
       for count, minutes in ((8, 15), (32, 30))},
    "compression": Section(command="compression.py", minutes=1, code=("src/shoal/onebit", "src/shoal/native")),
    "convergence": Section(command="convergence.py --plot", minutes=220,
                           code=(*ONEBIT, *HOOKS, "benchmarks/ddp_train.py", SCHEDULES),
                           needs="nothing idle: no time is measured; runs that are there are not repeated"),
    "choice": Section(command="choice.py", minutes=1, code=COMPRESSED, needs="after communication and convergence"),
    "tensor_parallel": Section(command="tensor_parallel.py", minutes=2,
                               code=("src/shoal/tensor_parallel", "src/shoal/transport")),
    "attention": Section(command="attention.py", minutes=10, code=("src/shoal/attention", "src/shoal/native")),
    "sequence": Section(command="sequence.py", minutes=2,
                        code=("src/shoal/sequence_parallel", "src/shoal/attention", "src/shoal/transport")),
    "faults": Section(command="faults.py --faults 203 --quiet 3 --stages 0 1 2 3 2-offload 3-offload 2-mesh", minutes=80,
                      code=SURVIVAL),
    "node-loss": Section(command="node_loss.py --machines", minutes=6, code=SURVIVAL,
                         needs="root, iproute2, openssh-server"),
    "survival": Section(command="survival.py --rounds 6", minutes=10, code=SURVIVAL),
    "goodput": Section(command="goodput.py --every 3 --peer-every 5", minutes=50, code=SURVIVAL),
    "transformer_layer": Section(command="transformer_layer.py --compile", minutes=6,
                                 code=("src/shoal/nn", "src/shoal/native")),
    "activations": Section(command="activations.py", minutes=4, code=("src/shoal/activation", *TIERS)),
    "disk": Section(command="disk.py out/benchmarks/disk", minutes=5, code=("src/shoal/tier",), needs="fio"),
    "tiers": Section(command="tiers.py --rounds 5 --seconds 3", minutes=20,
                     code=(*TIERS, "benchmarks/replay.py", "benchmarks/tiers_peer.py"),
                     needs="make peers, libaio headers"),
    "sparse": Section(command="sparse.py", minutes=8, code=(*CORE, "src/shoal/sparse"), needs="root, iproute2"),
    "sparse-adam": Section(command="sparse.py --stages 1 2 --optimizers Adam --out out/benchmarks/sparse-adam.json",
                           minutes=4,
                           code=(*CORE, "src/shoal/sparse"), needs="root, iproute2"),
}
"""By the name of the markers on the page, which is that of the file in out/benchmarks."""
