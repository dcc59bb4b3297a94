"""Rules about gradients, skipped steps, activations and attention logits."""

import collections

from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import BATCH, NUMERICS, RATE, RETURN, STAGE, WARMUP
from jaxscale.runtime.monitor.health.rule import (
    HEALTHY,
    Baseline,
    Rule,
    RuleResult,
    View,
    finite_numbers,
    format_ratio,
    loss_limit,
)


class Explosion(Rule):
    """Detects a gradient norm above an absolute limit, or far above the median of this run."""

    kind = "explosion"
    causes = (RATE, WARMUP, BATCH, NUMERICS, STAGE, RETURN)
    advice = (
        "check that optim.clip_norm is 1; the logged norm is the one before clipping",
        "divide the learning rate by 2 to 5",
        "inspect the batch",
        "try model.embed_compute_dtype=float32",
    )
    sources = (
        "above 100 or NaN, 0.1 to 10 is normal: a common rule",
        "above 3 times the clip norm: another common rule, which is shown but raises no alert: with clip norm 1 the "
        "limit is 3, a normal value by the first rule",
        "own threshold: a multiple of the median of this run",
    )

    def __init__(self) -> None:
        self.baseline = Baseline()

    def check(self, view: View) -> RuleResult | None:
        if (norm := view.number("grad_norm")) is None:
            return None
        compared = self.baseline.compare(norm)
        if compared is None or compared.ratio < 3:
            self.baseline.add(norm)
        ratio = compared.ratio if compared else None
        absurd = norm > view.cfg.grad_norm and (ratio is None or ratio > 3)
        steep = compared is not None and compared.ratio > view.cfg.grad_ratio and compared.sigmas > 10
        numbers = {"grad_norm": norm, "ratio": ratio, "threshold": view.cfg.grad_norm}
        if not (absurd or steep):
            recovered = ratio is None or ratio < 3 or not self.active
            return RuleResult(False, f"the gradient norm is back at {norm:.4g}", numbers) if recovered else None
        usual = f", {format_ratio(compared.ratio, 1)} times its median {compared.centre:.4g}" if compared else ""
        clip = view.facts.clip_norm
        clip_rule = f", {'above' if norm > 3 * clip else 'below'} 3 times the clip norm, {3 * clip:g} (another rule)"
        side = "above" if norm > view.cfg.grad_norm else "below"
        seen = (
            f"the gradient norm before clipping is {norm:.4g}{usual}: {side} {view.cfg.grad_norm:g} "
            f"(a common rule; 0.1 to 10 is normal){clip_rule if clip else ''}"
        )
        return RuleResult(True, seen, numbers, sure=absurd and steep)


class ZeroGradient(Rule):
    """Detects gradients of trained parameters that are exactly zero in consecutive records with statistics."""

    kind = "zero_gradient"
    begin, end = 1, 2
    causes = (
        (
            "the loss does not depend on the parameter: it is unused, or its branch is multiplied by zero",
            evidence.no_evidence,
        ),
        ("both factors of a product are zero, so that neither has a gradient", evidence.no_evidence),
        ("a mask or gate before the parameter is always zero", evidence.no_evidence),
        ("its gradient underflows in float16", evidence.float16),
    )
    advice = (
        "follow the parameter from its use in the model to the loss",
        "initialize one of the two factors with nonzero values",
        "if it should not be trained, freeze it: optim.groups with its pattern and frozen=true, which saves its "
        "moments and its gradient",
        "if it belongs to an expert, check for dead_experts: an expert without tokens has no gradient",
    )
    sources = ("own threshold: exactly zero, in consecutive records with statistics",)

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}  # {parameter: steps of consecutive records with a zero gradient}

    def check(self, view: View) -> RuleResult | None:
        if not finite_numbers(view, "stats/grad_norm/"):
            return None
        self.steps = {name: [*self.steps.get(name, ()), view.step] for name in finite_numbers(view, "stats/zero_grad/")}
        if not self.steps:
            return RuleResult(False, "every trained parameter has a gradient again")
        records = view.cfg.zero_grad_records
        found = [name for name, steps in self.steps.items() if len(steps) >= records]
        if not found:
            return None
        first = min(self.steps[name][0] for name in found)
        names = found[:4] + [f"{len(found) - 4} more"] * (len(found) > 4)
        joined = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
        seen = f"the gradient of {joined} was exactly zero in {records} consecutive records with statistics"
        numbers = {"parameters": found[:8], "count": len(found), "records": records, "since": first}
        return RuleResult(True, f"{seen}, since step {first}", numbers)


class SkippedSteps(Rule):
    """Detects that the guard skips several steps."""

    kind = "skipped_steps"
    begin, end = 2, 10
    causes = (("gradients explode", evidence.gradient), NUMERICS, BATCH, STAGE)
    advice = (
        "read the reasons in events.jsonl: each 'skipped' event has a verdict",
        "if the steps were valid, raise the setting of train.guard that caused the verdict",
        "otherwise lower the learning rate, or skip the batches with --skip-data",
    )
    sources = ("skipping is the first answer to a spike: a common rule; own threshold",)

    before: tuple[int, float, float | None] | None = None  # step, skipped_total, loss scale

    def check(self, view: View) -> RuleResult | None:
        if (total := view.number("skipped_total")) is None:
            return None
        scale = view.number("train/loss_scale")
        before, self.before = self.before, (view.step, total, scale)
        if before is None or before[0] >= view.step or total < before[1]:
            return None  # rewound or restarted
        if scale is not None and before[2] is not None and scale < before[2]:
            return None  # dynamic loss scaling reduced the scale
        skipped, steps = total - before[1], view.step - before[0]
        if not skipped:
            return RuleResult(False, f"no step was skipped since step {before[0]}", {"skipped_total": total})
        last = f"{skipped:.0f} of the last {steps} steps" if steps > 1 else "this step and the one before"
        seen = f"{last} were skipped, {total:.0f} in total"
        often = skipped >= 3 and skipped >= 0.2 * steps
        return RuleResult(True, seen, {"skipped": skipped, "steps": steps, "skipped_total": total}, sure=often)


class Activations(Rule):
    """Detects a layer with huge or vanishing activations, or with a branch that adds little to the residual."""

    kind = "activations"
    begin, end = 2, 2
    causes = (
        RATE,
        NUMERICS,
        ("a layer's initial weights are too large or too small", evidence.warmup),
        ("weight decay or a norm has shut down the layer", evidence.no_evidence),
    )
    advice = (
        "see stats/grad_norm and stats/update_ratio of the same layers",
        "huge: lower the learning rate, raise the weight decay, or limit attention logits",
        "dead: check the init, the norm before the layer and optim.groups",
    )
    sources = ("about 1; above 100 or below 0.01 is a concern: a common rule",)

    def check(self, view: View) -> RuleResult | None:
        layers = finite_numbers(view, "stats/activation_rms/")
        nonfinite = [name for name in view.record.get("nonfinite", ()) if name.startswith("stats/activation_rms/")]
        if not layers and not nonfinite:
            return None
        low, high = view.cfg.activation_low, view.cfg.activation_high
        huge = sorted((layer for layer in layers if layers[layer] > high), key=lambda layer: -layers[layer])
        dead = sorted((layer for layer in layers if layers[layer] < low), key=lambda layer: layers[layer])
        weak = weak_branches(view, layers)
        values = {layer: layers[layer] for layer in (huge + dead)[:8]}
        numbers = {"huge": huge, "dead": dead, "values": values, "shut": weak}
        if not huge and not dead and not nonfinite and not weak:
            return RuleResult(False, f"the activations of all layers are between {low:g} and {high:g}", numbers)
        parts = [f"not finite in {', '.join(name.rsplit('/', 1)[-1] for name in nonfinite[:8])}"] if nonfinite else []
        if huge:
            parts.append(f"above {high:g} in {listed(huge, layers)}")
        if dead:
            parts.append(f"below {low:g} in {listed(dead, layers)}")
        rule = "(a common rule: about 1, a concern above 100 or below 0.01)"
        sentences = [f"activation RMS {'; '.join(parts)} {rule}"] if parts else []
        if weak:
            branches = listed([*weak], weak)
            sentences.append(
                f"relative to the residual stream, these add less than {view.cfg.branch_low:g}: {branches}"
            )
        return RuleResult(True, "; ".join(sentences), numbers | {"low": low, "high": high}, sure=bool(nonfinite))


def weak_branches(view: View, layers: dict[str, float]) -> dict[str, float]:
    """Returns {'attention of 03': ratio} for branches with RMS / layer RMS below branch_low; {} in the warmup."""
    if view.step <= view.facts.warmup_steps:
        return {}
    ratios = {
        f"{branch} of {layer}": rms / layers[layer]
        for branch in ("attention", "mlp")
        for layer, rms in finite_numbers(view, f"stats/{branch}_rms/").items()
        if layers.get(layer)
    }
    return {name: ratio for name, ratio in sorted(ratios.items(), key=lambda p: p[1]) if ratio < view.cfg.branch_low}


class AttentionLogits(Rule):
    """Detects attention logits so large that the softmax selects a single token."""

    kind = "attention_logits"
    begin, end = 2, 2
    causes = (RATE, WARMUP, ("query and key weights grow without bound", evidence.no_evidence))
    advice = (
        "lower the learning rate or lengthen the warmup",
        "in a new run, set model.qk_norm or model.attention_softcap",
    )
    sources = (
        "attention logits cause spikes: a common rule",
        "QK-Clip limits them to 100: arXiv:2507.20534",
        "own threshold: ten times that",
    )

    def check(self, view: View) -> RuleResult | None:
        exact = finite_numbers(view, "stats/attention_logit_max/")
        layers = exact or finite_numbers(view, "stats/attention_logit_bound/")
        if not layers:
            return None
        limit = view.cfg.attention_logit
        large = sorted((layer for layer in layers if layers[layer] > limit), key=lambda layer: -layers[layer])
        numbers = {"layers": large, "values": {layer: layers[layer] for layer in large[:8]}, "threshold": limit}
        if not large:
            return RuleResult(False, f"attention logits of all layers are at most {limit:g}", numbers)
        what = "the largest attention logit" if exact else "the bound max|q| max|k| of the attention logits"
        bound = "" if exact else " (an upper bound; the logits may be far below it)"
        seen = f"{what}{bound} is above {limit:g} in {listed(large, layers)}; QK-Clip limits logits to 100"
        seen += " (arXiv:2507.20534)"
        return RuleResult(True, seen, numbers | {"exact": bool(exact)})


def listed(names: list[str], values: dict[str, float]) -> str:
    """Formats names with values, such as '3 (1.2e+03), 4 (800) and 7 more'."""
    first = ", ".join(f"{name} ({values[name]:.3g})" for name in names[:4])
    return first + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class SourceJump(Rule):
    """Detects that the loss of one source of the mixture jumps and stays high."""

    kind = "source_jump"
    begin, end = 3, 5
    causes = (STAGE, BATCH, RATE, RETURN)
    advice = (
        "if a stage of the mixture started, the loss should fall again; introduce it over more steps",
        "if none started, inspect the source's documents in the batch",
    )
    sources = ("check the data source's transition: a common rule; own threshold",)

    def __init__(self) -> None:
        self.baselines: dict[str, Baseline] = {}
        self.rejected: collections.Counter[str] = collections.Counter()

    def check(self, view: View) -> RuleResult | None:
        numbers = finite_numbers(view, "train/")
        losses = {name.removesuffix("/loss"): loss for name, loss in numbers.items() if name.endswith("/loss")}
        if not losses:
            return None
        jumped = {}
        for name, loss in losses.items():
            baseline = self.baselines.setdefault(name, Baseline())
            compared = baseline.compare(loss)
            if compared and loss > loss_limit(view.cfg.source_ratio, compared.centre) and compared.sigmas > 6:
                jumped[name] = (loss, compared.centre)
                self.rejected[name] += 1
                if self.rejected[name] >= 20:  # a new level
                    baseline.reset([])
                    self.rejected[name] = 0
            else:
                baseline.add(loss)
                self.rejected[name] = 0
        if not jumped:
            return HEALTHY if not self.active else RuleResult(False, "the losses of the sources are back to normal")
        parts = [f"{name} {loss:.4g} after {usual:.4g}" for name, (loss, usual) in sorted(jumped.items())]
        numbers = {"sources": sorted(jumped), "losses": {name: list(pair) for name, pair in sorted(jumped.items())}}
        return RuleResult(True, f"the loss of a source has jumped: {', '.join(parts)}", numbers)
