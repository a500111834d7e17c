"""The published files of samples."""

from shoal.compat.unsupported import unsupported_class, unsupported_function

_INSTEAD = "read them by a torch Dataset over numpy.memmap"
MMapIndexedDataset = unsupported_class("MMapIndexedDataset", _INSTEAD)
MMapIndexedDatasetBuilder = unsupported_class("MMapIndexedDatasetBuilder", _INSTEAD)
make_builder = unsupported_function("make_builder", _INSTEAD)
make_dataset = unsupported_function("make_dataset", _INSTEAD)
