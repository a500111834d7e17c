"""A channel is a queue whose far end is another rank.

    Sender.send ===== wire =====> [at most `AHEAD`] -> Receiver.receive

Neither end makes its caller wait for the network more than it has to. `send` posts a message (`shoal.pipeline.message` says
of what bytes) and returns; a thread lets go of the tensors as soon as they are sent. The far end takes in as many messages
as `expect` has announced, and at most `AHEAD` of them before they are asked for: by a thread, or where messages of one form
follow each other by asking for the next ones early, in the transport.

An abort comes in its turn: whoever waits has taken all before it. What was sent must not be written until it is gone:
`flush` says when. Each channel has a number of its own in its group, and on NCCL, which knows no tags, a group of its own.
"""

from __future__ import annotations

from shoal.pipeline.message import AHEAD, HEADER_BYTES, KNOWN, SMALL
from shoal.pipeline.receiver import Receiver
from shoal.pipeline.sender import Sender

__all__ = ["AHEAD", "HEADER_BYTES", "KNOWN", "SMALL", "Receiver", "Sender"]
