"""The command line: start ranks, look at configurations, look at checkpoints."""
