"""Makes remarks on a run's settings after its first step."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.trainer.inputs import Inputs
from megarl.trainer.needs import needs_of
from megarl.types import Rollouts


def remarks_on(rollouts: Rollouts, inputs: Inputs) -> Iterator[str]:
    """Yield a line for each reason why nothing can be learnt from the rollouts, with what to look at."""
    if all(rollout.finish_reason == "length" for rollout in rollouts):
        limit = inputs.config.data.max_response_length
        yield (
            f"no response ended before data.max_response_length = {limit} tokens; look at the stop tokens "
            f"({inputs.describe_stop_tokens()}), at the chat template, or raise the limit"
        )
    needs = needs_of(inputs.config)
    if needs.critic or needs.greedy or needs.teacher:  # equal scores say something there
        return
    compared = rollouts.groups if needs.samples > 1 else [range(len(rollouts))]
    groups = [{r for i in places if (r := rollouts[i].reward) is not None} for places in compared]
    if all(len(scores) < 2 for scores in groups):
        seen = sorted(set().union(*groups))
        scores = f"{seen[0]:g}" if len(seen) == 1 else f"{seen[0]:g} to {seen[-1]:g}"
        where = "in every group all" if needs.samples > 1 else "all"
        environment, reward = inputs.config.environment, f"reward.name = {inputs.config.reward.name}"
        scorer = f"what {environment.agent or environment.name} returns" if environment.answers else reward
        yield (
            f"{where} responses scored the same ({scores}), so there is nothing to learn from; look at rollouts/ in "
            f"the run's folder, at {scorer}, and at how hard the prompts are"
        )
