"""A web crawl with the rules that most public corpora share. Start with this recipe, and read report.html.

    jaxscale prepare --config=configs/data/web.py --input='raw/*.jsonl.gz' --output=shards/web

Then train with --config.data.name=tokens --config.data.files=shards/web/manifest.json.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.read = dict(html_text="trafilatura")  # for WARC and HTML files; slower and more exact than resiliparse
    c.stages = (
        "repair", "language", "gopher_repetition", "gopher_quality", "exact_dedup", "near_dedup",
        "decontaminate", "pii",
    )  # fmt: skip
    c.language = dict(keep=("en",))
    c.decontaminate = dict(files=("none",))  # list the evaluation sets that you will report on: ("evaluation/*.jsonl",)
    c.tokenizer = dict(name="train", train=dict(vocab_size=32_768))
    return c
