"""How often a 95 % interval misses the truth in simulated evaluation sets; a table in Markdown.

    python benchmarks/intervals.py [--sets 4000]

A set has conversations of one or several answers. Answers have 5 to 60 rounds; conversations are easy or hard (gamma,
shape 4), which all their answers share, and for each of two equally good drafters easier or harder still (gamma, shape
12). So the acceptance length is 3 and the difference of two is 0. The intervals are those of the reports
(dflash/decoding/statistics.py) and, beside them, those between the 2.5 and the 97.5 percentile of the same resamples.

B resamples, G conversations
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from dflash.decoding.statistics import percentile_interval, resampled_sums, sums_of_conversations

SETS = [(4, 1), (6, 1), (8, 1), (12, 1), (20, 1), (20, 4), (60, 1)]  # conversations, answers of each
TRUE_LENGTH = 3.0


def answered(generator: np.random.Generator, *, conversations: int, answers: int) -> NDArray[np.float64]:
    """(G, 3): the rounds of each conversation, and what two drafters have accepted in them, in the mean 2 a round."""
    rounds = generator.integers(5, 60, size=conversations * answers)
    ease = generator.gamma(4, 1 / 4, size=conversations).repeat(answers)
    columns = [rounds]
    for _ in range(2):
        strength = generator.gamma(12, 1 / 12, size=conversations).repeat(answers)
        columns.append(generator.poisson((TRUE_LENGTH - 1) * rounds * ease * strength))
    return sums_of_conversations(np.stack(columns, axis=1), np.arange(conversations).repeat(answers).tolist())


def misses(conversations: int, answers: int, *, sets: int) -> list[float]:
    """Shares of sets: of the length and the difference as reported, then of both between the plain percentiles."""
    generator = np.random.default_rng(0)
    missed = np.zeros(4)
    for seed in range(sets):
        sums_B3 = resampled_sums(answered(generator, conversations=conversations, answers=answers), seed=seed)
        length_B = 1 + sums_B3[:, 1] / sums_B3[:, 0]
        difference_B = (sums_B3[:, 1] - sums_B3[:, 2]) / sums_B3[:, 0]
        for at, num_drawn in ((0, conversations), (2, None)):
            for place, (values_B, truth) in enumerate(((length_B, TRUE_LENGTH), (difference_B, 0.0)), at):
                low, high = percentile_interval(values_B, num_drawn=num_drawn)
                missed[place] += not low <= truth <= high
    return (missed / sets).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=4000, help="of each kind")
    options = parser.parse_args()
    print("| conversations | acceptance length | difference | by the 2.5 and 97.5 percentiles: length | difference |")
    print("|--:|--:|--:|--:|--:|")
    for conversations, answers in SETS:
        name = f"{conversations} of {answers} answers" if answers > 1 else str(conversations)
        shares = " | ".join(f"{100 * share:.1f} %" for share in misses(conversations, answers, sets=options.sets))
        print(f"| {name} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
