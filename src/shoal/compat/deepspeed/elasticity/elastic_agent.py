"""The published agent of elastic jobs."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "start the job by `shoal run --nodes MIN:MAX`, or by `deepspeed --elastic_training`"
DSElasticAgent = unsupported_class("DSElasticAgent", _INSTEAD)
