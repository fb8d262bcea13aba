"""The tokens of a response: who said them, and with which weights."""

from __future__ import annotations

from array import array

from megarl.types import Tokens


def test_who_said_a_token() -> None:
    drawn = Tokens().drawn([5, 6], [-0.5, -0.25])
    assert (drawn.ids, drawn.logp, drawn.sampled) == (array("i", [5, 6]), array("f", [-0.5, -0.25]), None)
    assert drawn.turns == [(True, array("i", [5, 6]))] and len(drawn) == 2
    answered = drawn.observed([7]).drawn([8, 9], [-1.0, -2.0])
    assert answered.ids.tolist() == [5, 6, 7, 8, 9] and answered.logp.tolist() == [-0.5, -0.25, 0, -1, -2]
    assert answered.sampled == b"\x01\x01\x00\x01\x01"
    assert [(own, ids.tolist()) for own, ids in answered.turns] == [(True, [5, 6]), (False, [7]), (True, [8, 9])]
    assert [(own, ids.tolist()) for own, ids in Tokens().observed([7]).turns] == [(False, [7])]
    assert Tokens().turns == Tokens().observed([]).turns == [] and not Tokens()
    assert len(drawn) == 2  # as it was


def test_versions_count_the_tokens_that_came_with_them() -> None:
    first = Tokens().with_version(3).drawn([5, 6], [-1.0] * 2).with_version(3)
    assert Tokens().with_version(3).versions == () and first.versions == ((3, 2),)
    same = first.drawn([7], [-1.0]).with_version(3)
    assert same.versions == ((3, 3),) and same.with_version(4) == same
    assert same.observed([8]).drawn([9], [-1.0]).with_version(5).versions == ((3, 3), (5, 2))
