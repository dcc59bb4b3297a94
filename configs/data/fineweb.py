"""FineWeb (Penedo et al., arXiv:2406.17557, section 3 and appendix), with the paper's extraction, filters and MinHash.

    jaxscale prepare --config=configs/data/fineweb.py --input='crawl/*.warc.gz' --output=shards/fineweb

Differences: py3langid replaces fastText, and its probabilities have a different scale; there is no URL blocklist (set
url_blocklist.lists, and put the stage first). Run it once per snapshot of the crawl, because the paper deduplicates
each snapshot separately. The published corpus (15e12 tokens) is under ODC-BY 1.0; its content is subject to Common
Crawl's terms of use.
"""

import ml_collections


def get_config():
    c = ml_collections.ConfigDict()
    c.sources = dict(fineweb=dict(files="crawl/*.warc.gz", licence="Common Crawl terms of use"))
    c.read = dict(html_text="trafilatura", html_mode="precision")
    c.stages = (
        "repair", "language", "gopher_repetition", "gopher_quality", "c4", "fineweb", "near_dedup",
        "decontaminate", "pii",
    )  # fmt: skip
    c.language = dict(keep=("en",), min_probability=0.65)
    c.gopher_repetition = dict(words="spacy")  # the paper ran datatrove's rules, where each mark counts as a word
    c.gopher_quality = dict(words="spacy")
    # Lines may end without punctuation: that rule removed too much (section 3.5). Numbers are from datatrove's recipe.
    c.c4 = dict(terminal_punctuation=False, min_line_words=3, min_sentences=5)
    c.near_dedup = dict(threshold=0.75, ngram_words=5, permutations=112, bands=14, rows=8)
    c.decontaminate = dict(files=("none",))  # as in the paper; list the evaluation sets that you will report on
    c.pii = dict(phone="off", card="off", iban="off", national_id="off")  # the paper redacts e-mail and IP addresses
    c.tokenizer = dict(name="train", train=dict(vocab_size=50_257))
    return c
