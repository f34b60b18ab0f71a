"""Kinds of users, from the source: lengths of requests, pauses, and targets of their class."""

from typing import NamedTuple


class Persona(NamedTuple):
    """Ranges of the values of such a user; one value of each is drawn for a user."""

    name: str
    context_tokens: tuple[int, int]
    generation_tokens: tuple[int, int]
    think_s: tuple[float, float]


PERSONAS = (
    Persona("chatbot", (256, 1024), (50, 150), (0.1, 0.5)),
    Persona("coding", (1024, 4096), (100, 500), (0.2, 1.0)),
    Persona("document", (2048, 8192), (200, 800), (0.3, 1.5)),
)

THINK_SWING = (0.8, 1.2)
"""Each pause is the user's own, times a factor in this range."""


class QosClass(NamedTuple):
    """A class of service. Targets are for P95 and P99 of its requests."""

    name: str
    target_p95_ms: float
    target_p99_ms: float
    priority: int
    """Higher is served first."""

    share: float
    """The share of all users."""


QOS_CLASSES = (
    QosClass("interactive", 50, 100, 3, 0.15),
    QosClass("responsive", 100, 200, 2, 0.35),
    QosClass("batch", 1000, 5000, 1, 0.50),
)

QOS_BY_NAME = {qos.name: qos for qos in QOS_CLASSES}

COMPLIANCE_TO_MEET = 0.95
"""A class meets its target when this share of its requests stays within the P95 target."""
