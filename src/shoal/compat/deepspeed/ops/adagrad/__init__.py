"""Adagrad under its published name."""

from shoal.compat.deepspeed.ops.adagrad.cpu_adagrad import DeepSpeedCPUAdagrad as DeepSpeedCPUAdagrad
