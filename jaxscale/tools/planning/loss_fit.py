"""Fits of loss laws by the Huber loss of log L from a grid of starts, for the runs and for hundreds of bootstrap draws.

All descents run together as arrays, by damped Newton steps, until a step would no longer reduce the loss. The 800
descents of a forecast take 0.4 s; one descent with scipy's least_squares takes 20 ms (2026-11-23, scipy 1.17, one
core). A test checks the optima by continuing with scipy's L-BFGS.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

DELTA = 1e-3  # delta of the Huber loss, in log L: arXiv:2203.15556, appendix D.3
# Mean and width of the prior on exponents: published exponents are .28 to .37 (arXiv:2203.15556, arXiv:2404.10102).
PULL_AT, PULL_WIDTH = 0.35, 0.15
EXPONENTS = (0.02, 2.0)  # bounds of exponents; the grid of arXiv:2203.15556 ends at 2
MIN_TERM = -12.0  # lower bound for the log of a term, where it is negligible
DESCENTS = 64  # number of grid starts to descend from
GAIN = 1e-10  # relative gain below which a descent ends
MAX_STEPS = 100_000  # the slowest of 10,000 draws from ladders with 0.5 to 10% noise took 12,000
Form = Literal["both", "params", "tokens"]
NAMES = {"both": ("params", "tokens"), "params": ("params",), "tokens": ("tokens",)}  # variables of each form


class Problem(NamedTuple):
    """Fit of log L with the parameters theta = (log E, log of each term, each exponent).

    Terms are relative to the mean log N and log D of the ladder, so that Newton steps converge quickly. With terms at
    N = D = 1, a small change of an exponent would scale a term by up to e^20.
    """

    x: np.ndarray  # float64[powers, points]: log N and log D minus their means
    centre: np.ndarray  # float64[powers]: means of log N and log D
    target: np.ndarray  # float64[points]: log L
    form: Form
    starts: np.ndarray  # float64[starts, 1 + 2 powers]
    losses: np.ndarray  # float64[starts, points]: Huber loss of each start at each point
    width: float = PULL_WIDTH  # width of the prior on each exponent

    @classmethod
    def of(cls, points: Sequence[Any], form: Form) -> "Problem":
        """Returns the problem for a sequence of loss_law.Point."""
        x = np.log([[getattr(point, name) for point in points] for name in NAMES[form]])
        centre, target = x.mean(axis=1), np.log([point.loss for point in points])
        x = x - centre[:, None]
        starts = grid(len(x), float(np.exp(target.min())), float(np.exp(target.mean())))
        off = np.logaddexp.reduce(log_terms(starts, x), axis=1) - target
        return cls(x, centre, target, form, starts, huber(off / DELTA))

    @property
    def powers(self) -> int:
        """Number of exponents."""
        return len(self.x)

    def best(self) -> np.ndarray:
        """Returns the best optimum reached from the best grid starts, with equal weights."""
        weights, pull = np.ones(len(self.target)), np.full(self.powers, PULL_AT)
        order = np.argsort(self.start_losses(weights[None], pull[None])[0], kind="stable")[:DESCENTS]
        tiled = lambda values: np.tile(values, (len(order), 1))
        thetas, losses = self.descend_each(self.starts[order], tiled(weights), tiled(pull), tiled(self.target))
        return thetas[np.argmin(losses)]

    def start_losses(self, weights_RP: np.ndarray, pulls: np.ndarray) -> np.ndarray:
        """Returns the loss of each draw at each grid start, as float64[draws, starts]."""
        off = (self.starts[None, :, 1 + self.powers :] - pulls[:, None]) / self.width
        return weights_RP @ self.losses.T + 0.5 * (off**2).sum(-1)

    @property
    def bounds(self) -> np.ndarray:
        """Bounds of theta, float64[2, 1 + 2 powers]."""
        levels, powers = 1 + self.powers, self.powers
        top = float(self.target.max())  # no term exceeds the loss
        return np.array([[MIN_TERM] * levels + [EXPONENTS[0]] * powers, [top] * levels + [EXPONENTS[1]] * powers])

    def best_each(
        self, theta: np.ndarray, weights: np.ndarray, pulls: np.ndarray, moved: np.ndarray | float = 0.0
    ) -> np.ndarray:
        """Returns the optimal theta of each draw, as float64[draws, 1 + 2 powers].

        Starts from `theta` and the best grid start. pulls: prior means. moved: log L offsets, float64[draws, points].
        """
        targets = self.target + np.broadcast_to(moved, weights.shape)
        nearest = self.starts[np.argmin(self.start_losses(weights, pulls), axis=1)]
        starts = np.concatenate([np.tile(theta, (len(weights), 1)), nearest])
        tiled = lambda values: np.tile(values, (2, 1))
        thetas, losses = self.descend_each(starts, tiled(weights), tiled(pulls), tiled(targets))
        (first, second), (one, other) = np.split(thetas, 2), np.split(losses, 2)
        return np.where((one <= other)[:, None], first, second)

    def descend_each(
        self, thetas: np.ndarray, weights: np.ndarray, pulls: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (thetas, losses) at the optima. Damped Newton steps run for all draws at once.

        The curvature is that of reweighted least squares, which majorises the Huber loss, so a full step seldom
        overshoots. If a step overshoots, it is rejected and the damping is increased.
        """
        thetas = np.clip(thetas, *self.bounds)
        losses, slopes, curves = state = self.model(thetas, weights, pulls, targets)
        damping, active = np.full(len(thetas), 1e-3), np.arange(len(thetas))
        for _ in range(MAX_STEPS):
            current = (thetas[active], slopes[active], curves[active], damping[active])
            candidates, predicted = newton_step(*current, self.bounds)
            found = self.model(candidates, weights[active], pulls[active], targets[active])
            gained = losses[active] - found[0]
            is_flat = (np.abs(predicted) <= GAIN * (1 + losses[active])) & (damping[active] < 0.1)
            ended = is_flat | (damping[active] > 1e12)
            better = gained > 0
            for values, new in zip((thetas, *state), (candidates, *found)):
                values[active[better]] = new[better]
            factor = np.where(better & (gained > predicted / 4), 0.1, np.where(better, 2.0, 4.0))
            damping[active] = np.maximum(damping[active] * factor, 1e-12)
            active = active[~ended]
            if not len(active):
                return thetas, losses
        raise RuntimeError(f"{len(active)} of {len(thetas)} fits did not converge in {MAX_STEPS} steps")

    def model(
        self, thetas: np.ndarray, weights: np.ndarray, pulls: np.ndarray, targets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns losses [draws], gradients [draws, p] and curvatures [draws, p, p], where p = 1 + 2 * powers."""
        powers = self.powers
        parts = log_terms(thetas, self.x)
        fitted = np.logaddexp.reduce(parts, axis=1)
        shares = np.exp(parts - fitted[:, None])
        off, pulls_off = (fitted - targets) / DELTA, (thetas[:, 1 + powers :] - pulls) / self.width
        slopes = np.concatenate([shares, -shares[:, 1:] * self.x], axis=1) / DELTA  # per point: [draws, p, points]
        losses = (huber(off) * weights).sum(1) + 0.5 * (pulls_off**2).sum(1)
        gradients = np.einsum("rpn,rn->rp", slopes, np.clip(off, -1, 1) * weights)
        gradients[:, 1 + powers :] += pulls_off / self.width
        curves = (slopes * (weights / np.maximum(np.abs(off), 1))[:, None]) @ slopes.swapaxes(1, 2)
        places = np.arange(1 + powers, 1 + 2 * powers)
        curves[:, places, places] += 1 / self.width**2
        return losses, gradients, curves

    def terms(self, theta: np.ndarray) -> tuple[float, float, float, float, float]:
        """Returns (E, A, B, alpha, beta) of the loss law, with 0 for terms that are not in the form."""
        exponents = theta[1 + self.powers :]
        factors = np.exp(theta[1 : 1 + self.powers] + exponents * self.centre)
        found = dict(zip(NAMES[self.form], zip(factors.tolist(), exponents.tolist())))
        (A, alpha), (B, beta) = (found.get(name, (0.0, 0.0)) for name in NAMES["both"])
        return float(np.exp(theta[0])), A, B, alpha, beta

    def residuals(self, theta: np.ndarray) -> np.ndarray:
        """Returns the residuals in log L as float64[points]."""
        return self.target - np.logaddexp.reduce(log_terms(theta[None], self.x)[0])


def newton_step(
    thetas: np.ndarray, slopes: np.ndarray, curves: np.ndarray, damping: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (thetas after a damped Newton step inside the bounds, predicted decrease of the loss)."""
    least, most = bounds
    free = ~((thetas <= least) & (slopes > 0) | (thetas >= most) & (slopes < 0))
    diagonal = np.where(free, damping[:, None] * np.einsum("rii->ri", curves), 1.0)
    damped = curves * (free[:, :, None] & free[:, None]) + diagonal[:, :, None] * np.eye(len(least))
    steps = np.linalg.solve(damped, (slopes * free)[:, :, None])[:, :, 0]
    candidates = np.clip(thetas - steps, least, most)
    moved = candidates - thetas
    return candidates, -(slopes * moved).sum(1) - 0.5 * np.einsum("rp,rpq,rq->r", moved, curves, moved)


def log_terms(thetas: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns log E and the log of each term at each point, as float64[draws, 1 + powers, points]."""
    levels = 1 + len(x)
    terms = np.empty((len(thetas), levels, x.shape[1]))
    terms[:, 0] = thetas[:, :1]
    terms[:, 1:] = thetas[:, 1:levels, None] - thetas[:, levels:, None] * x
    return terms


def grid(powers: int, least: float, mean: float) -> np.ndarray:
    """Returns a grid of initial thetas, float64[starts, 1 + 2 powers]. The terms add up to the mean loss minus E."""
    exponents = itertools.product((0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5), repeat=powers)
    splits = [(share, 1 - share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)] if powers == 2 else [(1.0,)]
    fractions = (0.02, 0.2, 0.4, 0.6, 0.8, 0.95)
    return np.array([
        [math.log(fraction * least), *(math.log((mean - fraction * least) * share) for share in split), *power]
        for fraction, split, power in itertools.product(fractions, splits, exponents)
    ])  # fmt: skip


def huber(off: np.ndarray) -> np.ndarray:
    """Returns the Huber loss of each element of `off`, with delta 1."""
    size = np.abs(off)
    return np.where(size <= 1, 0.5 * off * off, size - 0.5)
