"""Scores the tasks of reasoning-gym whose verifiers do no more than compare two texts, or two decimals.

The verifiers are `ProceduralDataset.score_answer` and `compute_decimal_reward` of reasoning-gym 0.1.25.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

_OF_TEXT = (
    "acre aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher count_bits count_primes "
    "course_schedule gcd isomorphic_strings largest_island lcm leg_counting letter_counting list_functions "
    "mahjong_puzzle maze modulo_grid number_filtering number_sequence ransom_note rotate_matrix rotten_oranges "
    "simple_equations simple_geometry string_manipulation string_splitting string_synthesis syllogism "
    "word_sequence_reversal"
)


def of_text(response: str, answer: str) -> float:
    """Score 1 for the answer, and its share of the characters if there are others beside it."""
    if not response:
        return 0.0
    if response == answer:
        return 1.0
    return len(answer) / len(response) if answer in response else 0.0


def of_decimals(response: str, answer: str) -> float:
    """Score as `of_text`, and 1 for the same number: "+01,000.00" is 1000."""
    response, answer = response.replace(",", ""), answer.replace(",", "")
    try:
        if Decimal(response) == Decimal(answer):
            return 1.0
    except ArithmeticError:
        pass
    return of_text(response, answer)


COMPARED: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(_OF_TEXT.split(), of_text),
    **dict.fromkeys(("chain_sum", "products"), of_decimals),
}
"""Task -> (response without blanks around it, the row's answer) -> score, 0 to 1."""
