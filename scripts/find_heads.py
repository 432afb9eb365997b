"""Finds previous-token, first-token and induction heads of a language model.

    python scripts/find_heads.py [MODEL_FOLDER]

Reads random tokens that are said twice and prints, for every head, the mean weight on the previous
token, on the first token, and on the token after the earlier occurrence.
"""

import argparse

from probe import probe
from regard.lm import LanguageModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin", help="folder of the model")
    parser.add_argument("--length", type=int, default=60, help="tokens that are repeated")
    options = parser.parse_args()
    scores = probe(LanguageModel.load(options.model), length=options.length)
    print("head   previous  first  induction  entropy")
    for layer, row in enumerate(scores.previous):
        for head in range(len(row)):
            at = layer, head
            print(
                f"L{layer}H{head}  {scores.previous[at]:9.3f}  {scores.first[at]:5.3f}  "
                f"{scores.induction[at]:9.3f}  {scores.entropy[at]:7.3f}  {scores.role(*at)}"
            )


if __name__ == "__main__":
    main()
