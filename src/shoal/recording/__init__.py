"""A record of what ranks say to each other: how often, how many bytes, for how long, and who came late."""

from __future__ import annotations

from shoal.recording.call import Call, over
from shoal.recording.recorder import Recorder, Watched
from shoal.recording.rows import CallStats, Lateness
from shoal.recording.traffic import Traffic, traffic

__all__ = ["Call", "CallStats", "Lateness", "Recorder", "Traffic", "Watched", "over", "traffic"]
