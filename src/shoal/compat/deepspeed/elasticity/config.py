"""The errors of elasticity, under their published path."""

from shoal.compat.deepspeed.elasticity.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)

__all__ = ["ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize"]
