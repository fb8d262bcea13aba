"""Lists the flows that `trainer.flow` can name, as the rest of the program knows them before one runs. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megarl.algorithms.declaration import Needs, about_of
from megarl.algorithms.registry import PREFERENCES
from megarl.config import Config
from megarl.data.formats import SEQUENCES, Format
from megarl.registry import Registry
from megarl.role_kinds import GENERATION, NAMES, RoleKind

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FlowKind:
    """Holds the facts of a flow that checks, prediction and resuming read. The defaults are those of a flow that
    declares none.

    Attributes:
        reads: what a row of the data is; None: what `data.format` says, or prompts.
        trains: whether it trains anything.
        last_loop: its last loop's place among all of them, and its name. With it a run that is done is known without
            being begun.
        validates: whether it validates on `data.val_files` and nothing else, always with the same metrics.
        scores: whether the model of `actor_rollout_ref` gets a score in place of its vocabulary.
        loss: the loss on the data's answers, of a configuration: it declares what it needs and which keys of
            `algorithm.preference` it reads.
        loss_key: the key that names this loss; "" if the flow does.
        compares_prompts: whether an answer is compared with those to other prompts of its batch.
        roles: models of the flow's own beside the policy, as `megarl plan` counts them: of the policy's shape, with the
            keys of `actor_rollout_ref.actor`.
    """

    reads: Format | None = None
    trains: bool = True
    last_loop: tuple[int, str] | None = None
    validates: bool = False
    scores: bool = False
    loss: Callable[[Config], Any] | None = None
    loss_key: str = ""
    compares_prompts: bool = False
    roles: tuple[RoleKind, ...] = ()


def flow(**facts: Any) -> Callable[[T], T]:
    """Return a decorator that declares facts of the `FlowKind` of a user's flow, by the names of its attributes."""

    def declare(function: T) -> T:
        function.kind = FlowKind(**facts)  # type: ignore[attr-defined]
        return function

    return declare


def _preference_loss(config: Config) -> Any:
    return PREFERENCES.load(config.algorithm.preference.loss_mode)


def _kto_loss(config: Config) -> Any:
    from megarl.algorithms.kto import kto

    return kto


_OF_ANSWERS: dict[str, Any] = {"last_loop": (0, "train"), "validates": True}

KINDS: Mapping[str, FlowKind] = {
    "ppo": FlowKind(reads="prompts", last_loop=(1, "rl"), validates=True),
    "sft": FlowKind(reads="demonstrations", **_OF_ANSWERS),
    "preference": FlowKind(
        reads="preferences", loss=_preference_loss, loss_key="algorithm.preference.loss_mode", **_OF_ANSWERS
    ),
    "kto": FlowKind(reads="judged", loss=_kto_loss, compares_prompts=True, **_OF_ANSWERS),
    "reward_model": FlowKind(reads="preferences", scores=True, **_OF_ANSWERS),
    "eval": FlowKind(reads="prompts", trains=False),
}

FLOWS: Registry[Callable[[Any], None]] = Registry(
    "trainer.flow", "flow", lazy={name: f"megarl.flows.{name}:flow" for name in KINDS}
)
"""What `trainer.flow` can name: functions of a `Run`."""


def flow_kind(config: Config) -> FlowKind:
    """Return the kind of the flow that a configuration names; the default kind if the flow is unknown or declares
    none."""
    name = config.trainer.flow
    if name in KINDS:
        return KINDS[name]
    try:
        declared: FlowKind = getattr(FLOWS.load(name), "kind", FlowKind())
    except ValueError:  # which is told when the flow is to run
        return FlowKind()
    return declared


def trains(config: Config) -> bool:
    """Tell whether the run trains anything."""
    return flow_kind(config).trains


def own_roles(config: Config) -> tuple[RoleKind, ...]:
    """Return the roles of the flow's own. Raises ValueError if they cannot be told apart, or are no roles."""
    roles, flow = flow_kind(config).roles, f"trainer.flow = {config.trainer.flow}"
    if not isinstance(roles, tuple) or not all(isinstance(role, RoleKind) for role in roles):
        raise ValueError(f"{flow}: its roles are no tuple of megarl.RoleKind, such as (Verifier.kind,)")
    names = [role.name for role in roles]
    if "" in names or len({*names, *NAMES}) < len(names) + len(NAMES):
        raise ValueError(f"{flow}: its roles are called {names}; give each a name of its own, not one of {[*NAMES]}")
    for role in roles:
        if {role.forward, role.update} & GENERATION:
            raise ValueError(f"{flow}: its role {role.name} computes in a phase of the engine; give it another one")
    return roles


def format_of(config: Config) -> Format:
    """Return `data.format`, or the format that the flow reads."""
    chosen = config.data.format
    return (flow_kind(config).reads or "prompts") if chosen == "auto" else chosen


def compared_together(config: Config) -> int:
    """Count the sequences of a row that stand in one micro-batch, since a loss compares them."""
    return SEQUENCES.get(format_of(config), 1)


def generates(config: Config) -> bool:
    """Tell whether responses are generated and scored: rows that are no prompts come with their answers."""
    return format_of(config) == "prompts"


def check_format(config: Config) -> None:
    """Raise ValueError if `data.format` is not what the flow reads."""
    reads, chosen = flow_kind(config).reads, config.data.format
    if reads is not None and chosen not in ("auto", reads):
        flow = config.trainer.flow
        raise ValueError(f"data.format = {chosen}: trainer.flow = {flow} reads {reads}; leave the key out")


def needs_of_answers(config: Config) -> Needs:
    """Return what a loss on the data's own answers needs to be computed."""
    loss = flow_kind(config).loss
    return Needs() if loss is None else about_of(loss(config)).needs
