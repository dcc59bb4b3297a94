"""Rules about gradients, skipped steps, activations and attention logits."""

import collections

from jaxscale.monitor.health.finding import GOOD, Sign
from jaxscale.monitor.health.robust import Baseline, loss_limit, many
from jaxscale.monitor.health.rule import Rule, View, named


class Explosion(Rule):
    """A gradient norm that no healthy run has, or that is far above this run's own."""

    kind = "explosion"

    def __init__(self) -> None:
        super().__init__()
        self.baseline = Baseline()

    def look(self, view: View) -> Sign | None:
        if (norm := view.number("grad_norm")) is None:
            return None
        judged = self.baseline.judge(norm)
        if judged is None or judged.ratio < 3:
            self.baseline.add(norm)
        ratio = judged.ratio if judged else None
        absurd = norm > view.cfg.grad_norm and (ratio is None or ratio > 3)
        steep = judged is not None and judged.ratio > view.cfg.grad_ratio and judged.sigmas > 10
        told = {"grad_norm": norm, "ratio": ratio, "threshold": view.cfg.grad_norm}
        if not (absurd or steep):
            back = ratio is None or ratio < 3
            return Sign(False, f"the gradient norm is back at {norm:.4g}", told) if back or not self.spoken else None
        usual = f", {many(judged.ratio, 1)} times its median {judged.centre:.4g}" if judged else ""
        clip = view.facts.clip_norm
        beside = f", {'above' if norm > 3 * clip else 'below'} 3 times the clip norm, {3 * clip:g} (another)"
        side = "above" if norm > view.cfg.grad_norm else "below"
        seen = (
            f"the gradient norm before clipping is {norm:.4g}{usual}: {side} {view.cfg.grad_norm:g} "
            f"(a common rule; 0.1 to 10 counts as normal){beside if clip else ''}"
        )
        return Sign(True, seen, told, sure=absurd and steep)


class ZeroGradient(Rule):
    """A trained parameter whose gradient is exactly zero in consecutive records of statistics."""

    kind = "zero_gradient"
    begin, end = 1, 2

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[str, list[int]] = {}  # of the consecutive records in which the parameter's gradient is zero

    def look(self, view: View) -> Sign | None:
        if not named(view, "stats/grad_norm/"):
            return None
        self.steps = {name: [*self.steps.get(name, ()), view.step] for name in named(view, "stats/zero_grad/")}
        if not self.steps:
            return Sign(False, "every trained parameter has a gradient again")
        records = view.cfg.zero_grad_records
        found = [name for name, steps in self.steps.items() if len(steps) >= records]
        if not found:
            return None
        first = min(self.steps[name][0] for name in found)
        names = found[:4] + [f"{len(found) - 4} more"] * (len(found) > 4)
        listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        seen = f"the gradient of {listed} was exactly zero in {records} records with statistics in a row"
        numbers = {"parameters": found[:8], "count": len(found), "records": records, "since": first}
        return Sign(True, f"{seen}, since step {first}", numbers)


class SkippedSteps(Rule):
    """Steps that the guard has refused, several of them."""

    kind = "skipped_steps"
    begin, end = 2, 10

    def __init__(self) -> None:
        super().__init__()
        self.before: tuple[int, float, float | None] | None = None  # step, skipped_total, loss scale

    def look(self, view: View) -> Sign | None:
        if (total := view.number("skipped_total")) is None:
            return None
        scale = view.number("train/loss_scale")
        before, self.before = self.before, (view.step, total, scale)
        if before is None or before[0] >= view.step or total < before[1]:
            return None  # gone back, or begun again
        if scale is not None and before[2] is not None and scale < before[2]:
            return None  # float16 looks for its loss scale
        skipped, steps = total - before[1], view.step - before[0]
        if not skipped:
            return Sign(False, f"no step is skipped since step {before[0]}", {"skipped_total": total})
        last = f"{skipped:.0f} of the last {steps} steps" if steps > 1 else "this step and the one before"
        seen = f"{last} were skipped, {total:.0f} in all"
        many = skipped >= 3 and skipped >= 0.2 * steps
        return Sign(True, seen, {"skipped": skipped, "steps": steps, "skipped_total": total}, sure=many)


class Activations(Rule):
    """Layers whose activations are huge, or dead: one that adds nothing hides behind the stream that goes past it."""

    kind = "activations"
    begin, end = 2, 2

    def look(self, view: View) -> Sign | None:
        layers = named(view, "stats/activation_rms/")
        lost = [name for name in view.record.get("nonfinite", ()) if name.startswith("stats/activation_rms/")]
        if not layers and not lost:
            return None
        low, high = view.cfg.activation_low, view.cfg.activation_high
        huge = sorted((layer for layer in layers if layers[layer] > high), key=lambda layer: -layers[layer])
        dead = sorted((layer for layer in layers if layers[layer] < low), key=lambda layer: layers[layer])
        shut = shut_branches(view, layers)
        told = {
            "huge": huge,
            "dead": dead,
            "values": {layer: layers[layer] for layer in (huge + dead)[:8]},
            "shut": shut,
        }
        if not huge and not dead and not lost and not shut:
            return Sign(False, f"the activations of all layers are between {low:g} and {high:g}", told)
        parts = [f"not finite in {', '.join(name.rsplit('/', 1)[-1] for name in lost[:8])}"] if lost else []
        if huge:
            parts.append(f"above {high:g} in {shown(huge, layers)}")
        if dead:
            parts.append(f"below {low:g} in {shown(dead, layers)}")
        said = [
            f"activation RMS {'; '.join(parts)} (a common rule: about 1, a concern above 100 or below 0.01)"
        ] * bool(parts)
        if shut:
            said.append(
                f"of the stream behind them, these add less than {view.cfg.branch_low:g}: {shown([*shut], shut)}"
            )
        seen = "; ".join(said)
        return Sign(True, seen, told | {"low": low, "high": high}, sure=bool(lost))


def shut_branches(view: View, layers: dict[str, float]) -> dict[str, float]:
    """{'attention of 03': part of the RMS behind the layer} of what adds next to nothing; none during the warmup, since
    some begin with weights of zero."""
    if view.step <= view.facts.warmup_steps:
        return {}
    parts = {
        f"{branch} of {layer}": rms / layers[layer]
        for branch in ("attention", "mlp")
        for layer, rms in named(view, f"stats/{branch}_rms/").items()
        if layers.get(layer)
    }
    return {name: part for name, part in sorted(parts.items(), key=lambda p: p[1]) if part < view.cfg.branch_low}


class AttentionLogits(Rule):
    """Attention logits so large that the softmax looks at one token."""

    kind = "attention_logits"
    begin, end = 2, 2

    def look(self, view: View) -> Sign | None:
        exact = named(view, "stats/attention_logit_max/")
        layers = exact or named(view, "stats/attention_logit_bound/")
        if not layers:
            return None
        limit = view.cfg.attention_logit
        large = sorted((layer for layer in layers if layers[layer] > limit), key=lambda layer: -layers[layer])
        told = {"layers": large, "values": {layer: layers[layer] for layer in large[:8]}, "threshold": limit}
        if not large:
            return Sign(False, f"attention logits of all layers are at most {limit:g}", told)
        what = "the largest attention logit" if exact else "the bound max|q| max|k| of the attention logits"
        lower = "" if exact else ", which no logit exceeds and all may be far below"
        seen = f"{what}{lower} is above {limit:g} in {shown(large, layers)}; QK-Clip holds logits at 100"
        seen += " (arXiv:2507.20534)"
        return Sign(True, seen, told | {"exact": bool(exact)})


def shown(names: list[str], values: dict[str, float]) -> str:
    """'3 (1.2e+03), 4 (800) and 7 more'."""
    first = ", ".join(f"{name} ({values[name]:.3g})" for name in names[:4])
    return first + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class SourceJump(Rule):
    """The loss of one source of the mixture that jumps and stays."""

    kind = "source_jump"
    begin, end = 3, 5

    def __init__(self) -> None:
        super().__init__()
        self.baselines: dict[str, Baseline] = {}
        self.refused: collections.Counter[str] = collections.Counter()

    def look(self, view: View) -> Sign | None:
        losses = {name[: -len("/loss")]: loss for name, loss in named(view, "train/").items() if name.endswith("/loss")}
        if not losses:
            return None
        jumped = {}
        for name, loss in losses.items():
            baseline = self.baselines.setdefault(name, Baseline())
            judged = baseline.judge(loss)
            if judged and loss > loss_limit(view.cfg.source_ratio, judged.centre) and judged.sigmas > 6:
                jumped[name] = (loss, judged.centre)
                self.refused[name] += 1
                if self.refused[name] >= 20:  # its level now
                    baseline.restart([])
                    self.refused[name] = 0
            else:
                baseline.add(loss)
                self.refused[name] = 0
        if not jumped:
            return GOOD if not self.spoken else Sign(False, "the losses of the sources are usual again")
        parts = [f"{name} {loss:.4g} after {usual:.4g}" for name, (loss, usual) in sorted(jumped.items())]
        told = {"sources": sorted(jumped), "losses": {name: list(pair) for name, pair in sorted(jumped.items())}}
        return Sign(True, f"the loss of a source has jumped: {', '.join(parts)}", told)
