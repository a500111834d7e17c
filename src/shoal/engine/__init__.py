"""The engine: what `initialize` builds around a model, and what it owns: optimizer, schedule, counters, checkpoints."""
