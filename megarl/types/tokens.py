"""Holds the tokens of a response: the policy's, and an environment's between them; or their outline, where other ranks
have them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from zlib import crc32

from megarl.types.routed_experts import RoutedExperts


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Holds tokens one after another, in arrays: a step may have 10^8.

    Attributes:
        ids: int32 ("i").
        logp: float32 ("f"), log-probability of each token under the distribution it was drawn from (temperature and
            filters applied), nats. Greedy: the distribution at temperature 1, unfiltered. 0: an environment said it.
        sampled: a byte for each token, 1 where the policy drew it and 0 where an environment said it; None: all drawn.
        versions: (version, tokens) one after another: how many tokens were added with which version of the weights.
        routed: experts that an engine chose for the first tokens of prompt and response together, each time it fed the
            model a token for the first time; None: not recorded.
    """

    ids: array[int] = field(default_factory=lambda: array("i"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    sampled: bytes | None = None
    versions: tuple[tuple[int, int], ...] = ()
    routed: RoutedExperts | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def drawn(self, ids: Iterable[int], logp: Sequence[float]) -> Tokens:
        """Append tokens that an engine has drawn."""
        added = array("i", ids)
        assert len(added) == len(logp), f"{len(added)} tokens came with {len(logp)} log-probabilities"
        sampled = None if self.sampled is None else self.sampled + b"\x01" * len(added)
        return replace(self, ids=self.ids + added, logp=self.logp + array("f", logp), sampled=sampled)

    def observed(self, ids: Iterable[int]) -> Tokens:
        """Append tokens that an environment has said."""
        added = array("i", ids)
        sampled = (self.sampled or b"\x01" * len(self)) + b"\x00" * len(added)
        return replace(self, ids=self.ids + added, logp=self.logp + array("f", [0.0]) * len(added), sampled=sampled)

    def with_version(self, version: int) -> Tokens:
        """Record the version of the weights for the newest tokens, which have none yet."""
        earlier = self.versions
        added = len(self) - sum(tokens for _, tokens in earlier)
        if added and earlier and earlier[-1][0] == version:
            earlier, added = earlier[:-1], added + earlier[-1][1]
        return replace(self, versions=(*earlier, (version, added)) if added else earlier)

    @property
    def observed_count(self) -> int:
        """Count the tokens that an environment said."""
        return 0 if self.sampled is None else self.sampled.count(0)

    @property
    def digest(self) -> int:
        """Digest the token ids: a checksum, CRC-32."""
        return crc32(self.ids.tobytes())

    def outline(self, holder: int) -> Outline:
        """Tell what ranks know that do not hold the tokens.

        Args:
            holder: the replica that does.
        """
        digest = self.digest
        return Outline(
            holder=holder,
            length=len(self),
            digest=digest,
            digest_of_last_turn=digest if self.sampled is None else self.last_turn.digest,
            observed_count=self.observed_count,
            versions=self.versions,
            routed=None if self.routed is None else replace(self.routed, data=b""),
        )

    @property
    def last_turn(self) -> Tokens:
        """Cut off all but the last turn, if that is the policy's; else everything."""
        if self.sampled is None:
            return Tokens(ids=self.ids, logp=self.logp)
        began = self.sampled.rfind(b"\x00") + 1
        return Tokens(ids=self.ids[began:], logp=self.logp[began:])

    @property
    def turns(self) -> list[tuple[bool, array[int]]]:
        """Split the tokens into turns: (whether the policy spoke, the token ids)."""
        sampled = self.sampled or b"\x01" * len(self)
        places = [0, *(i for i in range(1, len(self)) if sampled[i] != sampled[i - 1]), len(self)]
        return [(bool(sampled[a]), self.ids[a:b]) for a, b in pairwise(places) if a < b]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """Tells of a response what every rank knows, where other ranks have its tokens.

    Attributes:
        holder: the replica whose ranks have them.
        length: how many there are.
        digest, digest_of_last_turn, observed_count, versions: see `Tokens`.
        routed: in which form experts were recorded, without any; None: they were not.
    """

    holder: int
    length: int
    digest: int
    digest_of_last_turn: int
    observed_count: int
    versions: tuple[tuple[int, int], ...]
    routed: RoutedExperts | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def last_turn(self) -> Outline:
        """Tell of the last turn; its length and versions are not known."""
        return replace(self, digest=self.digest_of_last_turn)
