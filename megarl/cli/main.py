"""The `megarl` command: a table of commands, one module each.

A command's module has `add_arguments(parser)` and `run(args, rest)`, which returns the exit code and raises ValueError
for what cannot work; `EXAMPLE` is shown by its --help. Only the module of the command that is asked for is imported.
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
    """A line of the table.

    Attributes:
        help: what it does, in a line.
        takes_keys: whether `key=value` may follow its options.
        module: of `megarl.cli`; default its name.
    """

    name: str
    help: str
    takes_keys: bool = False
    module: str = ""


GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (
        Command(name="train", help="train on this machine, or on several together", takes_keys=True),
        Command(name="plan", help="memory, traffic and time of a run, without any GPU", takes_keys=True),
        Command(name="runs", help="runs in a folder: state, step, last metrics, size"),
        Command(name="report", help="curves, rollouts, timeline and settings of runs, as one page"),
    ),
    "Use a checkpoint": (
        Command(name="eval", help="score it on held-out prompts", takes_keys=True, module="evaluate"),
        Command(name="compare", help="two of them, or two evaluations, prompt by prompt", takes_keys=True),
        Command(name="generate", help="talk to it, or have prompts answered", takes_keys=True),
        Command(name="convert", help="between Hugging Face and Megatron-Core folders"),
        Command(name="serve", help="print the command with which vLLM serves it"),
    ),
    "Look things up": (
        Command(name="config", help="print, explain and compare configurations", takes_keys=True),
        Command(name="algorithms", help="flows, methods, advantage estimators, losses and rewards: what they need"),
        Command(name="doctor", help="what is installed here, what is missing, and how to get it"),
        Command(name="completion", help="print what completes these commands in bash or zsh"),
    ),
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def main(argv: list[str] | None = None) -> int:
    """Exit code 2 for what is refused, 130 after Ctrl-C; otherwise that of the command, for `train` of the ranks."""
    _open_streams()
    with plain_output():
        return _main(sys.argv[1:] if argv is None else argv)


def _main(words: list[str]) -> int:
    debug = "--debug" in words
    try:
        _check_working_directory()
        if debug:
            _debug()
        else:  # before torch is imported: its C++ part prints stacks of what ranks and launchers say in a line
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        return _run(words)
    except ValueError as e:
        from megarl.config.refusal import is_refusal

        if words[:1] == ["train"] and not is_refusal(e):  # a fault of the program, as in a rank
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
    """Raises ValueError where it has been deleted: libraries that look for it abort the process in words of theirs."""
    try:
        os.getcwd()
    except FileNotFoundError as e:
        raise ValueError("the working directory has been deleted: change to one that is there") from e


def _shown(error: ValueError) -> str:
    """Without the secrets of a configuration that has been read, and without what a terminal would obey."""
    secrets = sys.modules.get("megarl.config.secrets")
    return plain(secrets.hide(str(error)) if secrets is not None else str(error))


def _open_streams() -> None:
    """A stream that was closed (`>&-`) would be the next file that is opened, and take what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # of the free numbers the lowest
            os.set_inheritable(opened, True)  # by the ranks
            setattr(sys, name, os.fdopen(opened, "w" if number else "r", encoding="utf-8"))


def _run(words: Sequence[str]) -> int:
    if "config" in words:
        words = ["migrate" if word == "--migrate" else word for word in words]
    parser, module = parser_for(words)
    args, rest = parser.parse_known_args(words)  # argparse leaves out overrides that follow an option
    command = COMMANDS[args.command]
    refused = rest if not command.takes_keys else [word for word in rest if word.startswith("-")]
    if unknown := [] if getattr(args, "any_options", False) else refused:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    assert module is not None
    from megarl.debugging import hush_dependencies  # not for `_complete`, which answers while somebody types

    hush_dependencies()
    code: int = module.run(args, rest)
    sys.stdout.flush()  # as Python ends, a reader that has gone would be another exit code
    return code


def parser_for(words: Sequence[str]) -> tuple[argparse.ArgumentParser, ModuleType | None]:
    """The parser, and the module of the command that the words name, which alone has its arguments."""
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
    named = next((word for word in words if word in COMMANDS), None)
    module = None
    for command in COMMANDS.values():
        if command.name != named:
            commands.add_parser(command.name, help=command.help)
            continue
        module = importlib.import_module(f"megarl.cli.{command.module or command.name}")
        own = commands.add_parser(
            command.name,
            help=command.help,
            description=module.__doc__,
            epilog=f"example:\n  {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_debug(own, default=argparse.SUPPRESS)
        module.add_arguments(own)
    return parser, module


class _Version(argparse.Action):
    """Imports the package's face only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import megarl

        print(f"megarl {megarl.__version__}")
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
    """Answer the shell, and leave."""
    import argcomplete

    parser, _ = parser_for(os.environ.get("COMP_LINE", "").split()[1:])
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
