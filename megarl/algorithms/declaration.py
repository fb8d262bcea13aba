"""Declares algorithms: their source, the keys that they read, and what a run must compute for them. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Names what a run must compute before the advantages or the loss.

    Attributes:
        reference: log-probabilities of a frozen copy of the policy, `Batch.ref_logp`.
        critic: values of a critic, `Batch.values`.
        teacher: log-probabilities of a teacher, `Batch.teacher_logp`.
        greedy: scores of the greedy responses, `Batch.greedy_rewards`.
        old_logp: `Batch.old_logp` before the update begins. A loss that uses them for the ratio alone does not need
            them: in the only update on a batch the ratio is 1.
        samples: responses per prompt, at least.
    """

    reference: bool = False
    critic: bool = False
    teacher: bool = False
    greedy: bool = False
    old_logp: bool = False
    samples: int = 1

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            reference=self.reference or other.reference,
            critic=self.critic or other.critic,
            teacher=self.teacher or other.teacher,
            greedy=self.greedy or other.greedy,
            old_logp=self.old_logp or other.old_logp,
            samples=max(self.samples, other.samples),
        )

    def words(self) -> list[str]:
        """Name the needs for people: ["reference", "2 samples per prompt"]."""
        named = {
            "reference": self.reference,
            "critic": self.critic,
            "teacher": self.teacher,
            "greedy responses": self.greedy,
            f"{self.samples} samples per prompt": self.samples > 1,
        }
        return [name for name, needed in named.items() if needed]


@dataclass(frozen=True, kw_only=True)
class About:
    """Holds the declaration of an algorithm.

    Attributes:
        paper: where it comes from.
        keys: configuration keys that it reads.
        sharded: the estimator takes a batch that holds this rank's tokens only; else every rank gets all tokens.
    """

    paper: str = ""
    keys: tuple[str, ...] = ()
    needs: Needs = Needs()
    sharded: bool = False


def about(
    paper: str, *, keys: Sequence[str] = (), needs: Needs | None = None, sharded: bool = False
) -> Callable[[T], T]:
    """Decorate a function or class with its declaration, for checks before a run and for `megarl algorithms`."""

    def declare(thing: T) -> T:
        thing.about = About(paper=paper, keys=tuple(keys), needs=needs or Needs(), sharded=sharded)  # type: ignore[attr-defined]
        return thing

    return declare


def about_of(thing: Any) -> About:
    """Return the declaration of an algorithm. An undeclared algorithm gets `old_logp` and no extra model."""
    declared = getattr(thing, "about", None)
    return declared if isinstance(declared, About) else About(needs=Needs(old_logp=True))


def option_keys(section: str, loss: type) -> tuple[str, ...]:
    """List the configuration keys of a loss's options: the section has a key for each field of the dataclass."""
    return tuple(f"{section}.{option.name}" for option in fields(loss))


def with_options(loss: type[T], section: Any) -> T:
    """Construct a loss, a dataclass, with the values that a section of the configuration has for its fields."""
    return loss(**{option.name: getattr(section, option.name) for option in fields(loss)})  # type: ignore[arg-type]
