"""Causes and advice of each rule, ordered by likelihood without evidence. Sources: docs/health.md."""

from typing import NamedTuple

from jaxscale.runtime.monitor.health import evidence
from jaxscale.runtime.monitor.health.evidence import EvidenceFn


class Explanation(NamedTuple):
    """Causes, advice and threshold sources of one rule."""

    causes: tuple[tuple[str, EvidenceFn], ...]
    advice: tuple[str, ...]
    sources: tuple[str, ...]


# (cause, function that returns its evidence)
RATE = ("the learning rate is too high", evidence.rate)
BATCH = ("a bad batch: broken, repeated or very long documents", evidence.batch)
WARMUP = ("the warmup is too short", evidence.warmup)
STAGE = ("the data changed", evidence.stage)
NUMERICS = ("numbers out of range in the computation", evidence.numerics)
RETURN = ("the run has just come back from another state", evidence.recent_event)
GRADIENT = ("a gradient explosion", evidence.gradient)
WAIT = ("the step waits for data", evidence.data_wait)
OTHER_WORK = ("other work takes the host's processors", evidence.other_work)
SLOW_DEVICE = ("a device or a link is slow, or throttled by heat", evidence.no_evidence)

EXPLANATIONS = {
    "nonfinite": Explanation(
        (NUMERICS, ("the gradient exploded before", evidence.gradient), RATE, BATCH),
        (
            "look at the batch",
            "if it comes back, lower optim.peak_lr by 2 to 5 times or lengthen the warmup",
            "compute in bfloat16 or float32 in place of float16, and try model.embed_compute_dtype=float32",
            "the guard skips such steps; too many in a row rewind the run, or end it with exit 17",
        ),
        ("common rules: a norm that is NaN is an alarm; stop at NaN",),
    ),
    "spike": Explanation(
        (BATCH, WARMUP, STAGE, RATE, GRADIENT, RETURN, NUMERICS),
        (
            "wait: most spikes heal within some tens of steps",
            "look at the batch, and leave it out with --skip-data if its documents are bad",
            "if spikes return: lower the rate 10 times for 100 steps, then restore it (a common rule; "
            "another: 2 to 5 times for 100 to 500 steps)",
            "if it does not heal: go back to a checkpoint before it and skip the batches around it",
        ),
        (
            "1.5 times the rolling average: a common rule",
            "2 times the mean of the last records: another",
            "3 times the running average: a third",
            "own threshold: also a number of standard deviations of the run's own noise",
        ),
    ),
    "divergence": Explanation(
        (RATE, WARMUP, STAGE, GRADIENT, NUMERICS, RETURN),
        (
            "if a stage of the mixture began, look at the losses by source before anything else",
            "go back to the newest checkpoint from before it, with optim.peak_lr 2 to 10 times lower",
            "lengthen the warmup",
            "check that optim.clip_norm is 1",
        ),
        ("own rule: the smoothed loss against its lowest", "a loss that rises is a concern: a common rule"),
    ),
    "flat_start": Explanation(
        (
            ("the learning rate is too low", evidence.low_rate),
            ("the learning rate is so high that nothing is learnt", evidence.rate),
            ("steps are skipped, so that nothing is learnt", evidence.skips),
            ("targets or weights of the data are wrong", evidence.batch),
            ("parameters are frozen by optim.groups", evidence.no_evidence),
        ),
        (
            "try optim.peak_lr between 1e-4 and 1e-3 on a short run",
            "read a batch with jaxscale trace: is it text, and is it what the model is to learn",
            "overfit one batch: a model that cannot has a fault in its code or settings",
        ),
        (
            "flat from the start: a common rule; own threshold",
            "too low a rate is flat or glacial: a common rule",
        ),
    ),
    "plateau": Explanation(
        (
            ("the rate has decayed too early, or is too low", evidence.low_rate),
            ("the model has learnt what its size can", evidence.schedule),
            ("the data are used up and come again", evidence.batch),
            ("the learning rate is too high to go lower", evidence.rate),
        ),
        (
            "see the ratio of tokens to parameters with jaxscale plan: past it, a larger model gains more",
            "try the rate 2 times higher on a branch (--init_from); if that is worse, decay it now",
            "see in data.max_epochs and the start's messages how often the data come round",
        ),
        (
            "second half of the window at least 0.99 of its first: a common rule",
            "ours grows the window with the run and asks for certainty: 100 noisy steps are not enough",
        ),
    ),
    "oscillation": Explanation(
        (
            RATE,
            ("sources come in long runs in place of a mix", evidence.stage),
            ("the batch is small for this rate", evidence.no_evidence),
            ("the gradient is clipped nearly always", evidence.gradient),
        ),
        (
            "lower optim.peak_lr 2 times, or raise the batch",
            "lower optim.b2 to 0.95 if it is higher",
            "see the losses by source: do they swing one after the other",
        ),
        ("oscillation points at rate, data or numerics, not at the architecture: a common rule; own threshold",),
    ),
    "explosion": Explanation(
        (RATE, WARMUP, BATCH, NUMERICS, STAGE, RETURN),
        (
            "check that optim.clip_norm is 1: the norm that is logged is from before clipping",
            "lower the rate 2 to 5 times",
            "look at the batch",
            "try model.embed_compute_dtype=float32",
        ),
        (
            "above 100 or NaN, 0.1 to 10 is normal: a common rule",
            "above 3 times the clip norm: another; with clip norm 1 that is 3, normal by the first, so "
            "it is shown and alerts nobody",
            "own threshold: a multiple of the run's own median",
        ),
    ),
    "zero_gradient": Explanation(
        (
            (
                "the loss does not depend on it: an unused parameter, or a branch that is multiplied by zero",
                evidence.no_evidence,
            ),
            ("both factors of a product are zero, so that neither gets a gradient", evidence.no_evidence),
            ("a mask or gate in front of it is always closed", evidence.no_evidence),
            ("its gradient underflows in float16", evidence.float16),
        ),
        (
            "follow the parameter from its use in the model to the loss",
            "initialize one of the two factors with values that are not zero",
            "if it is not meant to learn, freeze it: optim.groups with its pattern and frozen=true, which saves its "
            "moments and its gradient",
            "if it belongs to an expert, look for dead_experts too: one without tokens gets no gradient",
        ),
        ("own threshold: exactly zero, in consecutive records with statistics",),
    ),
    "skipped_steps": Explanation(
        (("the guard meets gradients that explode", evidence.gradient), NUMERICS, BATCH, STAGE),
        (
            "read why in events.jsonl: each 'skipped' has its verdict",
            "if the steps were well, raise the setting of train.guard that the verdict follows from",
            "else lower the rate, or leave the batches out with --skip-data",
        ),
        ("skipping is the first answer to a spike: a common rule; own threshold",),
    ),
    "activations": Explanation(
        (
            RATE,
            NUMERICS,
            ("a layer's weights began too large or too small", evidence.warmup),
            ("weight decay, or a norm, has shut the layer", evidence.no_evidence),
        ),
        (
            "see stats/grad_norm and stats/update_ratio of the same layers",
            "huge: lower the rate, raise the weight decay, or bound attention logits",
            "dead: check the init, the norm before the layer and optim.groups",
        ),
        ("about 1; above 100 or below 0.01 is a concern: a common rule",),
    ),
    "attention_logits": Explanation(
        (RATE, WARMUP, ("query and key weights grow without bound", evidence.no_evidence)),
        ("lower the rate or lengthen the warmup", "in a new run, set model.qk_norm or model.attention_softcap"),
        (
            "attention logits cause spikes: a common rule",
            "QK-Clip holds them at 100: arXiv:2507.20534",
            "own threshold: ten times that",
        ),  # fmt: skip
    ),
    "busy_machine": Explanation(
        (("other programs compute on this machine", evidence.other_work),),
        (
            "nothing is wrong with the run: it continues at its usual speed once they are done",
            "see which programs they are: top, or htop",
            "give the run its own processors",
        ),
        ("own threshold: a fifth of the processors, while none is left over",),
    ),
    "starvation": Explanation(
        (
            ("reading or decoding is slower than the step", evidence.data_wait),
            ("the disk, the bucket or its cache is slow", evidence.no_evidence),
            OTHER_WORK,
        ),
        (
            "give the host more cores",
            "prepare token shards ahead with jaxscale prepare",
            "put data.cache_dir on a local disk",
        ),
        ("own threshold", "throughput falls where the host and the device wait for each other: a common rule"),
    ),
    "slow_step": Explanation(
        (WAIT, RETURN, SLOW_DEVICE, OTHER_WORK),
        (
            "capture a profile of a few steps",
            "compare the hosts: one that is slow holds up all",
            "see the device's temperature and clock",
        ),
        ("slower than expected: a common rule; own threshold, against the run's own median",),
    ),
    "utilisation_drop": Explanation(
        (
            WAIT,
            ("rows of another length, or another stage of the data", evidence.stage),
            RETURN,
            OTHER_WORK,
            SLOW_DEVICE,
        ),
        ("capture a profile and compare it with one from before", "compare the hosts", "see the device's clock"),
        ("utilisation drops: a common rule; own threshold, against the run's own best blocks",),
    ),
    "memory_creep": Explanation(
        (
            ("arrays or compiled functions are kept alive", evidence.no_evidence),
            ("the reader of data keeps what it has read", evidence.data_wait),
            RETURN,
        ),
        (
            "host memory: stop and start again at a checkpoint before it is full, and see whether it rises again",
            "device memory: look for shapes that change from step to step, which compile again",
        ),
        ("memory is to be logged, and does not rise in a steady run: a common rule; own threshold",),
    ),
    "overfitting": Explanation(
        (
            ("the data come round too often", evidence.batch),
            ("the validation text differs from what is trained on now", evidence.stage),
            ("the model is large for the data", evidence.schedule),
        ),
        ("see how many epochs are done", "stop here, or add data", "raise weight decay or dropout on a branch"),
        ("log training and validation loss together: a common rule; own threshold",),
    ),
    "source_jump": Explanation(
        (STAGE, BATCH, RATE, RETURN),
        (
            "if a stage began: this is the price of the new mix, and should fall again; ease it in over more steps",
            "if none began: look at the source's documents in the batch",
        ),
        ("check the data source's transition: a common rule; own threshold",),
    ),
    "router_collapse": Explanation(
        (
            ("nothing keeps the experts equally busy", evidence.balance),
            RATE,
            WARMUP,
            ("the bias moves so far in a step that loads swing", evidence.bias_rate),
            ("the router's weights are so large that scores are all or nothing", evidence.no_evidence),
        ),
        (
            "see in the report which layers and experts it is",
            "balance it: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
            "router_z_loss=0.001 in train.aux_losses keeps the router's logits small",
            "lower optim.peak_lr 2 times or lengthen the warmup",
        ),
        (
            "routers left alone send ever more tokens to few experts: arXiv:1701.06538, section 4",
            "own threshold: a quarter of the way from the fewest experts to all, for longer than balance takes",
        ),
    ),
    "dead_experts": Explanation(
        (
            ("nothing keeps the experts equally busy", evidence.balance),
            ("the batch is small for this number of experts", evidence.no_evidence),
            ("the router began far from balance, and its bias has not come far enough yet", evidence.bias_rate),
            RATE,
        ),
        (
            "see in the report which they are: a layer alone points at its router, some everywhere at the balance",
            "balance it: model.experts.bias=true in a new run, or balance_loss=0.01 in train.aux_losses",
            "an expert without tokens learns nothing: fewer experts would do the same",
        ),
        ("own threshold: 100 steps without a token, for longer than balance takes",),
    ),
    "router_bias": Explanation(
        (
            ("the bias moves too fast", evidence.bias_rate),
            ("some expert is not wanted whatever its bias is", evidence.no_evidence),
            RATE,
        ),
        (
            "lower model.experts.bias_rate: 0.001 is usual, for scores by sigmoid",
            "if it grows at a usual rate: add balance_loss or row_balance_loss to train.aux_losses, so that scores "
            "themselves come closer",
        ),
        (
            "a rate of 0.001: arXiv:2408.15664; arXiv:2412.19437",
            "own threshold: three times the range of a token's scores, and a tenth of it in one step",
        ),
    ),
    "forecast": Explanation(
        (
            (
                "the rate, the batch or the warmup differs from that of the runs the forecast was made from",
                evidence.rate,
            ),
            STAGE,
            ("the fit does not reach this far", evidence.schedule),
        ),
        (
            "above the band: compare the settings with the small runs' before spending more",
            "below it: look for validation text among the training data, and fit again",
        ),
        ("forecast.json, made by jaxscale plan --loss (arXiv:2203.15556, approach 3)",),
    ),
}
