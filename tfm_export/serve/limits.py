"""What a server takes of a client, and what it tells one that sends something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfm_export.errors import ModelClosed, NumericError, Overloaded, RequestError


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a request may be.

    Attributes:
        body_bytes: of its body, also once it is decompressed.
        texts: sources in it.
        seconds: after which it has its answer; sources give what they have by then.
        hypotheses: beams, and hypotheses to return.
    """

    body_bytes: int = 1 << 20
    texts: int = 256
    seconds: float = 60.0
    hypotheses: int = 16


@dataclass
class Refusal(Exception):
    """A request that has no other answer than a status and problems.

    Attributes:
        status: of HTTP.
        problems: all that is wrong, a sentence each.
        headers: that the answer gets, such as Retry-After.
    """

    status: int
    problems: Sequence[str]
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(problem: Exception) -> Refusal | None:
    """What a client is told of an error; None for one that is not about its request, but about the server."""
    if isinstance(problem, Refusal):
        return problem
    if isinstance(problem, Overloaded):
        return Refusal(429, problem.problems, {"Retry-After": str(max(1, round(problem.retry_after)))})
    if isinstance(problem, ModelClosed):
        return Refusal(503, ["the model is being replaced or ends"], {"Retry-After": "1"})
    if isinstance(problem, RequestError):
        return Refusal(400, problem.problems)
    if isinstance(problem, NumericError):
        return Refusal(500, problem.problems)
    return None
