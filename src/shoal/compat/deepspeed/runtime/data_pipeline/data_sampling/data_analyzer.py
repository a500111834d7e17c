"""The published analysis of a dataset's difficulty."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "compute the metric of each sample before training, and sort by it"
DataAnalyzer = unsupported_class("DataAnalyzer", _INSTEAD)
DistributedDataAnalyzer = unsupported_class("DistributedDataAnalyzer", _INSTEAD)
