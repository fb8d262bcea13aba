"""The RL loop of the PPO family: generate, score, log-probabilities, advantages, update."""

from __future__ import annotations

from functools import partial

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.kl import AdaptiveKlController
from megarl.algorithms.rollout_correction import correct_rollouts
from megarl.checkpoint.folder import read_state
from megarl.checkpoint.store import load_checkpoint, prune_checkpoints, save_checkpoint
from megarl.data.sampler import PromptSampler
from megarl.hybrid.engine import HybridEngine
from megarl.parallel.groups import Groups
from megarl.roles.reference import Reference
from megarl.telemetry.timers import PhaseTimers
from megarl.trainer.build import build_actor, policy_loss
from megarl.trainer.evaluate import evaluate
from megarl.trainer.inputs import Inputs
from megarl.trainer.memory_report import MemoryReport
from megarl.trainer.micro_batches import MiniBatch, plan_micro_batches
from megarl.trainer.model_files import write_model_files
from megarl.trainer.report import Report
from megarl.trainer.scoring import score
from megarl.trainer.step_metrics import step_metrics
from megarl.trainer.warmup import warm_up
from megarl.types import Batch, Prompt


class PPOTrainer:
    """Owns the roles of a run and its position in it."""

    def __init__(self, inputs: Inputs, groups: Groups, report: Report) -> None:
        self.inputs, self.groups, self.report = inputs, groups, report
        self.config = inputs.config
        self.rollout = self.config.actor_rollout_ref.rollout
        self.timers = PhaseTimers(groups.device)
        self.memory = MemoryReport(self.config, inputs.arch, groups, report)
        self.actor = build_actor(inputs, groups)
        self.hybrid = HybridEngine(
            self.config.actor_rollout_ref,
            self.actor,
            self.timers,
            max_model_len=inputs.max_sequence_length,
            decode=inputs.tokenizer.decode,
        )
        self.reference: Reference | None = None  # a copy of the actor as the RL steps begin
        self.loss = policy_loss(self.config)
        control = self.config.algorithm.kl_ctrl
        self.kl_control = AdaptiveKlController(control.kl_coef, control.target_kl, control.horizon)
        data = self.config.data
        self.sampler = PromptSampler(len(inputs.train_prompts), data.train_batch_size, data.shuffle, data.seed)
        self.step = 0

    def fit(self) -> None:
        """The whole run, from where it stands."""
        self._begin()
        with self.report.phase("RL", self.inputs.total_steps, done=self.step):
            for step in range(self.step + 1, self.inputs.total_steps + 1):
                self.step = step
                metrics = self.train_step()
                if self._due(self.config.trainer.test_freq):
                    metrics |= self.validate()
                if self._due(self.config.trainer.save_freq):
                    self.save()
                metrics |= self.memory.measured(self.timers.collect_peaks())
                self.report.rl_step(self.step, metrics, self.timers.collect())

    def train_step(self) -> dict[str, float]:
        """One RL step; returns its metrics."""
        temperature, timers = self.rollout.temperature, self.timers
        with self.hybrid.generation() as engine, timers("generate"):
            rollouts = engine.generate(
                self.next_prompts(),
                self.rollout.n,
                self.inputs.sampling(validation=False),
                seed=self.config.data.seed,
                round_=self.step,
            )
        with timers("reward"):
            rollouts = score(rollouts, self.inputs, self.groups, self.report.say)
        batch = rollouts.to_batch()
        plan = plan_micro_batches(batch, self.config, self.groups)
        with timers("log_probs"):
            if self.reference is not None:
                self.reference.weights.prefetch()
            batch = batch.with_(old_logp=self.actor.log_probs(batch, plan.micro_batches, temperature))
        if self.reference is not None:
            with timers("ref"):
                batch = batch.with_(ref_logp=self.reference.log_probs(batch, plan.micro_batches, temperature))
        batch = correct_rollouts(batch, self.config.algorithm.rollout_correction)
        batch = compute_advantages(batch, self.config.algorithm, self.kl_control.coefficient)
        with timers("update"):
            epochs = range(self.config.actor_rollout_ref.actor.ppo_epochs)
            updates = [self.update(batch, mini_batch) for _ in epochs for mini_batch in plan.mini_batches]
        self._steer_kl(batch)
        self.report.samples(self.step, rollouts)
        return step_metrics(rollouts, batch, updates)

    def update(self, batch: Batch, mini_batch: MiniBatch) -> dict[str, float]:
        """One optimizer step."""
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        weights = token_weights(batch, mini_batch.sequences, mode, self.config.data.max_response_length)
        return self.actor.update(
            batch, mini_batch.micro_batches, weights, self.loss, temperature=self.rollout.temperature
        )

    def next_prompts(self) -> list[Prompt]:
        return [self.inputs.train_prompts[i] for i in self.sampler.next()]

    def validate(self) -> dict[str, float]:
        """Metrics on the held-out prompts; none where there are no held-out prompts."""
        if not self.inputs.val_prompts:
            return {}
        with self.timers("validate"):
            return evaluate(self.inputs, self.hybrid, self.report.say)

    def save(self) -> None:
        """A checkpoint of everything that the next step depends on."""
        with self.timers("save"):
            state = {"step": self.step, "sampler": self.sampler.state(), "kl_coef": self.kl_control.coefficient}
            save_checkpoint(
                self.config.trainer.run_dir,
                self.step,
                self._sharded_state(loading=False),
                state,
                write_model=partial(write_model_files, self.config, self.actor),
                control=self.groups.control,
            )
            if self.groups.rank == 0:
                prune_checkpoints(self.config.trainer.run_dir, self.config.trainer.max_ckpt_to_keep)

    def _begin(self) -> None:
        """Everything before the first RL step: the warm-up and the first validation, or the checkpoint."""
        resume_from = self.inputs.resume_from
        if resume_from is None and self.config.warmup.total_training_steps:
            warm_up(self.inputs, self.actor, self.report)
        self.actor.start_optimizer(self.config.actor_rollout_ref.actor.optim, self.inputs.optimizer_steps)
        if self.config.needs_reference:
            self.reference = Reference(self.actor)
            self.hybrid.leaving.append(self.reference.weights)
        if resume_from is not None:
            self._resume(resume_from)
        elif self.config.trainer.val_before_train and self.inputs.val_prompts:
            metrics = self.validate()
            self.report.rl_step(0, metrics, self.timers.collect())
            self.report.say(f"held-out accuracy before the first RL step: {metrics['val/accuracy']:.1%}")

    def _resume(self, folder: str) -> None:
        loaded = load_checkpoint(folder, self._sharded_state(loading=True), rng=True)
        self.actor.load_training_state(loaded["actor"])
        if self.reference is not None:
            self.reference.load_sharded(loaded["reference"], "reference.")
        state = read_state(folder)
        self.step, self.kl_control.coefficient = state["step"], state["kl_coef"]
        self.sampler.load_state(state["sampler"])

    def _sharded_state(self, *, loading: bool) -> dict[str, object]:
        state: dict[str, object] = {"actor": self.actor.sharded_training_state(loading=loading)}
        if self.reference is not None:
            state["reference"] = self.reference.sharded_state("reference.")
        return state

    def _steer_kl(self, batch: Batch) -> None:
        if self.config.algorithm.kl_ctrl.type == "adaptive" and batch.kl_in_reward is not None:
            self.kl_control.update(float(batch.kl_in_reward.mean()), len(batch))

    def _due(self, every: int) -> bool:
        """Whether something with this frequency happens now: -1 is only at the end, 0 never."""
        last = self.step == self.inputs.total_steps
        return every != 0 and (last or (every > 0 and self.step % every == 0))
