"""A thread sends the messages of a host to the launcher, so that neither the agent nor heartbeats wait for a slow reader.

Only ranks wait for the reader, once `AHEAD` messages are unsent. After `give_up` they do not wait either: further output is
lost, and the launcher is told how much, should it read again.
"""

from __future__ import annotations

import threading
from collections import deque

from shoal.launch.protocol import Beat, Channel, Message, Output, Status

__all__ = ["Outbox"]

AHEAD = 1000
"""Messages that have not left, from which on the output of ranks waits."""
GIVEN_UP = 1.0
"""Seconds that a launcher which is given up has to take the last messages: it may be there again."""


class Outbox:
    """Sends messages over a channel, in the order in which they come."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: deque[Message] = deque()
        self._sending = False
        self._given_up = False
        self._lost = 0
        """Lines of ranks that were not taken since the last messages left."""
        self._news = threading.Condition()
        threading.Thread(target=self._send, name="outbox", daemon=True).start()

    def send(self, message: Message) -> None:
        """Have a message sent. Output of a rank waits for its turn; a beat is not needed where other messages wait."""
        with self._news:
            match message:
                case Beat() if self._messages:
                    return
                case Output():
                    self._news.wait_for(lambda: self._given_up or len(self._messages) < AHEAD)
                    if len(self._messages) >= AHEAD:
                        self._lost += 1
                        return
                case _:
                    pass
            self._messages.append(message)
            self._news.notify_all()

    def give_up(self) -> None:
        """Wait for the launcher no more: it is gone, or reads nothing."""
        with self._news:
            self._given_up = True
            self._news.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until all messages have left, at most so long, and hardly once the launcher is given up."""
        with self._news:
            self._news.wait_for(lambda: not (self._messages or self._sending),
                                min(seconds, GIVEN_UP) if self._given_up else seconds)

    def _send(self) -> None:
        while True:
            with self._news:
                self._sending = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._messages)
                messages, self._sending = [*self._messages], True
                self._messages.clear()
                if self._lost:
                    messages.append(Status(text=f"{self._lost} lines of its ranks are lost, because the launcher did not "
                                                "read them"))
                    self._lost = 0
            self._channel.send(*messages)
