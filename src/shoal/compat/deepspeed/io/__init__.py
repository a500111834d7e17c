"""Writers of single files."""

from shoal.compat.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(("FastFileWriter", "FastFileWriterConfig"),
                                                          f"{__name__}.fast_file_writer"))
