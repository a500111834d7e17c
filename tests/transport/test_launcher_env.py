"""A process finds its rank in the environment variables of each supported launcher."""

import pytest

from shoal.errors import LaunchError
from shoal.transport.launcher_env import RankInfo, discover, first_host

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node0",
            "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2",
         "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}


def test_a_process_without_a_launcher_is_a_single_rank():
    assert discover({"MASTER_ADDR": "stale", "PATH": "/bin"}) == RankInfo(rank=0, ranks=1, local_rank=0, local_ranks=1,
                                                                           source="alone")


def test_torchrun_variables_give_everything():
    place = discover(TORCHRUN)
    assert (place.rank, place.ranks, place.local_rank, place.local_ranks) == (3, 4, 1, 2)
    assert (place.address, place.port, place.one_host) == ("node0", 1234, False)


def test_torchrun_variables_take_precedence_over_mpi():
    assert discover({**OPEN_MPI, **TORCHRUN}).rank == 3


def test_the_given_port_is_used_when_only_the_address_is_known():
    assert discover({**TORCHRUN, "MASTER_PORT": ""}, port=4321).port == 4321


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"])
def test_a_missing_variable_is_named(name):
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(LaunchError, match=f"^{name} is not set, though torchrun"):
        discover(rest)


def test_a_world_of_one_needs_no_address_and_no_local_rank():
    assert discover({"RANK": "0", "WORLD_SIZE": "1"}).local_rank == 0


def test_a_variable_that_is_not_a_number_is_named():
    with pytest.raises(LaunchError, match="WORLD_SIZE: got 'two'; it must be a whole number"):
        discover({**TORCHRUN, "WORLD_SIZE": "two"})


def test_a_rank_beyond_the_world_size_is_rejected():
    with pytest.raises(LaunchError, match="RANK: got 4; with WORLD_SIZE=4 it must be below 4"):
        discover({**TORCHRUN, "RANK": "4"})


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA], ids=["Open MPI", "Hydra"])
def test_mpi_on_one_host_needs_no_address(variables):
    place = discover(variables)
    assert (place.rank, place.ranks, place.local_rank, place.one_host, place.address) == (1, 2, 1, True, None)


def test_mpi_on_several_hosts_requires_the_address():
    with pytest.raises(LaunchError, match=r"MASTER_ADDR is not set, and Open MPI started ranks on several hosts.*-x MASTER"):
        discover({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_mpi_on_several_hosts_uses_the_given_address():
    place = discover({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "node7"}, port=4321)
    assert (place.address, place.port) == ("node7", 4321)


def test_mpi_is_not_ignored_when_discovery_is_off():
    with pytest.raises(LaunchError, match=r"Open MPI started this process.*auto_mpi_discovery is off"):
        discover(OPEN_MPI, mpi=False)


def test_slurm_on_several_hosts_uses_the_first_host_as_master():
    place = discover(SLURM)
    assert (place.rank, place.ranks, place.local_rank, place.source) == (5, 8, 1, "Slurm")
    assert (place.address, place.port) == ("gpu03", 29500)


def test_slurm_on_one_host_needs_no_address():
    place = discover({**SLURM, "SLURM_STEP_NUM_NODES": "1"})
    assert (place.one_host, place.address, place.job) == (True, None, "slurm-9.0")


def test_a_slurm_batch_shell_is_a_single_process():
    assert discover({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}).source == "alone"


def test_mpich_under_slurm_is_read_as_mpich():
    assert discover({**SLURM, **HYDRA}).rank == 1


@pytest.mark.parametrize(("listing", "host"), [
    ("node7", "node7"), ("gpu[03-07,9],login", "gpu03"), ("a,b", "a"), ("r1n[1,3].site", "r1n1.site")])
def test_the_first_host_of_a_slurm_listing(listing, host):
    assert first_host(listing) == host


def test_a_slurm_list_without_a_host_is_rejected():
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NODELIST: got '\[1-2\]'; expected hosts such as"):
        first_host("[1-2]")
