"""The exceptions that users see, as one tree.

    ShoalError
    ├── ConfigError            the configuration is wrong: key path, what it got, what is allowed
    │   ├── NotSupportedYet    a published key that a later version will honour
    │   └── UnknownKind        a kind of attention that the configuration names and does not exist (a NotServed too)
    ├── UsageError             a call in the wrong place or with the wrong object
    │   ├── DataEnded          an iterator ended within a step
    │   ├── ReleasedError      the data of a sharded parameter was read outside a gather
    │   ├── OptimizerError     an optimizer that cannot step on slices
    │   ├── NotServed          a kind of attention that does not exist here (a NotImplementedError too)
    │   └── ScheduleError      a pipeline schedule that no ranks can carry out
    ├── RanksDisagree          ranks built or did different things
    ├── CollectiveFailed       a collective broke: rank, unit, collective, and the transport's message
    │   ├── CollectiveTimeout  a collective did not finish in time
    │   └── PeerFailed         another rank failed and published why
    ├── PipelineError          a step of a pipeline cannot go on, or a call that a pipeline has no place for
    │   └── StageFailed        another stage failed and published why
    ├── GuardError             loss or gradients are outliers, and skipping samples does not help
    │   └── GuardRewind        they are: the job is to restart from its last copy
    ├── LossScaleError         gradients overflow even at the smallest loss scale
    ├── CheckpointError        a checkpoint is missing, damaged, or does not fit
    │   ├── CheckpointDamaged  its bytes are not those that were saved, or files are missing
    │   └── VaultTooLarge      a node has no room for copies in memory
    ├── TierError              state on disk could not be read or written
    └── LaunchError            ranks could not be started, or one of them failed
        └── HostsError         a hostfile, filter or list of hosts is wrong (a ValueError too)

A message says what, where, got, allowed, and how to fix it. `assert` is for our own mistakes.
"""

from __future__ import annotations


class ShoalError(Exception):
    """The root of every error that this library raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """The configuration is wrong."""


class NotSupportedYet(ConfigError):
    """A published configuration key that a later version will honour."""


class UsageError(ShoalError, RuntimeError):
    """A call in the wrong place or with the wrong object."""


class DataEnded(UsageError):
    """An iterator of data ended within a step."""


class ReleasedError(UsageError):
    """The data of a released (sharded) parameter was read where it cannot be gathered."""


class OptimizerError(UsageError):
    """An optimizer that cannot step on slices of parameters."""


class NotServed(UsageError, NotImplementedError):
    """A kind of attention that no layout or kernel has."""


class UnknownKind(ConfigError, NotServed):
    """A kind of attention that the configuration names, and that does not exist."""


class ScheduleError(UsageError):
    """A pipeline schedule that is incomplete, or whose ranks deadlock."""


class RanksDisagree(ShoalError, RuntimeError):
    """Ranks built different models, or took different paths."""


class CollectiveFailed(ShoalError, RuntimeError):
    """A collective broke: a peer died, or the connection to it did."""


class CollectiveTimeout(CollectiveFailed):
    """A collective did not finish in time."""


class PeerFailed(CollectiveFailed):
    """Another rank of the job failed; the message is that rank's."""


class PipelineError(ShoalError, RuntimeError):
    """A step of a pipeline cannot go on, or a call that a pipeline has no place for."""


class StageFailed(PipelineError):
    """Another stage of the pipeline failed; the message is that stage's."""


class GuardError(ShoalError, RuntimeError):
    """The loss or the gradients are outliers, and skipping samples does not help; nor would a restart."""


class GuardRewind(GuardError):
    """The loss or the gradients are outliers: the job is to restart from its last copy."""


class LossScaleError(ShoalError, RuntimeError):
    """Gradients overflow even at the smallest loss scale."""


class CheckpointError(ShoalError, RuntimeError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class CheckpointDamaged(CheckpointError):
    """The bytes of a checkpoint are not those that were saved, or some of its files are missing or short."""


class VaultTooLarge(CheckpointError):
    """A node has no room for copies of the state in memory, nor would it after a restart."""


class TierError(ShoalError, RuntimeError):
    """State on disk could not be read or written."""


class LaunchError(ShoalError, RuntimeError):
    """Ranks could not be started, or one of them failed."""


class HostsError(LaunchError, ValueError):
    """A hostfile, a filter or a list of hosts is wrong."""
