"""Configuration: reading a source, resolving aliases, validating values, recording origins, reporting every problem.

A `Section` models one JSON object. Each package declares its sections in its own `settings.py`, and `shoal.engine.schema`
composes them into one `Config`.
"""
