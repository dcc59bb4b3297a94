"""The law with the least Huber loss in logs, from a grid of starts, and the same for the hundreds of a bootstrap.

Descents are made together, as arrays, by damped Newton steps, each until its next step would gain nothing. A
descent with scipy's least_squares takes 20 ms, and all 800 of a forecast 0.4 s here (2026-11-23, scipy 1.17, one core).
A test goes on from their feet with scipy's L-BFGS.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

DELTA = 1e-3  # of the Huber loss, in log L: arXiv:2203.15556, appendix D.3
# Where published exponents lie, .28 to .37 (arXiv:2203.15556, arXiv:2404.10102), and twice as far to either side.
PULL_AT, PULL_WIDTH = 0.35, 0.15
EXPONENTS = (0.02, 2.0)  # bounds; the grid of arXiv:2203.15556 ends at 2
LEAST_TERM = -12.0  # log of a term that is as good as none
DESCENTS = 64  # of the grid's starts, the best, that are gone down from
GAIN = 1e-10  # a step that gains less, as a part of the loss, ends a descent
STEPS = 100_000  # the slowest of 10,000 draws of ladders with 0.5 to 10% noise took 12,000
Form = Literal["both", "params", "tokens"]


class Problem(NamedTuple):
    """log L of some runs as a function of theta = (log E, log of each term at the ladder's middle, each exponent).

    Terms are counted from the ladder's middle in log N and log D: from N = D = 1, as they are written, a change of an
    exponent moves a term by a factor e^20, and a descent crawls along that valley.
    """

    x: np.ndarray  # float64[powers, points]: log N and log D, from their means
    centre: np.ndarray  # float64[powers]
    target: np.ndarray  # float64[points]: log L
    form: Form
    starts: np.ndarray  # float64[starts, 1 + 2 powers]
    losses: np.ndarray  # float64[starts, points]: Huber losses of the starts
    width: float = PULL_WIDTH  # of the pull on each exponent

    @classmethod
    def of(cls, points: Sequence[Any], form: Form) -> "Problem":
        """The problem of these loss_law.Points."""
        names = {"both": ("params", "tokens"), "params": ("params",), "tokens": ("tokens",)}[form]
        x = np.log([[getattr(point, name) for point in points] for name in names])
        centre, target = x.mean(axis=1), np.log([point.loss for point in points])
        x = x - centre[:, None]
        starts = grid(len(x), float(np.exp(target.min())), float(np.exp(target.mean())))
        off = np.logaddexp.reduce(log_terms(starts, x), axis=1) - target
        return cls(x, centre, target, form, starts, huber(off / DELTA))

    @property
    def powers(self) -> int:
        """Exponents."""
        return len(self.x)

    def best(self) -> np.ndarray:
        """theta of the least loss, all runs counted alike: the lowest foot from the best of the grid."""
        weights, pull = np.ones(len(self.target)), np.full(self.powers, PULL_AT)
        order = np.argsort(self.start_losses(weights[None], pull[None])[0], kind="stable")[:DESCENTS]
        alike = lambda values: np.tile(values, (len(order), 1))
        thetas, losses = self.descend_each(self.starts[order], alike(weights), alike(pull), alike(self.target))
        return thetas[np.argmin(losses)]

    def start_losses(self, weights_RP: np.ndarray, pulls: np.ndarray) -> np.ndarray:
        """float64[draws, starts]: the loss of each start of the grid."""
        off = (self.starts[None, :, 1 + self.powers :] - pulls[:, None]) / self.width
        return weights_RP @ self.losses.T + 0.5 * (off**2).sum(-1)

    @property
    def bounds(self) -> np.ndarray:
        """float64[2, 1 + 2 powers]: least and most of each number."""
        levels, powers = 1 + self.powers, self.powers
        top = float(self.target.max())  # no term is more than the loss
        return np.array([[LEAST_TERM] * levels + [EXPONENTS[0]] * powers, [top] * levels + [EXPONENTS[1]] * powers])

    def best_each(
        self, theta: np.ndarray, weights: np.ndarray, pulls: np.ndarray, moved: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """float64[draws, 1 + 2 powers]: theta of the least loss under each row of weights and pulls.

        Each draw goes down from `theta` and from its best start of the grid. moved: float64[draws, points], added to
        log L in each.
        """
        targets = self.target + np.broadcast_to(moved, weights.shape)
        nearest = self.starts[np.argmin(self.start_losses(weights, pulls), axis=1)]
        starts = np.concatenate([np.tile(theta, (len(weights), 1)), nearest])
        alike = lambda values: np.tile(values, (2, 1))
        thetas, losses = self.descend_each(starts, alike(weights), alike(pulls), alike(targets))
        (first, second), (one, other) = np.split(thetas, 2), np.split(losses, 2)
        return np.where((one <= other)[:, None], first, second)

    def descend_each(
        self, thetas: np.ndarray, weights: np.ndarray, pulls: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(thetas, their losses) at their feet, by damped Newton steps of all draws together; one that is there leaves.

        The curvature is that of the parabola that touches the Huber loss from above (reweighted least squares), so
        that a whole step seldom overshoots; one that does is taken back and damped more. A number that its slope
        presses against a bound stays there.
        """
        least, most = self.bounds
        thetas = np.clip(thetas, least, most)
        losses, slopes, curves = self.model(thetas, weights, pulls, targets)
        damping, left = np.full(len(thetas), 1e-3), np.arange(len(thetas))
        for _ in range(STEPS):
            now, slope, curve = thetas[left], slopes[left], curves[left]
            free = ~((now <= least) & (slope > 0) | (now >= most) & (slope < 0))
            diagonal = np.where(free, damping[left][:, None] * np.einsum("rii->ri", curve), 1.0)
            damped = curve * (free[:, :, None] & free[:, None]) + diagonal[:, :, None] * np.eye(len(least))
            steps = np.linalg.solve(damped, (slope * free)[:, :, None])[:, :, 0]
            tried = np.clip(now - steps, least, most)
            moved, found = tried - now, self.model(tried, weights[left], pulls[left], targets[left])
            foretold = -(slope * moved).sum(1) - 0.5 * np.einsum("rp,rpq,rq->r", moved, curve, moved)
            gained = losses[left] - found[0]
            ended = (np.abs(foretold) <= GAIN * (1 + losses[left])) & (damping[left] < 0.1) | (damping[left] > 1e12)
            better = gained > 0
            thetas[left[better]] = tried[better]
            for kept, new in zip((losses, slopes, curves), found):
                kept[left[better]] = new[better]
            times = np.where(better & (gained > foretold / 4), 0.1, np.where(better, 2.0, 4.0))
            damping[left] = np.maximum(damping[left] * times, 1e-12)
            left = left[~ended]
            if not len(left):
                break
        if len(left):
            raise RuntimeError(f"{len(left)} of {len(thetas)} descents did not converge in {STEPS} steps")
        return thetas, losses

    def model(
        self, thetas: np.ndarray, weights: np.ndarray, pulls: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(losses [draws], their gradients [draws, p], positive curvatures [draws, p, p]), p = 1 + 2 powers.

        Each row of thetas has its own weights and targets, float64[draws, points], and pulls.
        """
        powers = self.powers
        parts = log_terms(thetas, self.x)
        fitted = np.logaddexp.reduce(parts, axis=1)
        shares = np.exp(parts - fitted[:, None])
        off, pulls_off = (fitted - targets) / DELTA, (thetas[:, 1 + powers :] - pulls) / self.width
        slopes = np.concatenate([shares, -shares[:, 1:] * self.x], axis=1) / DELTA  # of each point, [draws, p, points]
        losses = (huber(off) * weights).sum(1) + 0.5 * (pulls_off**2).sum(1)
        gradients = np.einsum("rpn,rn->rp", slopes, np.clip(off, -1, 1) * weights)
        gradients[:, 1 + powers :] += pulls_off / self.width
        curves = (slopes * (weights / np.maximum(np.abs(off), 1))[:, None]) @ slopes.swapaxes(1, 2)
        places = np.arange(1 + powers, 1 + 2 * powers)
        curves[:, places, places] += 1 / self.width**2
        return losses, gradients, curves

    def terms(self, theta: np.ndarray) -> tuple[float, float, float, float, float]:
        """E, A, B, alpha, beta as they are written, counted from N = D = 1; 0 for what the form does not have."""
        powers = self.powers
        factors = np.exp(theta[1 : 1 + powers] + theta[1 + powers :] * self.centre)
        found = dict(zip({"both": "AB", "params": "A", "tokens": "B"}[self.form], factors))
        found |= dict(zip({"both": "ab", "params": "a", "tokens": "b"}[self.form], theta[1 + powers :]))
        A, B, alpha, beta = (float(found.get(name, 0.0)) for name in "ABab")
        return float(np.exp(theta[0])), A, B, alpha, beta

    def off(self, theta: np.ndarray) -> np.ndarray:
        """What the points lie off the law, in log L, float64[points]."""
        return self.target - np.logaddexp.reduce(log_terms(theta[None], self.x)[0])


def log_terms(thetas: np.ndarray, x: np.ndarray) -> np.ndarray:
    """float64[draws, 1 + powers, points]: log of E and of each term at each point."""
    levels = 1 + len(x)
    terms = np.empty((len(thetas), levels, x.shape[1]))
    terms[:, 0] = thetas[:, :1]
    terms[:, 1:] = thetas[:, 1:levels, None] - thetas[:, levels:, None] * x
    return terms


def grid(powers: int, least: float, mean: float) -> np.ndarray:
    """float64[starts, 1 + 2 powers]: E as a part of the least loss, how the terms share the rest, and exponents."""
    parts, exponents = (0.02, 0.2, 0.4, 0.6, 0.8, 0.95), (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)
    shares = (0.1, 0.3, 0.5, 0.7, 0.9) if powers == 2 else (1.0,)
    found = []
    for part in parts:
        rest = mean - part * least
        for share in shares:
            split = (share, 1 - share)[:powers]
            levels = [math.log(part * least), *(math.log(rest * each) for each in split)]
            for power in np.ndindex(*(len(exponents),) * powers):
                found.append([*levels, *(exponents[i] for i in power)])
    return np.array(found)


def huber(off: np.ndarray) -> np.ndarray:
    """Huber losses with delta 1; their slopes are `off` between -1 and 1."""
    size = np.abs(off)
    return np.where(size <= 1, 0.5 * off * off, size - 0.5)
