"""Lets a checkpoint or a Hugging Face folder answer whatever it is asked, on one rank.

Builds what a run generates with: the weights in the training layout, an engine that shares them; no data, no rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from megarl.hybrid.generation import Generation
from megarl.hybrid.residency import Residency
from megarl.parallel.generation_groups import generation_groups
from megarl.parallel.train_groups import train_groups
from megarl.parallel.world import World
from megarl.rollout.engine import Request
from megarl.rollout.replicas import sample_seed
from megarl.telemetry.timers import PhaseTimers
from megarl.trainer.build import build_policy
from megarl.trainer.inputs import Inputs
from megarl.trainer.layouts import generation_layout, train_layout
from megarl.types import Completion

Watch = Callable[[int, Sequence[int]], None]
"""Called after each step with a prompt's number and the tokens of its response so far."""


class Answering:
    """Answers prompts. It is ready when it is constructed; the process is in a world of one rank.

    Attributes:
        inputs: with the tokenizer.
    """

    def __init__(self, inputs: Inputs, world: World) -> None:
        self.inputs = inputs
        config, residency, timers = inputs.config, Residency(), PhaseTimers(world.device)
        roles = config.actor_rollout_ref
        actor = build_policy(inputs, train_groups(world, train_layout(config), config.data.seed))
        residency.add(actor.kind, actor.memory)
        self._generation = Generation(
            actor,
            generation_groups(world, generation_layout(config)),
            rollout=roles.rollout,
            reshard=roles.reshard,
            model_path=roles.model.folder,
            residency=residency,
            timers=timers,
            max_model_len=inputs.max_sequence_length,
            decode=inputs.tokenizer.decode,
        )
        self._awake = ExitStack()
        self._awake.enter_context(self._generation.phase())

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        first: int = 0,
        watch: Watch = lambda i, tokens: None,
        finished: Callable[[int, Completion], None] = lambda i, completion: None,
        leaves: Callable[[], bool] = lambda: False,
    ) -> list[Completion]:
        """Complete the prompts, in their order; sampled as `rollout.val_kwargs` says.

        Args:
            prompts: token ids.
            first: number of the first prompt. With `data.seed` a prompt's number makes its seed: that of a validation's
                prompt with the same number.
            finished: told of a prompt's completion as soon as it is there.
            leaves: asked after each step whether to stop; what is not finished then has no `finish_reason`.

        Raises:
            ValueError: a prompt is too long, in one line.
        """
        engine = self._generation.engine
        engine.submit([self._request(i, first, prompt) for i, prompt in enumerate(prompts)])
        completions: dict[int, Completion] = {}
        while engine.busy:
            for i, completion in engine.step().items():
                completions[i] = completion
                watch(i, completion.response.ids)
                finished(i, completion)
            for i, tokens in engine.under_way().items():
                watch(i, tokens)
            if leaves():
                completions.update(engine.interrupt())
        return [completions[i] for i in range(len(prompts))]

    def _request(self, i: int, first: int, prompt: Sequence[int]) -> Request:
        """Make the request of a prompt; its response may take the rest of the context."""
        params, context = self.inputs.sampling(validation=True), self.inputs.max_sequence_length
        room = context - len(prompt)
        if room < 1:
            raise ValueError(f"{len(prompt)} tokens leave no room for an answer in {context}; raise --context")
        seed = sample_seed(self.inputs.config.data.seed, 0, first + i, 0)
        limited = replace(params, max_tokens=min(params.max_tokens, room))
        return Request(key=i, prompt=list(prompt), params=limited, seed=seed)

    def close(self) -> None:
        """Give the engine's memory back."""
        self._awake.close()
        self._generation.close()
