"""Finds models to evaluate by their path: a checkpoint, a run, a Hugging Face folder, a model of the Hub. Torch-free.

RUN/config.yaml                        how the run was configured
RUN/checkpoints/global_step_12/        a checkpoint
RUN/checkpoints/global_step_12/huggingface/
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.checkpoint.folder import STATE_FILE, check_whole, checkpoints, read_state
from megarl.checkpoint.huggingface_folder import CONFIG
from megarl.checkpoint.megatron_lm import TRACKER, is_megatron_lm, newest_iteration
from megarl.config import Config, build_config, load_config
from megarl.config.load import CONFIG_FILE
from megarl.config.policy import LayoutConfig
from megarl.hub import HubModel, hub_model
from megarl.trainer.resuming.best import best_checkpoint

USUAL_CONTEXT = 4096
"""Tokens of prompt and response together, where the model has so many positions and nobody asks for more."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Describes a model to evaluate.

    Attributes:
        folder: its weights.
        is_checkpoint: whether they are MegaRL's or Megatron-LM's; else Hugging Face's.
        run_dir: the folder of the run that the model lies in, if any.
        hub: the model of the Hugging Face Hub that the folder is the cache of.
    """

    folder: str
    is_checkpoint: bool
    run_dir: str | None
    hub: HubModel | None = None

    @property
    def path(self) -> str:
        """Return the path or the Hub's name by which configurations name the model."""
        return self.folder if self.hub is None else str(self.hub)

    @property
    def recorded(self) -> str | None:
        """Return the run's configuration file, if there is one."""
        file = os.path.join(self.run_dir or "", CONFIG_FILE)
        return file if self.run_dir is not None and os.path.isfile(file) else None

    @property
    def name(self) -> str:
        """Return the name of the model's evaluation: global_step_12; of a Hugging Face folder within a checkpoint
        global_step_12-huggingface."""
        if self.hub is not None:
            return self.hub.repository.rpartition("/")[2]
        head, last = os.path.split(os.path.abspath(self.folder))
        return f"{os.path.basename(head)}-{last}" if last == "huggingface" else last

    @property
    def place(self) -> str:
        """Return the folder of the model's evaluation: RUN/eval/global_step_12, or FOLDER.eval beside a folder that is
        in no run; of a model of the Hub NAME.eval in the working directory."""
        if self.hub is not None:
            return os.path.abspath(f"{self.name}.eval")
        if self.run_dir is not None:
            return os.path.join(self.run_dir, "eval", self.name)
        return os.path.join(os.path.dirname(os.path.abspath(self.folder)), f"{self.name}.eval")


def find_subject(path: str, *, best: bool = False) -> Subject:
    """Find the model that a path names; of a run its newest whole checkpoint.

    Args:
        best: of a run the checkpoint that its best.json names.

    Raises:
        ValueError: nothing that can be evaluated, in one line.
    """
    if (hub := hub_model(path)) is not None:
        from megarl.checkpoint.hub_download import Wanted, fetch, pin  # imports SentencePiece

        hub = pin(hub)
        fetch(hub, Wanted.WEIGHTS)
        return Subject(folder=hub.folder, is_checkpoint=False, run_dir=None, hub=hub)
    folder = weights_of(path, best=best)
    if os.path.isfile(os.path.join(folder, STATE_FILE)):
        check_whole(folder)
        models = read_state(folder).get("models", ["actor"])
        if "actor" not in models:
            raise ValueError(f"'{folder}' holds no policy that could answer, but {', '.join(models) or 'nothing'}")
        return Subject(folder=folder, is_checkpoint=True, run_dir=_run_of(folder))
    if os.path.isfile(os.path.join(folder, CONFIG)):
        return Subject(folder=folder, is_checkpoint=False, run_dir=_run_of(folder))
    if is_megatron_lm(folder):
        return Subject(folder=folder, is_checkpoint=True, run_dir=None)
    raise ValueError(
        f"'{path}' is neither a checkpoint ({STATE_FILE}) nor a run's folder (checkpoints/) nor a Hugging Face folder "
        f"({CONFIG})"
    )


def weights_of(path: str, *, best: bool = False) -> str:
    """Return a run's newest whole checkpoint, or its best, or the newest of Megatron-LM's; any other folder as it is.

    Raises:
        ValueError: there is no folder, or no such checkpoint in it, in one line.
    """
    if not os.path.isdir(path):
        raise ValueError(f"no folder at '{path}'")
    if os.path.isfile(os.path.join(path, TRACKER)) and not best:
        return newest_iteration(path)
    if os.path.isdir(os.path.join(path, "checkpoints")):
        return best_checkpoint(path) if best else _newest(path)
    if best:
        raise ValueError(f"--best chooses among the checkpoints of a run, and '{path}' is no run's folder")
    return path


def evaluation_config(
    subject: Subject, file: str | None, overrides: Sequence[str], folder: str, nproc: int | None
) -> Config:
    """Return the configuration of an evaluation.

    Args:
        file, overrides: where data, reward, sampling and layout come from.
        folder: where the evaluation goes.
        nproc: ranks on this machine; None: as configured.

    Raises:
        ConfigError: see `load_config`.
    """
    from megarl.data.tokenizer import has_tokenizer  # imports SentencePiece

    tree = load_config(file, overrides).model_dump()
    model = tree["actor_rollout_ref"]["model"]
    model |= {"checkpoint": subject.folder if subject.is_checkpoint else "", "random_init": False}
    if not any(item.startswith("actor_rollout_ref.model.tokenizer_path=") for item in overrides):
        has_its_own = has_tokenizer(subject.folder)
        model["tokenizer_path"] = subject.path if has_its_own else model["tokenizer_path"] or model["path"]
    if not subject.is_checkpoint or os.path.isfile(os.path.join(subject.folder, CONFIG)):
        model["path"] = subject.path
    tree["data"]["format"] = "auto"
    tree["warmup"]["total_training_steps"] = 0
    tree["profiler"]["tool"] = "none"  # it is for steps, and names ranks that may not be there
    ranks = {"nnodes": 1, **({} if nproc is None else {"n_gpus_per_node": nproc})}
    kept = {
        "flow": "eval",
        "default_local_dir": folder,
        "resume_mode": "auto",
        "best_metric": "",
        "logger": ["console"],
    }
    tree["trainer"] |= {**kept, **ranks}
    return build_config(tree)


def answering_config(
    config: Config, *, positions: int, requests: int, max_tokens: int | None, context: int | None, keep_engine: bool
) -> Config:
    """Return an evaluation's configuration for one rank that answers any prompt.

    Args:
        positions: of the model.
        requests: prompts that are asked together at most.
        max_tokens: of a response; None: `data.max_response_length`, or half of the context if that is less.
        context: tokens of prompt and response together; None: `USUAL_CONTEXT`, or what the data needs if that is more.
        keep_engine: the configured one, instead of the native one, which shows tokens as they come.

    Raises:
        ValueError: lengths that do not fit, in one line.
    """
    if context is not None and context > positions:
        raise ValueError(f"--context {context} is more than the model's {positions} positions")
    whole = context or min(positions, max(USUAL_CONTEXT, config.data.max_sequence_length))
    response = max_tokens or min(config.data.max_response_length, whole // 2)
    if response >= whole:
        raise ValueError(f"--max-tokens {response} leaves no room for a prompt in a context of {whole} tokens")
    tree = config.model_dump()
    tree["data"] |= {"max_prompt_length": whole - response, "max_response_length": response}
    tree["environment"] |= {"name": "", "agent": ""}
    roles = tree["actor_rollout_ref"]
    roles["rollout"] |= {
        "tensor_model_parallel_size": 1,
        "max_num_seqs": min(requests, config.actor_rollout_ref.rollout.max_num_seqs),
    }
    if not keep_engine:
        roles["rollout"]["name"] = "native"
    roles["actor"]["megatron"] |= LayoutConfig().model_dump()
    return build_config(tree)


def _newest(run_dir: str) -> str:
    known = checkpoints(run_dir)
    whole = next((checkpoint.folder for checkpoint in known if not checkpoint.damaged), None)
    if whole is None:
        damaged = f"; {os.path.basename(known[0].folder)}: {known[0].problem}" if known else ""
        raise ValueError(f"'{run_dir}' has no whole checkpoint{damaged}")
    return whole


def _run_of(folder: str) -> str | None:
    """Return RUN for RUN/checkpoints/global_step_12, and for what is in it."""
    parent = os.path.abspath(folder)
    for _ in range(2):
        parent, name = os.path.dirname(parent), os.path.basename(os.path.dirname(parent))
        if name == "checkpoints":
            return os.path.dirname(parent)
    return None
