"""The ``dsv4-npu`` command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from contextlib import suppress

from dsv4_npu import __version__
from dsv4_npu.errors import Dsv4NpuError

#: Subcommand -> (module with ``add_arguments`` and ``run``, help).
COMMANDS = {
    "run": (
        "dsv4_npu.emulation.command",
        "decode text speculatively from the pools on a CPU and compare with the oracle",
    ),
    "replay": ("dsv4_npu.replay.cli", "serve a request trace through the allocator and report what its memory did"),
    "doctor": ("dsv4_npu.doctor.command", "what is installed, whether it fits together, and what mends it"),
    "selftest": ("dsv4_npu.selftest.command", "test every op on a device, and write one file to send back"),
    "serve-args": ("dsv4_npu.planning.serve_args", "the launch command of SGLang for a planned deployment"),
    "plan": ("dsv4_npu.planning.command", "how many tokens and requests of full context a deployment holds, and why"),
}


#: What a shell says of a program that SIGINT or SIGPIPE ended.
INTERRUPTED, PIPE_CLOSED = 130, 141


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 2 for bad input, 130 for Ctrl-C, 141 where nobody reads the output."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print(f"dsv4-npu {' '.join(argv[:1])}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED


def _drop_output() -> None:
    """What is still buffered goes nowhere: it would be written, and fail, when the interpreter ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dsv4-npu", description="DeepSeek-V4 KV memory for Ascend NPUs")
    parser.add_argument("--version", action="version", version=f"dsv4-npu {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        # A command's module can take seconds to import: only the one that is asked for is.
        if name in argv[:1]:
            importlib.import_module(module).add_arguments(sub)
    try:
        args = parser.parse_args(argv)
    finally:
        # Help that nobody reads is found out here, not when the interpreter ends.
        sys.stdout.flush()
    try:
        status: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except Dsv4NpuError as error:
        print(f"dsv4-npu {args.command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"dsv4-npu {args.command}: {where}{error.strerror or error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return 2
    return status
