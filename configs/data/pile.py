"""The Pile (Gao et al., arXiv:2101.00027, table 1): 22 sources and their weights in percent.

    jaxscale prepare --config=configs/data/pile.py --output=shards/pile
    c.data = dict(name="tokens", files="shards/pile/manifest.json", mixture=WEIGHTS)      # in a training config

825 GiB. Not every source has a licence (see the datasheet, arXiv:2201.07311). Books3 and OpenSubtitles were withdrawn
for copyright: list only sources that you may use, and remove the others from WEIGHTS. The paper removes near duplicates
only in Pile-CC and OpenWebText2, at a similarity of 0.5; this recipe removes them across all sources.
"""

import ml_collections

WEIGHTS = dict(
    pile_cc=18.11, pubmed_central=14.40, books3=12.07, openwebtext2=10.01, arxiv=8.96, github=7.59, freelaw=6.12,
    stackexchange=5.13, uspto=3.65, pubmed_abstracts=3.07, gutenberg=2.17, opensubtitles=1.55, wikipedia=1.53,
    dm_mathematics=1.24, ubuntu_irc=0.88, bookcorpus2=0.75, europarl=0.73, hackernews=0.62, youtube_subtitles=0.60,
    philpapers=0.38, nih_exporter=0.30, enron_emails=0.14,
)  # fmt: skip
LICENCES = dict(
    wikipedia="CC BY-SA 3.0", stackexchange="CC BY-SA", dm_mathematics="Apache 2.0", gutenberg="public domain (US)",
    freelaw="public domain (US)", uspto="public domain (US)", nih_exporter="public domain (US)", github="by repository",
    arxiv="by paper", pubmed_central="by paper", philpapers="by paper", pile_cc="Common Crawl terms of use",
)  # fmt: skip


def get_config():
    c = ml_collections.ConfigDict()
    source = lambda name: dict(files=f"raw/{name}/*.jsonl.zst", licence=LICENCES.get(name, ""))
    c.sources = {name: source(name) for name in WEIGHTS}
    c.stages = ("repair", "exact_dedup", "near_dedup", "decontaminate")
    c.near_dedup = dict(threshold=0.5)
    c.decontaminate = dict(files=("evaluation/*.jsonl",), ngram_words=13)
    c.tokenizer = dict(name="train", train=dict(vocab_size=50_257))
    return c
