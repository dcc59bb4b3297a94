"""Runs datatrove's filters, in datatrove's own environment: lines of JSON text in, lines of reasons out ("" for kept).

python tests/corpus/datatrove_decisions.py documents.jsonl decisions.jsonl
"""

import json
import sys

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

FILTERS = {
    "gopher": GopherQualityFilter(),
    "repetition": GopherRepetitionFilter(),
    "fineweb": FineWebQualityFilter(),
    "c4": C4QualityFilter(),
    "c4_keeping_lines": C4QualityFilter(filter_no_terminal_punct=False),  # as FineWeb uses it
}


def main(documents: str, decisions: str) -> None:
    with open(documents, encoding="utf-8") as lines, open(decisions, "w", encoding="utf-8") as out:
        for number, line in enumerate(lines):
            row = {}
            for name, rules in FILTERS.items():
                document = Document(text=json.loads(line), id=str(number))
                verdict = rules.filter(document)
                row[name] = "" if verdict is True else verdict[1]
                if name.startswith("c4") and verdict is True:
                    row[f"{name}_text"] = document.text
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
