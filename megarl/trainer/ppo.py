"""The RL loop of the PPO family: generate, score, log-probabilities, advantages, update."""

from __future__ import annotations

import signal
from collections.abc import Callable

from megarl.algorithms.advantages import compute_advantages
from megarl.algorithms.aggregation import token_weights
from megarl.algorithms.kl import AdaptiveKlController
from megarl.algorithms.policy_loss import supervised_loss
from megarl.algorithms.rollout_correction import correct_rollouts
from megarl.checkpoint.folder import Phase, Position
from megarl.data.sampler import PromptSampler
from megarl.hybrid.engine import HybridEngine
from megarl.parallel.groups import Groups
from megarl.roles.reference import Reference
from megarl.telemetry.timers import PhaseTimers
from megarl.trainer.agreement import check_same_values
from megarl.trainer.build import build_actor, policy_loss
from megarl.trainer.checkpointing import Checkpointing
from megarl.trainer.engine_check import check_gap
from megarl.trainer.evaluate import evaluate
from megarl.trainer.first_step import remarks_on
from megarl.trainer.inputs import Inputs
from megarl.trainer.memory_report import MemoryReport
from megarl.trainer.micro_batches import MiniBatch, plan_micro_batches
from megarl.trainer.nonfinite import NonFiniteUpdates
from megarl.trainer.report import Report
from megarl.trainer.resume import Start
from megarl.trainer.scoring import score
from megarl.trainer.step_metrics import step_metrics
from megarl.trainer.stop import StopRequest
from megarl.trainer.stopped import RunStopped
from megarl.types import Batch, Prompt, batch_of

Updates = list[dict[str, float]]
"""Metrics of each optimizer step of a training step."""


class PPOTrainer:
    """Owns the roles of a run and its position in it.

    Attributes:
        position: of the last step that is done, or of the one under way.
    """

    def __init__(self, inputs: Inputs, groups: Groups, report: Report, stop: StopRequest, start: Start) -> None:
        self.inputs, self.groups, self.report, self.stop, self.start = inputs, groups, report, stop, start
        self.config = inputs.config
        self.rollout = self.config.actor_rollout_ref.rollout
        self.timers = PhaseTimers(groups.device)
        self.memory = MemoryReport(self.config, inputs.arch, groups, report)
        self.actor = build_actor(inputs, groups, empty=start.folder is not None)
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
        data, warmup = self.config.data, self.config.warmup
        self.sampler = PromptSampler(len(inputs.train_prompts), data.train_batch_size, data.shuffle, data.seed)
        self.warmup_sampler: PromptSampler | None = None
        if warmup.total_training_steps:
            examples = len(inputs.demonstrations)
            self.warmup_sampler = PromptSampler(examples, warmup.train_batch_size, True, data.seed)
        self.checkpoints = Checkpointing(inputs, self.actor, start, report)
        self.position = start.position
        self._first_step = True  # of this process

    def fit(self) -> signal.Signals | None:
        """The whole run, from where it stands; returns the signal that stopped it, if one did."""
        self.stop.defer(self.config.trainer.stop_timeout, saves=self.config.trainer.save_freq != 0)
        if self.position.phase is Phase.WARMUP:
            if asked := self._warm_up():
                return asked
            self.position = Position(Phase.RL, 0)
        self._begin_rl()
        return self._steps("RL", self.inputs.total_steps, self.train_step)

    def train_step(self) -> Updates:
        """One RL step."""
        temperature, timers, step = self.rollout.temperature, self.timers, self.position.step
        check = self._checks_agreement()
        with self.hybrid.generation(verify=check) as engine, timers("generate"):
            rollouts = engine.generate(
                self.next_prompts(),
                self.rollout.n,
                self.inputs.sampling(validation=False),
                seed=self.config.data.seed,
                round_=step,
            )
        with timers("reward"):
            rollouts = score(rollouts, self.inputs, self.groups, self.report.say)
        self.report.samples(step, rollouts)
        if self._first_step:
            for remark in remarks_on(rollouts, self.inputs):
                self.report.warn(f"step {step}: {remark}")
        batch = rollouts.to_batch()
        plan = plan_micro_batches(batch, self.config, self.groups)
        with timers("log_probs"):
            if self.reference is not None:
                self.reference.weights.prefetch()
            batch = batch.with_(old_logp=self.actor.log_probs(batch, plan.micro_batches, temperature))
        check_gap(batch, self.config, step)
        if self.reference is not None:
            with timers("ref"):
                batch = batch.with_(ref_logp=self.reference.log_probs(batch, plan.micro_batches, temperature))
        batch = correct_rollouts(batch, self.config.algorithm.rollout_correction)
        batch = compute_advantages(batch, self.config.algorithm, self.kl_control.coefficient)
        if check:
            check_same_values(batch, self.groups, step)
        with timers("update"):
            epochs = range(self.config.actor_rollout_ref.actor.ppo_epochs)
            updates = [self.update(batch, mini_batch) for _ in epochs for mini_batch in plan.mini_batches]
        self._steer_kl(batch)
        self._first_step = False
        metrics = step_metrics(rollouts, batch, updates)
        if self._due(self.config.trainer.test_freq, self.inputs.total_steps):
            metrics |= self.validate()
        metrics |= self.memory.measured(self.timers.collect_peaks())
        self.report.rl_step(step, metrics, self.timers.collect())
        return updates

    def update(self, batch: Batch, mini_batch: MiniBatch) -> dict[str, float]:
        """One optimizer step."""
        mode = self.config.actor_rollout_ref.actor.loss_agg_mode
        weights = token_weights(batch, mini_batch.sequences, mode, self.config.data.max_response_length)
        return self.actor.update(
            batch, mini_batch.micro_batches, weights, self.loss, temperature=self.rollout.temperature
        )

    def warmup_step(self) -> Updates:
        """One step of the supervised warm-up: cross-entropy on demonstrations."""
        assert self.warmup_sampler is not None
        chosen = [self.inputs.demonstrations[i] for i in self.warmup_sampler.next()]
        batch = batch_of([e.prompt_ids for e in chosen], [e.response_ids for e in chosen], range(len(chosen)))
        (mini_batch,) = plan_micro_batches(batch, self.config, self.groups, whole=True).mini_batches
        weights = token_weights(batch, mini_batch.sequences, "token-mean", self.config.data.max_response_length)
        update = self.actor.update(batch, mini_batch.micro_batches, weights, supervised_loss, temperature=1.0)
        self.report.warmup_step(self.position.step, {"warmup/loss": update["actor/loss"]})
        return [update]

    def next_prompts(self) -> list[Prompt]:
        return [self.inputs.train_prompts[i] for i in self.sampler.next()]

    def validate(self) -> dict[str, float]:
        """Metrics on the held-out prompts; none where there are no held-out prompts."""
        if not self.inputs.val_prompts:
            return {}
        with self.timers("validate"):
            return evaluate(self.inputs, self.hybrid, self.report.say)

    def save(self) -> bool:
        """A checkpoint of everything that the next step depends on; returns whether it could be written."""
        warming = self.warmup_sampler if self.position.phase is Phase.WARMUP else None
        state = {
            "sampler": self.sampler.state(),
            "warmup_sampler": warming.state() if warming is not None else None,
            "kl_coef": self.kl_control.coefficient,
        }
        with self.timers("save"):
            return self.checkpoints.save(self.position, state)

    def _warm_up(self) -> signal.Signals | None:
        warmup = self.config.warmup
        if not warmup.total_training_steps:
            return None
        self.actor.start_optimizer(warmup.optim, warmup.total_training_steps)
        if self.start.folder is not None:
            self._resume(self.start.folder)
        return self._steps("warm-up", warmup.total_training_steps, self.warmup_step)

    def _begin_rl(self) -> None:
        """Everything before the first RL step of this process."""
        self.actor.start_optimizer(self.config.actor_rollout_ref.actor.optim, self.inputs.optimizer_steps)
        goes_on = self.start.folder if self.start.position.phase is Phase.RL else None
        if goes_on is not None and self._lacks_reference():
            self._resume(goes_on)  # the reference is then a copy of the actor as it is in the checkpoint
            goes_on = None
        if self.config.needs_reference:
            self.reference = self.checkpoints.reference = Reference(self.actor)
            self.hybrid.leaving.append(self.reference.weights)
        if goes_on is not None:
            self._resume(goes_on)
        elif self.config.trainer.val_before_train and self.inputs.val_prompts and self.position.step == 0:
            metrics = self.validate()
            self.report.rl_step(0, metrics, self.timers.collect())
            self.report.say(f"held-out accuracy before the first RL step: {metrics['val/accuracy']:.1%}")

    def _steps(self, name: str, total: int, one_step: Callable[[], Updates]) -> signal.Signals | None:
        """Steps of a phase to its end, or until a signal stops the run, which is returned."""
        trainer = self.config.trainer
        nonfinite = NonFiniteUpdates(trainer.on_nonfinite, self.position.step)
        with self.report.phase(name, total, done=self.position.step):
            while self.position.step < total:
                if asked := self.stop.agreed(self.groups):
                    if trainer.save_freq and self.checkpoints.position != self.position and self.position.step:
                        self.save()
                    return asked
                self.position = Position(self.position.phase, self.position.step + 1)
                updates = one_step()
                if what := nonfinite.after_step(self.position.step, [bool(u["actor/skipped"]) for u in updates]):
                    self._recover(what, nonfinite)
                elif self._due(trainer.save_freq, total):
                    self._save_in_loop(total)
        return None

    def _save_in_loop(self, total: int) -> None:
        """Raises RunStopped if the run's last checkpoint cannot be written: work would be lost with exit code 0."""
        if not self.save() and self.position == Position(Phase.RL, total):
            raise RunStopped(
                f"all {total} steps are done, but not saved; make room and start again to repeat those since "
                f"{self.checkpoints.latest or 'the beginning'}"
            )

    def _recover(self, what: str, nonfinite: NonFiniteUpdates) -> None:
        """Go on from the last checkpoint, with the batches after the bad one, or stop."""
        folder, before = self.checkpoints.latest, self.checkpoints.position
        if (
            self.config.trainer.on_nonfinite == "rollback"
            and before is not None
            and before.phase is self.position.phase
        ):
            assert folder is not None
            if nonfinite.may_roll_back(before.step):
                self.checkpoints.load(folder)
                self.position = before
                self.report.rewind(self._row(before.step) + 1)
                self.report.warn(f"{what}; rolled back to {folder}, to go on with the next batches")
                return
            what += f"; rolled back to {folder} too often"
        saved = "trainer.save_freq=0, so nothing is saved"
        if self.config.trainer.save_freq:
            saved = f"{self.checkpoints.latest} holds them" if self.save() else f"the last checkpoint is {folder}"
        raise RunStopped(f"{what}; {saved}; look at this step's rollouts and rewards, and at the learning rate")

    def _resume(self, folder: str) -> None:
        self.checkpoints.load(folder)
        state = self.start.state
        self.kl_control.coefficient = state["kl_coef"]
        allow = self.config.trainer.resume_allow
        self.sampler.load_state(state["sampler"], allow=allow)
        if self.position.phase is Phase.WARMUP and self.warmup_sampler is not None:
            self.warmup_sampler.load_state(state["warmup_sampler"], allow=allow)

    def _lacks_reference(self) -> bool:
        """Whether the checkpoint is of a run that had no reference, and this one has."""
        recorded = self.start.state.get("identity", {}).get("roles", {"reference": True})
        return self.config.needs_reference and not recorded["reference"]

    def _row(self, step: int) -> int:
        """The number of a step in the metric files, where the warm-up's count up to 0."""
        return step - self.config.warmup.total_training_steps if self.position.phase is Phase.WARMUP else step

    def _steer_kl(self, batch: Batch) -> None:
        if self.config.algorithm.kl_ctrl.type == "adaptive" and batch.kl_in_reward is not None:
            scored = batch.kl_in_reward[batch.response_lengths > 0]
            self.kl_control.update(float(scored.mean()), len(scored))

    def _checks_agreement(self) -> bool:
        every = self.config.trainer.agreement_freq
        return every > 0 and (self._first_step or self.position.step % every == 0)

    def _due(self, every: int, total: int) -> bool:
        """Whether something with this frequency happens now: -1 is only at the end of the run, 0 never."""
        step = self.position.step
        last = step == total and (every > 0 or self.position.phase is Phase.RL)
        return every != 0 and (last or (every > 0 and step % every == 0))
