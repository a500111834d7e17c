"""The `shoal` command line: run ranks, show a configuration, inspect checkpoints, benchmark disks, draw schedules."""
