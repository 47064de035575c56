"""Latency and bandwidth from measurements: the line t = alpha + beta n through timed messages.

Weighted least squares with relative errors, since small messages take microseconds and large ones milliseconds.
Source of the standard errors: any text on linear regression, such as G. Seber and A. Lee, Linear Regression Analysis
(2003), section 3.3: s^2 (X^T W X)^-1.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from labkit.collectives.groups import Group, endpoint
from labkit.collectives.point_to_point import recv, send
from labkit.collectives.rooted import barrier


@dataclass(frozen=True)
class Link:
    """A fitted link: `alpha` seconds a message and `beta` seconds a byte, each with its standard error."""

    alpha: float
    beta: float
    alpha_error: float
    beta_error: float

    @property
    def bandwidth_gbit_s(self) -> float:
        """Gbit/s that a long message comes to."""
        return 8e-9 / self.beta


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit alpha and beta to messages of `sizes` bytes that took `seconds`; at least three of two sizes."""
    if len(sizes) != len(seconds) or len(sizes) < 3 or len(set(sizes)) < 2:
        raise ValueError(
            f"fit_link: {len(sizes)} sizes and {len(seconds)} times; give 3 or more of each, of 2 sizes or more"
        )
    if min(seconds) <= 0:
        raise ValueError("fit_link: a time is not above 0; measure it again")
    times = np.asarray(seconds)
    matrix = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=np.float64)], axis=1) / times[:, None]
    scale = np.linalg.norm(matrix, axis=0)  # bytes and ones are far apart
    solution, *_ = np.linalg.lstsq(matrix / scale, np.ones(len(sizes)), rcond=None)
    residual = matrix / scale @ solution - 1
    variance = residual @ residual / (len(sizes) - 2)
    errors = np.sqrt(np.diag(variance * np.linalg.inv((matrix / scale).T @ (matrix / scale)))) / scale
    alpha, beta = solution / scale
    return Link(float(alpha), float(beta), float(errors[0]), float(errors[1]))


def ping_pong(sizes: Sequence[int], *, repeats: int = 20, group: Group = None) -> list[float]:
    """Median seconds that one message of each size takes between the group's first two ranks, half a round trip.

    Called on every rank of the group; the others wait. The result is the first rank's, [] elsewhere.
    """
    end = endpoint(group)
    if end.size < 2:
        raise ValueError("ping_pong needs a group of at least 2 ranks")
    medians = []
    for nbytes in sizes:
        message = torch.zeros(nbytes, dtype=torch.uint8)
        barrier(group)
        trips = []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            if end.place == 0:
                send(message, group=group, group_dst=1)
                recv(message, group=group, group_src=1)
            elif end.place == 1:
                recv(message, group=group, group_src=0)
                send(message, group=group, group_dst=0)
            trips.append((time.perf_counter() - begin) / 2)
        medians.append(statistics.median(trips[2:]))
    barrier(group)
    return medians if end.place == 0 else []
