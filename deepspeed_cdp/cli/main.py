"""``deepspeed-cdp COMMAND``: see a plan, predict it, draw it, and check this machine, without training.

Built on argparse: it is in the standard library, and ``python -m deepspeed_cdp.cli.convert`` uses it already. Each command is a
module with ``add(parser)`` and ``run(args) -> int`` (its exit code), imported only when it is asked for, so that ``costs``
needs no torch.

Exit codes: 0 done; 1 it was done and something is wrong (a checkpoint, this machine); 2 wrong arguments or input, in one
sentence.
"""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed_cdp.cli.output import Parser, UserError, complain

COMMANDS = {
    "plan": "what a model and a ds_config come to on N ranks: stages, memory, traffic, time, beside ZeRO-3, FSDP2 and DDP",
    "simulate": "the plan in time: period, idle ranks, delay between neighbours, stragglers",
    "costs": "Table 1 of the paper for given sizes",
    "timeline": "Figure 1 of the paper for N ranks and a rule, or a recorded run",
    "memory": "activation memory of a model over time, and of N workers together and in turn (Figure 4)",
    "doctor": "versions, registration, transports, and a self-test on this machine",
    "convert": "checkpoints to and from ZeRO-3, universal and fp32 (python -m deepspeed_cdp.cli.convert)",
}


def module(name: str) -> Any:
    """The module of a command."""
    return importlib.import_module(f"{__package__}.{'cost_table' if name == 'costs' else name}")


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = ["usage: deepspeed-cdp COMMAND ... [--json]", "", "commands:"]
    lines += [f"  {name.ljust(width)}  {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "deepspeed-cdp COMMAND --help has each one's options; docs/cli.md examples"])


def parser(name: str) -> Parser:
    """The parser of one command."""
    one = Parser(f"deepspeed-cdp {name}", description=COMMANDS[name])
    module(name).add(one)
    one.add_argument("--json", action="store_true", help="print the result, or the error, as one line of JSON")
    return one


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] == "--version":
        from deepspeed_cdp.version import __version__

        print(f"deepspeed-cdp {__version__}")
        return 0
    if argv[0] == "convert":
        from deepspeed_cdp.cli import convert

        return convert.main(argv[1:], "deepspeed-cdp convert")
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what DeepSpeed says when it is imported; errors are still shown
    try:
        if argv[0] not in COMMANDS:
            raise UserError(f"command is {argv[0]!r}; allowed are {', '.join(COMMANDS)}; choose one of these")
        args = parser(argv[0]).parse_args(argv[1:])
        code = module(argv[0]).run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # UserError is one; the package's own ValueErrors are sentences for users
        complain(str(error) or type(error).__name__, as_json)
        return 2
    except ImportError as error:
        complain(f"this command needs {error.name or error}: install it", as_json)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    sys.exit(main())
