"""What a run says of its corpus when it starts, in one line."""

from collections import Counter
from collections.abc import Sequence

from jaxscale.data.cache import count, describe_skipped
from jaxscale.data.config import DataConfig
from jaxscale.data.row_plan import OpenPlan
from jaxscale.data.shards import Shard
from jaxscale.data.split import Division
from jaxscale.text.tokenizer.base import Tokenizer, begin_names

LOW_FILL, ROWS_TO_JUDGE = 0.98, 100  # the last row of a few may be nearly empty


def facts_of(
    cfg: DataConfig, parts: Division, plan: OpenPlan, shards: Sequence[Shard], tokenizer: Tokenizer | None
) -> list[str]:
    """What the summary of a corpus says, a phrase each."""
    train, valid, num_rows, seq_len = plan.train, plan.valid, len(plan.train), plan.train.seq_len
    facts = [
        f"{count(train.num_documents, 'document')}, {train.num_tokens:,} tokens, {count(num_rows, 'row')} of {seq_len}",
        told_fill(cfg, train.num_documents, train.num_tokens, num_rows, seq_len),
        "no validation"
        if valid is None
        else f"validation {count(valid.num_documents, 'document')}, {valid.num_tokens:,} tokens ({plan.words})",
        *(parts.conversations.fitted if parts.conversations is not None else ()),
    ]
    text_bytes = sum(shard.header["text_bytes"] for shard in shards)
    facts += [f"{text_bytes:,} bytes of text"] if text_bytes else []
    facts += [f"tokenizer {tokenizer.name if tokenizer else 'not known'}"]
    if begin := tokenizer and "".join(begin_names(tokenizer)):
        facts += [f"{'prompts and texts' if cfg.name == 'chat' else 'documents'} begin with {begin}"]
    of_ids = any(shard.header.get("ids_documents") for shard in shards)  # which end as they are
    facts += [f"documents end with {tokenizer.eos_token}"] if tokenizer and tokenizer.eos_token and not of_ids else []
    skipped = sum((Counter(shard.header["skipped"]) for shard in shards), Counter())
    return facts + ([f"skipped {describe_skipped(skipped)}"] if skipped else [])


def told_fill(cfg: DataConfig, documents: int, tokens: int, rows: int, seq_len: int) -> str:
    """How full the rows are; where best_fit leaves much of them empty, what cutting documents would give and cost."""
    fill = tokens / (rows * seq_len)
    told = f"packing {cfg.packing}, {fill:.2%} of positions real"
    if cfg.packing != "best_fit" or cfg.name == "chat" or fill >= LOW_FILL or rows < ROWS_TO_JUDGE:
        return told
    cut = min(1.0, tokens / seq_len / documents)  # each end of a row cuts one
    return f"{told} (data.packing=concat would fill all of them, and cut up to {cut:.0%} of the documents)"
