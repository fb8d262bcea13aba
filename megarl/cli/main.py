"""Runs the `megarl` command, by a table of commands, one module each.

A command's module has `add_arguments(parser)` and `run(args, rest)`, which returns the exit code and raises ValueError
if the command cannot work; --help shows its `EXAMPLE`. Only the module of the command that runs is imported.
"""

# PYTHON_ARGCOMPLETE_OK

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

from megarl.plain import plain, plain_output


@dataclass(frozen=True, kw_only=True)
class Command:
    """Describes a command.

    Attributes:
        help: the command's effect in one line.
        takes_keys: `key=value` may follow the command's options.
        module: module of `megarl.cli`; default the command's name.
    """

    name: str
    help: str
    takes_keys: bool = False
    module: str = ""


GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (
        Command(name="train", help="train on this machine, or on several together", takes_keys=True),
        Command(name="plan", help="predict memory, traffic and time of a run, without a GPU", takes_keys=True),
        Command(
            name="rehearse",
            help="run the layout here, on CPU ranks with a small model: kill and resume",
            takes_keys=True,
        ),
        Command(name="tune", help="search for settings with Optuna: trials are runs, pruned early", takes_keys=True),
        Command(name="branch", help="begin a new run from a checkpoint of another run", takes_keys=True),
        Command(name="runs", help="list the runs in a folder: owner, state, step, last metrics, GPU-hours"),
        Command(name="report", help="make a page of curves, rollouts, timeline and settings of runs"),
    ),
    "Use a checkpoint": (
        Command(name="eval", help="score a checkpoint on held-out prompts", takes_keys=True, module="evaluate"),
        Command(name="compare", help="compare two checkpoints or evaluations, prompt by prompt", takes_keys=True),
        Command(name="generate", help="talk to a checkpoint, or let it answer prompts", takes_keys=True),
        Command(name="convert", help="convert between Hugging Face and Megatron-Core folders"),
        Command(name="serve", help="print the command with which vLLM serves a checkpoint"),
    ),
    "Look things up": (
        Command(name="model", help="compare a model's folder with transformers: tensors, numbers, answers"),
        Command(name="config", help="print, explain and compare configurations", takes_keys=True),
        Command(
            name="algorithms", help="list flows, methods, advantage estimators, losses and rewards, and their needs"
        ),
        Command(
            name="doctor",
            help="check what is installed, or the hosts of a run; says what is missing",
            takes_keys=True,
        ),
        Command(name="completion", help="print the script that completes these commands in bash or zsh"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns its exit code: 2 for a refusal, 130 after Ctrl-C, for `train` that of the ranks."""
    _open_streams()
    with plain_output():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        _check_working_directory()
        if debug:
            _debug()
        else:  # set before torch is imported: its C++ part would print stacks for errors that are one line here
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        return _run(words)
    except ValueError as e:
        from megarl.config.refusal import is_refusal

        if words[:1] == ["train"] and not is_refusal(e):  # a fault of the program needs its traceback, as in a rank
            raise
        if debug:
            import traceback

            traceback.print_exc()
        print(f"megarl: error: {_shown(e)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        if debug or (e.name or "megarl").partition(".")[0] == "megarl":
            raise
        print(f"megarl: error: the package {e.name} is not installed; `megarl doctor` says how to", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with suppress(ModuleNotFoundError):
            from megarl.processes import kill_descendants

            kill_descendants()
        if debug:
            raise
        print("megarl: SIGINT: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `megarl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _check_working_directory() -> None:
    """Raise ValueError if the working directory has been deleted: some libraries abort the process then."""
    try:
        os.getcwd()
    except FileNotFoundError as e:
        raise ValueError("the working directory has been deleted: change to one that is there") from e


def _shown(error: ValueError) -> str:
    """Write an error without known secrets of the configuration and without a terminal's control characters."""
    secrets = sys.modules.get("megarl.config.secrets")
    return plain(secrets.hide(str(error)) if secrets is not None else str(error))


def _open_streams() -> None:
    """Open /dev/null for closed streams (`>&-`): otherwise the next opened file would get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(descriptor, True)  # the ranks need it, too
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r", encoding="utf-8"))


def _run(words: Sequence[str]) -> int:
    if "config" in words:
        words = ["migrate" if word == "--migrate" else word for word in words]
    parser, module = parser_for(words)
    args, rest = parser.parse_known_args(words)  # argparse returns overrides that follow an option in `rest`
    command = COMMANDS[args.command]
    not_keys = rest if not command.takes_keys else [word for word in rest if word.startswith("-")]
    if unknown := [] if getattr(args, "any_options", False) else not_keys:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    assert module is not None
    from megarl.debugging import hush_dependencies  # too slow for `_complete`, which answers while a person types

    hush_dependencies()
    code: int = module.run(args, rest)
    sys.stdout.flush()  # at Python's exit a closed pipe would change the exit code
    return code


def parser_for(words: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """Make the parser, with arguments of the named command only; returns it with that command's module."""
    parser = argparse.ArgumentParser(
        prog="megarl",
        usage="megarl [--version] [--debug] COMMAND ...",
        description=f"Post-training of language models inside one Megatron program.\n\n{_listing()}",
        epilog="`megarl COMMAND --help` explains one. First: megarl doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    _add_debug(parser, default=False)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", prog="megarl", help=argparse.SUPPRESS
    )
    name = next((word for word in words if word in COMMANDS), None)
    module = None
    for command in COMMANDS.values():
        if command.name != name:
            commands.add_parser(command.name, help=command.help)
            continue
        module = importlib.import_module(f"megarl.cli.{command.module or command.name}")
        command_parser = commands.add_parser(
            command.name,
            help=command.help,
            description=module.__doc__,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_debug(command_parser, default=argparse.SUPPRESS)
        module.add_arguments(command_parser)
    return parser, module


class _Version(argparse.Action):
    """Prints the version. Only then is git asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from megarl.version import version

        print(f"megarl {version()}")
        parser.exit()


def _add_debug(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="tracebacks and logs of all libraries, on every rank"
    )


def _listing() -> str:
    lines = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  {command.name:<12}{command.help}" for command in group), ""]
    return "\n".join(lines).rstrip()


def _debug() -> None:
    from megarl.debugging import enable_debugging

    enable_debugging()


def _complete() -> None:
    """Answer the shell's request for completions, and exit."""
    import argcomplete

    parser, _ = parser_for(os.environ.get("COMP_LINE", "").split()[1:])
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
