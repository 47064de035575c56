"""The course of the learning rate, a formula of the step alone, so that resuming needs nothing else.

Source of the cosine: Loshchilov and Hutter (2017), "SGDR: Stochastic Gradient Descent with Warm Restarts",
arXiv:1608.03983, equation 5, one period to 0; of the warmup: Goyal et al. (2017), arXiv:1706.02677, section 2.2.
"""

import math


def learning_rate_factor(step: int, *, total: int, schedule: str, warmup: int) -> float:
    """What the learning rate is multiplied by in a step, counted from 0.

    It rises by equal amounts over the `warmup` steps, the last of which has 1; then it stays there ("constant"), or
    falls towards 0 after `total` steps, along a line ("linear") or half a cosine ("cosine").
    """
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return 1.0 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
