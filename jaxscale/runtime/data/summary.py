"""The summary of a corpus in the startup log."""

from collections import Counter
from collections.abc import Sequence

from jaxscale.runtime.data.cache import describe_skipped
from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.row_plan import OpenPlan
from jaxscale.runtime.data.shards import Shard
from jaxscale.runtime.data.split import CorpusSplit
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.units import plural

LOW_FILL, ROWS_TO_JUDGE = 0.98, 100  # with few rows, the padding of the last one matters


def summary_facts(
    cfg: DataConfig, parts: CorpusSplit, plan: OpenPlan, shards: Sequence[Shard], tokenizer: Tokenizer | None
) -> list[str]:
    """Returns the phrases of the summary."""
    train, valid, num_rows, seq_len = plan.train, plan.valid, len(plan.train), plan.train.seq_len
    facts = [
        f"{plural(train.num_documents, 'document')}, {train.num_tokens:,} tokens, "
        f"{plural(num_rows, 'row')} of {seq_len}",
        describe_fill(cfg, train.num_documents, train.num_tokens, num_rows, seq_len),
        "no validation"
        if valid is None
        else f"validation {plural(valid.num_documents, 'document')}, {valid.num_tokens:,} tokens ({plan.words})",
        *(parts.conversations.fitted if parts.conversations is not None else ()),
    ]
    text_bytes = sum(shard.header["text_bytes"] for shard in shards)
    facts += [f"{text_bytes:,} bytes of text"] if text_bytes else []
    facts += [f"tokenizer {tokenizer.name if tokenizer else 'unknown'}"]
    if begin := tokenizer and "".join(begin_names(tokenizer)):
        facts += [f"{'prompts and texts' if cfg.name == 'chat' else 'documents'} begin with {begin}"]
    has_ids = any(shard.header.get("ids_documents") for shard in shards)  # no end token is appended to these
    facts += [f"documents end with {tokenizer.eos_token}"] if tokenizer and tokenizer.eos_token and not has_ids else []
    skipped = sum((Counter(shard.header["skipped"]) for shard in shards), Counter())
    return facts + ([f"skipped {describe_skipped(skipped)}"] if skipped else [])


def describe_fill(cfg: DataConfig, documents: int, tokens: int, rows: int, seq_len: int) -> str:
    """Describes the fill of rows; for a low fill of best_fit, also the gain and cost of concat."""
    fill = tokens / (rows * seq_len)
    text = f"packing {cfg.packing}, {fill:.2%} of positions filled"
    if cfg.packing != "best_fit" or cfg.name == "chat" or fill >= LOW_FILL or rows < ROWS_TO_JUDGE:
        return text
    cut = min(1.0, tokens / seq_len / documents)  # each row end splits one document
    return f"{text} (data.packing=concat would fill all, but split up to {cut:.0%} of the documents)"
