"""datatrove's rules of quality over the documents of `jaxscale bench data`, in an environment of datatrove's own:

python -m venv E && E/bin/pip install 'datatrove[processing,multilingual]==0.10.1'
jaxscale bench data --input='raw/*.jsonl' --config.gopher_repetition.words=spacy --config.gopher_quality.words=spacy \\
    --against='E/bin/python docs/datatrove_rates.py'
"""

import json
import sys
import time

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

FILTERS = {
    "gopher_repetition": GopherRepetitionFilter(),
    "gopher_quality": GopherQualityFilter(),
    "c4": C4QualityFilter(),
    "fineweb": FineWebQualityFilter(),
}


def main(file: str) -> None:
    """Prints the seconds of processor time that all rules take over all documents."""
    with open(file, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for rules in FILTERS.values():  # what is loaded lazily is loaded now
        rules.filter(Document(text=texts[0], id="0"))
    begun = time.process_time()
    for number, text in enumerate(texts):
        for rules in FILTERS.values():  # each sees the document as it came
            rules.filter(Document(text=text, id=str(number)))
    print(json.dumps({"seconds": time.process_time() - begun, "stages": list(FILTERS)}))


if __name__ == "__main__":
    main(sys.argv[1])
