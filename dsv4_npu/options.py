"""What the commands share: argparse types, defaults, option names in messages, checks of output files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_npu import addressing
from dsv4_npu.config import ModelSpec, configs_dir
from dsv4_npu.errors import ConfigError, InputError
from dsv4_npu.reading import LARGEST

if TYPE_CHECKING:
    from rich.console import Console

#: Drafts per verify where nothing is said; DSpark's block size is the model's where it has one.
DEFAULT_DRAFTS = {"none": 0, "chain": 3, "dspark": 5}
#: Columns of output that goes to a pipe or a file.
PIPE_WIDTH = 120
#: Page ids are 32-bit integers.
MOST_TOKENS = 2**31 * 128
MOST_ROWS = 2**16
#: 16 TiB: more than any one device has.
MOST_GIB = 2**14

#: Models of ``run`` that are no DeepSeek-V4.
PLAIN_MODELS = ("tiny-llama", "tiny-mla")

#: Fields that the library's messages name, and the options of the commands that set them.
OPTIONS: Mapping[str, str] = {
    "context_len": "--context",
    "context": "--context",
    "request_rows": "--max-running",
    "c128_page_size": "--c128-page-size",
    "page_size": "--page-size",
    "draft_tokens": "--draft-tokens",
    "swa_ratio": "--swa-ratio",
    "swa_tokens": "--swa-tokens",
    "tokens": "--tokens",
}


@contextmanager
def options_named(options: Mapping[str, str] = OPTIONS, where: str = "") -> Iterator[None]:
    """Errors inside name the option where the library names its field, after ``where``."""
    try:
        yield
    except (ConfigError, InputError) as error:
        fields = "|".join(options)
        told = re.sub(rf"(?<![-\w])({fields})(?= =)", lambda found: options[found[1]], str(error))
        raise type(error)(f"{where}{told}") from error


# -- argparse types ---------------------------------------------------------------------------------------------------


def _refuse(text: str, allowed: str) -> argparse.ArgumentTypeError:
    cut = text if len(text) <= 40 else text[:39] + "…"
    return argparse.ArgumentTypeError(f"{cut!r}: {allowed} is needed")


def whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """An argparse type: an integer of ``low`` to ``high``."""
    allowed = f"an integer of at least {low}" if high == LARGEST else f"an integer from {low} to {high:,}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise _refuse(text, allowed) from None
        if value < low:
            raise _refuse(text, allowed)
        if value > high:
            raise _refuse(text, f"an integer from {low} to {high:,}")
        return value

    return parse


positive = whole(1)


def seed(text: str) -> int:
    """An argparse type: a seed."""
    allowed = f"an integer from 0 to {LARGEST:,}"
    try:
        value = int(text)
    except ValueError:
        raise _refuse(text, allowed) from None
    if not 0 <= value <= LARGEST:
        raise _refuse(text, allowed)
    return value


def file_name(text: str) -> Path:
    """An argparse type: the path of a file. Path itself takes the empty text for the folder that one is in."""
    if not text.strip():
        raise _refuse(text, "the name of a file")
    return Path(text)


def integer(text: str) -> int:
    """An argparse type: any integer that fits 53 bits; what else is allowed is said by whoever uses it."""
    try:
        value = int(text)
    except ValueError:
        raise _refuse(text, "an integer") from None
    if abs(value) > LARGEST:
        raise _refuse(text, f"an integer from {-LARGEST:,} to {LARGEST:,}")
    return value


def number(low: float, high: float, words: str, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number of ``low`` (or above it) to ``high``; ``words`` say so."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _refuse(text, words) from None
        if not low <= value <= high or (above and value == low) or value in (float("inf"), float("-inf")):
            raise _refuse(text, words)
        return value

    return parse


share = number(0, 1, "a number from 0 to 1")
share_above_zero = number(0, 1, "a number above 0, up to 1", above=True)
above_zero = number(0, float("inf"), "a number above 0", above=True)
finite = number(float("-inf"), float("inf"), "a finite number")


def gib(text: str) -> Fraction:
    """An argparse type: an exact number of GiB, 0 or more."""
    allowed = f"a number of GiB, 0 to {MOST_GIB:,},"
    # Fraction would compute all digits of 1e999999999.
    if not re.fullmatch(r"(\d+(\.\d*)?|\.\d+)(e[+-]?\d{1,2})?", text.strip(), re.IGNORECASE) or len(text) > 40:
        raise _refuse(text, allowed)
    value = Fraction(text)
    if value > MOST_GIB:
        raise _refuse(text, allowed)
    return value


def gib_above_zero(text: str) -> Fraction:
    """An argparse type: an exact number of GiB above 0."""
    value = gib(text)
    if not value:
        raise _refuse(text, "a number of GiB above 0")
    return value


# -- models, files, the terminal --------------------------------------------------------------------------------------


def model_for(source: str, spec: str, used: str) -> tuple[ModelSpec, list[str]]:
    """The model, and a note if DSpark was asked for and the model's DSpark checkpoint is taken instead.

    ``used`` says what for ("planned for"). Raises ConfigError for DSpark without a DSpark checkpoint.
    """
    if source in PLAIN_MODELS:
        raise ConfigError(
            f"--model {source}: a model with plain attention, which `dsv4-npu run` alone takes; this command is for "
            "DeepSeek-V4: v4_flash, v4_pro, or the path of a config.json"
        )
    model = ModelSpec.load(source)
    if spec != "dspark" or model.dspark_block_size is not None:
        return model, []
    with_stages = f"{model.name}_dspark"
    if source == model.name and (configs_dir() / "models" / f"{with_stages}.json").is_file():
        found = ModelSpec.load(with_stages)
        return found, [f"{model.name} has no DSpark stages: {used} {with_stages}, which has {stages(found)}"]
    raise ConfigError(
        f"--spec dspark: model {model.name} has no dspark_block_size: give a DSpark checkpoint with --model, "
        "or --spec chain"
    )


def stages(model: ModelSpec) -> str:
    """How many draft stages a model has, in words."""
    count = model.num_draft_stages
    return f"{count} draft stage" + "s" * (count != 1)


def drafts_for(spec: str, draft_tokens: int | None, model: ModelSpec | None = None) -> int:
    """Drafts per verify: as given, else DSpark's block size of the model, else the default.

    Raises ConfigError for speculation without a draft.
    """
    if draft_tokens == 0 and spec != "none":
        raise ConfigError("--draft-tokens 0: at least 1 is needed with speculation; --spec none is decoding without it")
    if draft_tokens is not None:
        return draft_tokens
    block = model.dspark_block_size if model is not None and spec == "dspark" else None
    return block or DEFAULT_DRAFTS[spec]


def check_outputs(*files: tuple[str, Path | None], read: Mapping[str, Path] | None = None) -> None:
    """Refuse output files that cannot be written, the same one twice, or one that is ``read``, before anything runs."""
    seen = {path.resolve(): name for name, path in (read or {}).items()}
    for option, path in files:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise InputError(f"{option} {path}: the folder {path.parent} does not exist")
        if path.is_dir():
            raise InputError(f"{option} {path}: this is a folder; the name of a file is needed")
        if path.resolve() in seen:
            raise InputError(f"{option} {path}: {seen[path.resolve()]} names the same file; two files are needed")
        seen[path.resolve()] = option
        if not path.exists() and not path.is_symlink():
            # The only way to know; what an interrupted command leaves behind is no empty file.
            with writing(option, path):
                path.touch()
                path.unlink()


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """A file that cannot be written inside is an InputError that names the option and says why."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{option} {path}: it cannot be written: {error.strerror or error}") from error


def check_tokens(tokens: int | None, page: int, longest: int, new: int, reserve: int) -> None:
    """Refuse ``--tokens`` that do not hold the longest prompt of ``longest`` tokens and what follows it.

    ``new`` tokens follow it, and ``reserve`` more are kept allocated; a page that ``tokens`` do not fill is not there.
    """
    if tokens is None:
        return
    need, have = addressing.pages_for(longest + new + reserve, page), tokens // page
    if have < need:
        raise ConfigError(
            f"--tokens {tokens}: the longest of --prompts ({longest} tokens), --max-new-tokens {new} and {reserve} "
            f"tokens kept for drafts need {need} FULL pages: {have} exist; at least --tokens {need * page} is needed"
        )


def _nobody_reads() -> None:
    raise BrokenPipeError


def widened(console: Console) -> Console:
    """The console, wide enough for its numbers where it is a pipe or a file, which have no width.

    It raises BrokenPipeError where nobody reads what it prints; rich itself would end the program with status 1.
    """
    console.on_broken_pipe = _nobody_reads  # type: ignore[method-assign]
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    return console
