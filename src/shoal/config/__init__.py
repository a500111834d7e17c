"""Reading a configuration: sources, spellings, origins and messages; what the keys mean is said beside their owners.

A section of the JSON is a `Section`; it lives in the `settings.py` of the part that it configures, and `shoal.schema`
composes the sections into one `Config`.
"""
