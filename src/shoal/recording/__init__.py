"""A record of the collectives: calls, bytes, times and bandwidths, and the ranks that are late for them."""

from __future__ import annotations

from shoal.recording.call import Call, over
from shoal.recording.recorder import Recorder, Traffic, Watched, traffic
from shoal.recording.stats import CallStats, Lateness

__all__ = ["Call", "CallStats", "Lateness", "Recorder", "Traffic", "Watched", "over", "traffic"]
