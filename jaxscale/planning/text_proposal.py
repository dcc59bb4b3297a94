"""A proposal for people."""

from jaxscale import units
from jaxscale.planning.propose import Proposal, warmup
from jaxscale.planning.tables import table
from jaxscale.planning.text import INDENT, scientific, wrapped


def proposal_lines(proposal: Proposal) -> list[str]:
    """What is proposed, and by which rules."""
    model = proposal.model
    heads = f"{model['num_heads']} heads of {model['head_dim']}, mlp {model['mlp_dim']:,}"
    steps = proposal.tokens // (proposal.rows * proposal.seq_len)
    rows = [
        ("by the rule", units.count(proposal.rule.params), f"on {units.count(proposal.rule.tokens)} tokens"),
        ("parameters", units.count(proposal.params), f"{proposal.params:,}: the nearest shape of whole heads"),
        (
            "tokens",
            units.count(proposal.tokens),
            f"{proposal.tokens / proposal.params:.3g} a parameter; {steps:,} steps",
        ),
        ("FLOPs (6ND)", scientific(proposal.flops), ""),
        ("shape", f"{model['num_layers']} x {model['embed_dim']:,}", heads),
        (
            "batch",
            f"{proposal.rows} x {proposal.seq_len:,}",
            "0.2920 C^0.3271 tokens (arXiv:2401.02954), at most the critical batch",
        ),
        ("peak rate", f"{proposal.peak_lr:.2g}", f"0.3118 C^-0.1250 (arXiv:2401.02954); warmup {warmup(proposal)}"),
    ]
    return ["proposed", *table(rows), *wrapped(proposal.why, INDENT, INDENT)]
