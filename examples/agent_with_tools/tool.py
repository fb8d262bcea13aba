"""A tool of one's own: the model writes <calc>12*7</calc>, and reads the result before it goes on."""

import re

from megarl import Turn


class Multiplication:
    """One object per episode. `answer` comes from environment.args."""

    def __init__(self, *, answer: str = "={result};") -> None:
        self.answer = answer

    def reset(self, row: dict) -> None:
        """The row that the episode is about; what it returns stands before the prompt: here nothing."""

    def step(self, response: str) -> Turn:
        asked = re.search(r"<calc>(\d+)\*(\d+)</calc>$", response)
        if asked is None:
            return Turn(done=True)
        return Turn(observation=self.answer.format(result=int(asked[1]) * int(asked[2])))

    def close(self) -> None:
        """When the episode is over, however it ended."""
