"""Writes a small data folder for the recipes of this folder: sentences that a small vocabulary makes up.

python examples/made_up_text.py corpus
"""

import random
import sys
from pathlib import Path

WORDS = "the a one old young mesh ship plan device sails builds splits finds slowly well".split()  # noqa: SIM905


def write_text(folder, documents=40, words=300):
    """Documents of random sentences, always the same."""
    chosen = random.Random(0)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        Path(folder, f"{number:03}.txt").write_text(" ".join(chosen.choices(WORDS, k=words)) + ".\n")


if __name__ == "__main__":
    write_text(sys.argv[1] if len(sys.argv) > 1 else "corpus")
