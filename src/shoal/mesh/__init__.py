"""The device mesh: five named axes, the groups of ranks along them, and which ranks replicate each parameter."""
