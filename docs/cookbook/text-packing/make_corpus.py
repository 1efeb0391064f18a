"""Write a corpus of short documents: sums, as lines of JSON."""

import json
import random
from pathlib import Path

DOCUMENTS = 4_000


def main() -> None:
    """Write all documents; the same ones in each run."""
    dice = random.Random(7)
    with Path("corpus.jsonl").open("w") as file:
        for _ in range(DOCUMENTS):
            terms = [dice.randrange(10) for _ in range(dice.randrange(2, 12))]
            text = f"{'+'.join(map(str, terms))}={sum(terms)}"
            print(json.dumps({"text": text}), file=file)


if __name__ == "__main__":
    main()
