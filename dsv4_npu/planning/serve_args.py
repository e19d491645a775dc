"""``dsv4-npu serve-args``: the launch command of SGLang for a planned deployment."""

from __future__ import annotations

import argparse
import json
import math
import shlex

from dsv4_npu.config import configuration_file
from dsv4_npu.errors import InputError
from dsv4_npu.planning.options import Answer, add_deployment, answer
from dsv4_npu.planning.show import headline, label

#: The release whose options these are.
SGLANG = "0.5.23"
PLATFORM = "dsv4_npu"
#: Tokens of a page that SGLang uses for DeepSeek-V4 on an NPU, whatever is asked for.
NPU_PAGE = 128
_UNKNOWN_PATH = "MODEL_PATH"


def path_or_id(text: str) -> str:
    """An argparse type: where SGLang finds a model."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: the folder of a checkpoint is needed")
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``serve-args``: those of ``plan``, and where the checkpoint lies."""
    add_deployment(parser)
    parser.add_argument(
        "--model-path",
        type=path_or_id,
        metavar="PATH",
        help="the checkpoint that SGLang loads, if not --model's folder",
    )
    parser.add_argument(
        "--draft-model-path",
        type=path_or_id,
        metavar="PATH",
        help="a draft model beside it, where it is not part of it",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the environment and the words of the command as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Print the command; bad input is raised, so the exit status is 0."""
    if args.platform == "cpu":
        raise InputError("--platform cpu: a command for an NPU is printed; a2, a3 or a5 is needed (docs/sglang.md)")
    if args.page_size not in (None, NPU_PAGE):
        raise InputError(f"--page-size = {args.page_size}: SGLang uses pages of {NPU_PAGE} tokens here; leave it out")
    found = answer(args)
    path, notes = _model_path(args)
    words = ["python", "-m", "sglang.launch_server", *options(found, path, args.draft_model_path)]
    notes = [*notes, *found.notes, *_block_note(found)]
    if args.json:
        print(json.dumps({"environment": {"SGLANG_PLATFORM": PLATFORM}, "command": words, "notes": notes}, indent=1))
        return 0
    print(f"# SGLang {SGLANG}, {label(found)}: {headline(found)}")
    for note in notes:
        print(f"# {note}")
    print(f"SGLANG_PLATFORM={PLATFORM} {shlex.join(words[:3])} \\")
    pairs = [shlex.join(words[at : at + 2]) for at in range(3, len(words), 2)]
    print(" \\\n".join(f"    {pair}" for pair in pairs))
    return 0


def options(found: Answer, model_path: str, draft_path: str | None = None) -> list[str]:
    """Options of ``sglang.launch_server``, each with its value."""
    config, sizes = found.plan.deployment.config, found.plan.budget.sizes
    values: dict[str, object] = {
        "model-path": model_path,
        "device": "npu",
        "attention-backend": "dsv4",
        "kv-cache-dtype": "bfloat16",
        "tp-size": found.memory.tp,
        "page-size": config.page,
        "c128-page-size": config.c128_page_size,
        "context-length": config.context_len,
        "max-running-requests": config.request_rows,
        "max-total-tokens": sizes.full_pages * config.page,
        "swa-full-tokens-ratio": ratio_text(sizes.full_pages, sizes.swa_pages),
    }
    drafts = config.speculation.draft_tokens
    if config.speculation.kind == "chain":
        values |= {
            "speculative-algorithm": "EAGLE",
            "speculative-num-steps": drafts,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": config.verify_width,
        }
    elif config.speculation.kind == "dspark":
        values |= {
            "speculative-algorithm": "DSPARK",
            "speculative-num-steps": 1,
            "speculative-eagle-topk": 1,
            "speculative-dspark-block-size": drafts,
            "speculative-num-draft-tokens": config.verify_width,
        }
    if draft_path is not None:
        values["speculative-draft-model-path"] = draft_path
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def ratio_text(full: int, swa: int) -> str:
    """The shortest decimal r with ``int(full · r) == swa``, so that SGLang's SWA pool has the planned pages."""
    for digits in range(1, 17):
        scale = 10**digits
        value = math.ceil(swa / full * scale) / scale
        if int(full * value) == swa:
            return f"{value:.{digits}f}"
    value = swa / full
    while int(full * value) < swa:
        # The product was rounded down: the next larger number.
        value = math.nextafter(value, math.inf)
    return repr(value)


def _block_note(found: Answer) -> list[str]:
    """What to know where the checkpoint was trained for blocks of another size."""
    config = found.plan.deployment.config
    trained, drafts = config.model.dspark_block_size, config.speculation.draft_tokens
    if config.speculation.kind != "dspark" or trained in (None, drafts):
        return []
    return [f"--draft-tokens {drafts}: the checkpoint was trained for blocks of dspark_block_size = {trained}"]


def _model_path(args: argparse.Namespace) -> tuple[str, list[str]]:
    if args.model_path is not None:
        return str(args.model_path), []
    file = configuration_file(args.model)
    if file is not None:
        return str(file.resolve().parent), []
    return _UNKNOWN_PATH, [f"replace {_UNKNOWN_PATH} by the folder of the checkpoint, or give --model-path"]
