"""Evaluates a checkpoint: held-out prompts are answered and scored, and nothing is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import Config
from megarl.evaluation.folder import write_evaluation
from megarl.evaluation.summary import summarize, table
from megarl.trainer.build import build_policy
from megarl.trainer.experience.evaluate import answered, ks_of, records_of
from megarl.trainer.experience.scores import scorer
from megarl.trainer.layouts import generation_layout
from megarl.trainer.records.start_line import start_line
from megarl.trainer.session.run import Run
from megarl.trainer.stopped import RunStopped


def flow(run: Run) -> None:
    """Answer each prompt of `data.val_files` `rollout.val_kwargs.n` times, and write eval.json and samples.jsonl."""
    inputs, world = run.inputs, run.world
    actor = run.add("actor", build_policy(inputs, run.groups))
    generation = run.generation(actor)
    score = scorer(run)
    model, n = inputs.config.actor_rollout_ref.model, inputs.config.actor_rollout_ref.rollout.val_kwargs.n
    run.report.say(f"evaluating {model.checkpoint or model.path}: {n} x {len(inputs.val_prompts)} responses")
    run.report.say(start_line(inputs, world, [], run.records.generations))
    replicas = generation_layout(inputs.config).replicas
    mine = n * len(inputs.val_prompts[::replicas])  # of the first replica, which speaks
    what = "responses" if replicas == 1 else f"responses of one of {replicas} replicas"
    with run.report.counting(mine, what) as one_more:
        rollouts = answered(run, generation, score, lambda place, rollout: one_more())
    records = records_of(rollouts, inputs, world)
    summaries = summarize(records, ks_of(inputs))
    if world.rank == 0:
        try:
            write_evaluation(inputs.config.trainer.run_dir, _settings(inputs.config), records, summaries)
        except OSError as e:
            raise RunStopped(f"the evaluation cannot be written: {e}") from e
    run.report.show(table(summaries, model.checkpoint or model.path))
    run.report.say(f"eval.json and samples.jsonl are in {inputs.config.trainer.run_dir}")


def _settings(config: Config) -> Mapping[str, Any]:
    """Return the settings that an evaluation depends on, beside its prompts."""
    roles = config.actor_rollout_ref
    sampling = roles.rollout.val_kwargs.model_dump(exclude={"k"})
    return {
        "model": roles.model.checkpoint or roles.model.path,
        "seed": config.data.seed,
        **sampling,
        "max_prompt_length": config.data.max_prompt_length,
        "max_response_length": config.data.max_response_length,
        "stop": list(roles.rollout.stop),
        "reward": config.reward.name,
        "dtype": roles.model.dtype,
        "engine": roles.rollout.name,
    }
