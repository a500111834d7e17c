"""Writers of single files past the page cache."""

from shoal.compat.unsupported import unsupported_class

_INSTEAD = "save by engine.save_checkpoint, which writes past the page cache"
FastFileWriter = unsupported_class("FastFileWriter", _INSTEAD)
FastFileWriterConfig = unsupported_class("FastFileWriterConfig", _INSTEAD)
