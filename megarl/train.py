"""One rank of a training run: `torchrun --nproc_per_node N -m megarl.train CONFIG key=value...`."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings

from megarl.config import Config, ConfigError, load_config


def load_run_config(path: str, overrides: list[str]) -> Config:
    """The configuration, with the number of ranks that the launcher started (WORLD_SIZE, LOCAL_WORLD_SIZE)."""
    world, local = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if world is not None and local is not None:
        ranks = [f"trainer.nnodes={int(world) // int(local)}", f"trainer.n_gpus_per_node={local}"]
        overrides = [*overrides, *ranks]
    return load_config(path, overrides)


def main(argv: list[str]) -> int:
    """Exit code 0 after the last step, 2 for a run that is refused, 1 for one that failed."""
    rank = int(os.environ.get("RANK", "0"))
    if not argv or argv[0].startswith("-"):
        return _refuse("usage: torchrun --nproc_per_node N -m megarl.train CONFIG [key=value ...]", rank)
    try:
        config = load_run_config(argv[0], argv[1:])
        from megarl.trainer.checks import check_run

        inputs = check_run(config)
    except (ConfigError, ValueError) as e:
        return _refuse(f"megarl: error: {e}", rank)

    _hush_dependencies()
    from megarl.trainer.run import run

    try:
        run(inputs)
    except BaseException:
        # Leave at once: waiting for ranks that wait for this one would hang the job.
        print(f"megarl: rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    return 0


def _hush_dependencies() -> None:
    """Megatron-Core, torch and vLLM warn of their own deprecations and absent options, per rank and call site."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    for module in ("megatron", "torch", "vllm"):
        warnings.filterwarnings("ignore", module=module)


def _refuse(message: str, rank: int) -> int:
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
