"""LAMB under its published name."""

from shoal.compat.deepspeed.ops.lamb.fused_lamb import FusedLamb as FusedLamb
