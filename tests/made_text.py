"""Made-up English for the tests of data preparation: sentences that no rule drops, the same for the same seed."""

import json
import random

WORDS = (
    "the of and to in that it was for on with as at by from they she we there have which this had not are were would "
    "what their when who will more about time some could other than then now only its over also after two first "
    "because new people how our work life year where before great world still own see men long get here between both "
    "under never day same another know while last might us old year off come since against go came right used take "
    "three states himself few house use during without again place around however home small found river mountain "
    "market teacher window garden letter bridge summer village ocean paper engine harvest winter lantern orchard"
).split()


def sentence(rng, words=14):
    """One sentence of about so many words."""
    chosen = [rng.choice(WORDS) for _ in range(max(4, words + rng.randint(-4, 4)))]
    return " ".join(chosen).capitalize() + "."


def text(seed, words=120):
    """A document of about so many words, in lines of a few sentences."""
    rng, lines, left = random.Random(seed), [], words
    while left > 0:
        lines.append(" ".join(sentence(rng) for _ in range(rng.randint(2, 4))))
        left -= len(lines[-1].split())
    return "\n".join(lines)


def write_jsonl(path, texts):
    """The texts as JSON lines with ids 0, 1, ...; returns the path."""
    path.write_text("".join(json.dumps({"id": str(i), "text": each}) + "\n" for i, each in enumerate(texts)))
    return path
