"""How far an iteration is."""

from __future__ import annotations


class StepClock:
    """Counts the steps of one iteration.

    A step begins when its minibatch is delivered. Stopping is final, and safe in a finalizer: it
    sets one attribute.
    """

    def __init__(self) -> None:
        self._running = True
        self.delivered = 0

    def deliver(self) -> None:
        """Begin the next step."""
        self.delivered += 1

    def stop(self) -> None:
        """No more steps: the epoch ended, or its loop was left."""
        self._running = False

    def is_running(self) -> bool:
        """Whether the iteration may still go on."""
        return self._running
