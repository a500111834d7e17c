"""The published object that gathers parameters at stage 3."""

from shoal.compat.optimizers import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
