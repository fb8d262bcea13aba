"""Print a script that completes commands, options, files and configuration keys in a shell.

bash: source <(megarl completion bash)     to keep it, add this line to ~/.bashrc
zsh:  source <(megarl completion zsh)      to keep it, add this line to ~/.zshrc, after compinit
"""

from __future__ import annotations

import argparse

EXAMPLE = "source <(megarl completion bash)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl completion`."""
    parser.add_argument("shell", choices=["bash", "zsh"])


def run(args: argparse.Namespace, rest: list[str]) -> int:
    """Print the script."""
    del rest
    try:
        import argcomplete
    except ImportError as e:
        raise ValueError("completion needs argcomplete: pip install argcomplete") from e
    print(argcomplete.shellcode(["megarl"], shell=args.shell))
    return 0
