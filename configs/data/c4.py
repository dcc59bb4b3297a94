"""C4 (Raffel et al., arXiv:1910.10683, section 2.2), with the paper's rules for pages of Common Crawl.

    jaxscale prepare --config=configs/data/c4.py --input='crawl/*.warc.gz' --output=shards/c4

Differences: py3langid replaces langdetect at 0.99; later copies of a repeated line are cut instead of repeated spans of
three sentences; and c4.bad_words is empty, so set your own list. The published corpus has about 750 GB of text, under
ODC-BY 1.0; its content is subject to Common Crawl's terms of use.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.sources = dict(c4=dict(files="crawl/*.warc.gz", licence="Common Crawl terms of use"))
    c.stages = ("repair", "c4", "language", "line_dedup", "decontaminate")
    c.language = dict(keep=("en",), min_probability=0.99)
    c.line_dedup = dict(min_line_characters=60)
    c.decontaminate = dict(files=("none",))  # as in the paper; list the evaluation sets that you will report on
    c.tokenizer = dict(name="train", train=dict(kind="unigram", vocab_size=32_000))
    return c
