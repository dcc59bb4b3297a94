"""RedPajama-1T (Together, 2023: the recipe of LLaMA, arXiv:2302.13971, table 1): seven sources and their proportions.

    jaxscale prepare --config=configs/data/redpajama.py --output=shards/redpajama
    c.data = dict(name="tokens", files="shards/redpajama/manifest.json", mixture=LLAMA)      # in a training config

Sizes as published [1e9 tokens]: Common Crawl 878, C4 175, GitHub 59, arXiv 28, books 26, Wikipedia 24, StackExchange
20. The books were withdrawn for copyright; list only sources that you may use.
"""

import ml_collections

LLAMA = dict(common_crawl=0.67, c4=0.15, github=0.045, wikipedia=0.045, books=0.045, arxiv=0.025, stackexchange=0.02)
LICENCES = dict(
    common_crawl="Common Crawl terms of use",
    c4="ODC-BY 1.0",
    github="MIT, BSD or Apache 2.0, by repository",
    wikipedia="CC BY-SA 3.0",
    books="by book",
    arxiv="by paper",
    stackexchange="CC BY-SA",
)


def get_config():
    c = ml_collections.ConfigDict()
    c.sources = {name: dict(files=f"raw/{name}/*.jsonl.zst", licence=licence) for name, licence in LICENCES.items()}
    c.stages = ("repair", "exact_dedup", "near_dedup")
    c.near_dedup = dict(threshold=0.8)
    c.tokenizer = dict(name="train", train=dict(vocab_size=32_000))
    return c
