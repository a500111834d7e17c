"""`deepspeed.launcher.multinode_runner`: the command line of each multi-node back end.

The lines are those that are published, and may be subclassed (`MultiNodeRunner`). `runner.py` asks them
which options they refuse; `shoal run` starts the hosts.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.compat.deepspeed.launcher.constants import (
    IMPI_LAUNCHER,
    MPICH_LAUNCHER,
    MVAPICH_LAUNCHER,
    MVAPICH_TMP_HOSTFILE,
    OPENMPI_LAUNCHER,
    PDSH_LAUNCHER,
    PDSH_MAX_FAN_OUT,
    SLURM_LAUNCHER,
)

__all__ = ["LAUNCHER_CLASSES", "IMPIRunner", "MPICHRunner", "MVAPICHRunner", "MultiNodeRunner", "OpenMPIRunner",
           "PDSHRunner", "SlurmRunner", "make_runner"]

Resources = Mapping[str, Sequence[int]]


class MultiNodeRunner(ABC):
    """One back end: whether it is there, what it refuses, and the command that starts a job with it."""

    def __init__(self, args: Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def backend_exists(self) -> bool:
        """Return whether the back end is installed."""

    @abstractmethod
    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> Any:
        """Return the command for the slots of each host; `environment` is that in which it will run."""

    @property
    def name(self) -> str:
        """The name of the back end."""
        return self.__class__.__name__

    def add_export(self, key: str, var: str) -> None:
        """Give all ranks a variable."""
        value = var.strip()
        self.exports[key.strip()] = f'"{value}"' if any(mark in value for mark in " ;&|()<>") else value

    def parse_user_args(self) -> list[str]:
        """Return the script's arguments, as the back end passes them on."""
        return self.args.user_args

    def validate_args(self) -> None:  # noqa: B027  a back end without limits keeps this
        """Raise ValueError for options that the back end cannot honour."""

    def validate_active_resources(self, active_resources: Resources) -> None:  # noqa: B027
        """Raise ValueError for slots that the back end cannot honour."""

    def python(self) -> list[str]:
        """Return the words that run the script: python and -m, unless the options say otherwise."""
        if self.args.no_python:
            return []
        return [sys.executable, "-u", *(["-m"] if self.args.module else [])]

    def launcher_args(self) -> list[str]:
        """Return the options that the user has for the back end."""
        return shlex.split(self.args.launcher_args)


def _quoted(word: str) -> str:
    """Return a word with spaces as the shells of other hosts read it: in double quotes, those within it escaped."""
    return '"' + word.replace('"', '\\"') + '"'


class PDSHRunner(MultiNodeRunner):
    """Starts one launcher on each host over ssh."""

    def backend_exists(self) -> bool:
        return shutil.which("pdsh") is not None

    @property
    def name(self) -> str:
        return PDSH_LAUNCHER

    def parse_user_args(self) -> list[str]:
        return [_quoted(word) if " " in word else word for word in self.args.user_args]

    def get_cmd(self, environment: dict[str, str],
                active_resources: Resources) -> tuple[list[str], list[str], dict[str, str]]:
        """Return the command, the command that ends the job, and the environment."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            given = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{given} -p {self.args.ssh_port}".strip()
        shell = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", ",".join(active_resources), *self.launcher_args()]
        launch = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={self.world_info_base64}",
                  "--node_rank=%n", f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"]
        launch += [f"--{name}" for name in ("no_python", "module", "no_local_rank") if getattr(self.args, name)]
        if self.args.save_pid:
            launch += ["--save_pid", str(os.getpid())]
        launch.append(f"--enable_each_rank_log={self.args.enable_each_rank_log}")
        if self.args.bind_cores_to_rank:
            launch.append("--bind_cores_to_rank")
        if self.args.bind_core_list is not None:
            launch.append(f"--bind_core_list={self.args.bind_core_list}")
        before = [f"source {self.args.venv_script};"] if self.args.venv_script is not None else []
        before += ["".join(f"export {name}={value}; " for name, value in self.exports.items()), f"cd {Path.cwd()};"]
        end = [*shell, "pkill -f ", "\\ ".join(launch[:4])]
        return [*shell, *before, *launch, self.user_script, *self.user_arguments], end, environment


class _MPIRunner(MultiNodeRunner):
    """The back ends that start every rank themselves: all hosts of `resource_pool` have equally many slots."""

    label = "MPI"
    """The product, in errors."""

    def __init__(self, args: Namespace, world_info_base64: str, resource_pool: Mapping[str, int | Sequence[int]]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def validate_args(self) -> None:
        if self.args.include or self.args.exclude:
            raise ValueError(f"{self.name} backend does not support worker include/exclusion")
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"{self.name} backend does not support limiting num nodes/gpus")

    def ranks(self) -> int:
        """Return the number of ranks."""
        return sum(self._counts())

    def per_host(self) -> int:
        """Return the ranks of each host. Raises ValueError where they differ."""
        counts = sorted(set(self._counts()))
        if len(counts) > 1:
            raise ValueError(f"{self.label} requires same number of devices per node; got {counts}")
        return counts[0]

    def _counts(self) -> list[int]:
        """Return the slots of each host, which is given their number or a list of them."""
        return [slots if isinstance(slots, int) else len(slots) for slots in self.resource_pool.values()]

    def variables(self) -> dict[str, str]:
        """Return the variables of the job that all ranks share."""
        return {"MASTER_ADDR": str(self.args.master_addr), "MASTER_PORT": str(self.args.master_port),
                "WORLD_SIZE": str(self.ranks()), "LOCAL_SIZE": str(self.per_host())}


class OpenMPIRunner(_MPIRunner):
    """Open MPI's mpirun."""

    label = "Open MPI"

    def __init__(self, args: Namespace, world_info_base64: str, resource_pool: Mapping[str, int | Sequence[int]]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def backend_exists(self) -> bool:
        return shutil.which("ompi_info") is not None

    @property
    def name(self) -> str:
        return OPENMPI_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> list[str]:
        words = ["mpirun", "-n", str(self.ranks()), "-hostfile", self.args.hostfile,
                 "--mca", "btl", "^openib"]
        given = self.launcher_args()
        if "btl_tcp_if_include" not in given:
            words += ["--mca", "btl_tcp_if_include", "eth0"]
        exports = [word for name, value in self.exports.items() for word in ("-x", f"{name}={value}")]
        return [*words, *given, *exports, *self.python(), self.user_script, *self.user_arguments]


class MPICHRunner(_MPIRunner):
    """MPICH's mpirun; a helper gives each rank its variables."""

    label = "MPICH"

    def backend_exists(self) -> bool:
        return shutil.which("mpirun") is not None

    @property
    def name(self) -> str:
        return MPICH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> list[str]:
        words = ["mpirun", "-n", str(self.ranks()), "-ppn", str(self.per_host()),
                 *self.launcher_args()]
        words += [word for name, value in self.exports.items() for word in ("-genv", f"{name}={value}")]
        words += [word for name, value in self.variables().items() for word in ("-genv", name, value)]
        helper = str(Path(__file__).with_name("launcher_helper.py"))
        options = [f"--{name}" for name in ("module", "no_python", "no_local_rank") if getattr(self.args, name)]
        return [*words, "-hosts", ",".join(self.resource_pool), sys.executable, "-u", helper, "--launcher", MPICH_LAUNCHER,
                *options, self.user_script, *self.user_arguments]


class IMPIRunner(_MPIRunner):
    """Intel MPI's mpirun, with one block of variables for each rank."""

    label = "Intel MPI"

    def backend_exists(self) -> bool:
        return shutil.which("mpirun") is not None

    @property
    def name(self) -> str:
        return IMPI_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> list[str]:
        local = self.per_host()
        words = ["mpirun", "-ppn", str(local), *self.launcher_args()]
        for name, value in {**self.exports, **self.variables(), "I_MPI_PIN": "0"}.items():
            words += ["-genv", name, value]
        words += ["-hosts", ",".join(self.resource_pool)]
        script = [*self.python(), self.user_script, *self.user_arguments]
        for rank in range(self.ranks()):
            own = ["-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(rank % local)]
            words += [*([":"] if rank else []), *own, *script]
        return words


class SlurmRunner(_MPIRunner):
    """Slurm's srun."""

    def backend_exists(self) -> bool:
        return shutil.which("sinfo") is not None

    @property
    def name(self) -> str:
        return SLURM_LAUNCHER

    def validate_args(self) -> None:
        """Accept all: Slurm takes filters."""

    def validate_active_resources(self, active_resources: Resources) -> None:
        """Raise ValueError where hosts have different numbers of slots."""
        counts = {host: len(slots) for host, slots in active_resources.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"slurm backend needs the same slot count on every host, got {counts}; take hosts with as many "
                             f"slots, by --include or --exclude")

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> list[str]:
        self.validate_active_resources(active_resources)
        words = ["srun", "-n", str(sum(map(len, active_resources.values()))), *self.launcher_args()]
        if self.args.include or self.args.exclude:
            words += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        elif self.args.num_nodes > 0:
            words += ["--nodes", str(self.args.num_nodes)]
        if self.args.num_gpus > 0:
            words += ["--gpus-per-node", str(self.args.num_gpus)]
        exports = "".join(f",{name}={value}" for name, value in self.exports.items())
        return [*words, f"--export=ALL{exports}", *self.python(), self.user_script, *self.user_arguments]


class MVAPICHRunner(_MPIRunner):
    """MVAPICH2-GDR's mpirun, with a hostfile of its own."""

    label = "mvapich"

    def __init__(self, args: Namespace, world_info_base64: str, resource_pool: Mapping[str, int | Sequence[int]]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        for name, value in (("MV2_SMP_USE_CMA", "0"), ("MV2_DEBUG_SHOW_BACKTRACE", "1"), ("MV2_SUPPORT_DL", "1"),
                            ("MV2_ENABLE_AFFINITY", "0"), ("MV2_INTER_ALLGATHER_TUNING", "5"), ("MV2_CUDA_USE_NAIVE", "0")):
            self.add_export(name, value)

    def backend_exists(self) -> bool:
        return shutil.which("mpiname") is not None

    @property
    def name(self) -> str:
        return MVAPICH_LAUNCHER

    def get_cmd(self, environment: dict[str, str], active_resources: Resources) -> list[str]:
        local = self.per_host()
        Path(MVAPICH_TMP_HOSTFILE).write_text("".join(f"{host}\n" for host in self.resource_pool))
        words = ["mpirun", "-np", str(self.ranks()), "-ppn", str(local), "--hostfile", MVAPICH_TMP_HOSTFILE,
                 *self.launcher_args()]
        exports = [word for name, value in self.exports.items() for word in ("-env", f"{name}={value}")]
        return [*words, *exports, *self.python(), self.user_script, *self.user_arguments]


LAUNCHER_CLASSES: dict[str, type[MultiNodeRunner]] = {
    PDSH_LAUNCHER: PDSHRunner, OPENMPI_LAUNCHER: OpenMPIRunner, MPICH_LAUNCHER: MPICHRunner, IMPI_LAUNCHER: IMPIRunner,
    MVAPICH_LAUNCHER: MVAPICHRunner, SLURM_LAUNCHER: SlurmRunner}
"""The back ends by the names that `--launcher` takes."""


def make_runner(args: Namespace, world_info_base64: str, active_resources: Resources) -> MultiNodeRunner:
    """Return the back end that `--launcher` names, in any case. Raises NotImplementedError for an unknown name."""
    kind = LAUNCHER_CLASSES.get(args.launcher.lower())
    if kind is None:
        raise NotImplementedError(f"Unknown launcher {args.launcher}; choose {', '.join(LAUNCHER_CLASSES)}")
    return kind(args, world_info_base64, active_resources) if issubclass(kind, _MPIRunner) else kind(args, world_info_base64)
