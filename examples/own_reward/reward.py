"""A reward of one's own: 1 for the right number, part of it for one that is near."""

import re


def score(response: str, row: dict, *, near: float = 0.5) -> dict:
    """`row` is the data's row; its reference answer is row["answer"]. `near` comes from reward.args."""
    found = re.search(r"-?\d+", response)
    if found is None:
        return {"score": 0.0, "is_number": 0.0}
    distance = abs(int(found[0]) - int(row["answer"]))
    return {"score": 1.0 if distance == 0 else near / (1 + distance), "is_number": 1.0, "distance": distance}
