"""`deepspeed.elasticity`: batch sizes that many numbers of ranks can divide."""

from shoal.compat.deepspeed.elasticity.elastic_agent import DSElasticAgent as DSElasticAgent
from shoal.compat.deepspeed.elasticity.elasticity import (
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)

__all__ = ["DSElasticAgent", "ElasticityConfigError", "ElasticityError", "ElasticityIncompatibleWorldSize",
           "compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]
