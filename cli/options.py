"""The options that the commands share, in sections. Each is also an environment variable.

An option has the name of the keyword argument of `dflash_local.load` or of `Model` that it sets, so
a command can pass the values of a section on.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click

from dflash_local.fit.options import (
    KV_TYPES,
    LOAD_MODES,
    POOLINGS,
    ROPE_SCALINGS,
    SHAPES,
    SPLIT_MODES,
)
from dflash_local.text_file import read_text

from .values import (
    WholeText,
    file_keys,
    json_object,
    number,
    overrides,
    parts,
    places,
    scaled,
    shares,
    token_bias,
    whole,
)

ENVIRONMENT = "DFLASH_LOCAL"

READABLE = click.Path(exists=True, dir_okay=False, readable=True)
_AUTO = "what fits the memory"
_FILE = "what its file says"
_KV_TYPE = click.Choice(KV_TYPES)
USUAL = "what the model's makers advise, else {}"


class Option(click.Option):
    """An option that the variable `DFLASH_LOCAL_<LONG NAME>` sets too, as its help says. `names`:
    click's, with spaces between; a word with capitals is what help shows for the value. Without
    such a word and a type it is a flag. `of`: the command whose name stands before the variable's,
    where the option of the same name of other commands means something else; of the settings file
    only the command's own table sets it."""

    def __init__(self, names: str, help: str, *, of: str = "", **attributes: Any) -> None:
        words = names.split()
        declared = [word for word in words if word[0] == "-" or word.islower()]
        if len(declared) < len(words):
            attributes["metavar"] = words[-1]
        elif not attributes.keys() & {"type", "metavar"} and "/" not in names:
            attributes["is_flag"] = True
        self.long_name = next(name for name in declared if name.startswith("--"))[2:].split("/")[0]
        self.of = of
        name = f"{of}-{self.long_name}" if of else self.long_name
        variable = f"{ENVIRONMENT}_{name.replace('-', '_').upper()}"
        attributes.setdefault("show_default", "default" in attributes)
        super().__init__(declared, help=help, envvar=variable, show_envvar=True, **attributes)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """The name in errors: the option, or the variable if the value comes from there."""
        source = ctx.get_parameter_source(self.name) if ctx and self.name else None
        if source is click.core.ParameterSource.ENVIRONMENT:
            return str(self.envvar)
        return f"--{self.long_name}"


WORDS = """\
Drafts are tokens that a drafter proposes, or copies of what the text has already. A round is one
pass of the model: it keeps the drafts that it would have written itself, and adds one token of its
own. The width is how many tokens a round checks."""
_ALL = "--help-all"


def telling(lines: Callable[[click.Context], Iterable[str]]) -> dict[str, Any]:
    """Attributes of an option that shows these lines in place of the command's work."""

    def tell(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            for line in lines(ctx):
                click.echo(line)
            ctx.exit()

    return {"is_flag": True, "is_eager": True, "expose_value": False, "callback": tell}


def _whole_help(ctx: click.Context) -> list[str]:
    ctx.meta[_ALL] = True
    return [ctx.get_help()]


def _devices(_: click.Context) -> list[str]:
    from dflash_local.llama import runtime

    return runtime.backends()


class SectionedCommand(click.Command):
    """A command whose help lists its options by section. If `usual` names options, -h shows these
    alone, and --help-all all of them, with their environment variables."""

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[click.Option]],
        usual: Sequence[str] = (),
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.sections = sections
        self.usual = frozenset(usual)
        for options in sections.values():
            self.params.extend(options)
        if usual:
            text = "Show all options, with their environment variables."
            self.all_option = click.Option([_ALL], help=text, **telling(_whole_help))
            self.params.append(self.all_option)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        helps = [self.get_help_option(ctx), self.all_option if self.usual else None]
        is_short = bool(self.usual) and _ALL not in ctx.meta
        for heading, options in {**self.sections, "Help": [*filter(None, helps)]}.items():
            shown = [o for o in options if not is_short or o in helps or o.name in self.usual]
            for option in shown:
                option.show_envvar = bool(option.envvar) and not is_short
            if records := [*filter(None, (each.get_help_record(ctx) for each in shown))]:
                with formatter.section(heading):
                    formatter.write_dl(records)


_FLAGS = {
    "flash_attn=False": "--no-flash-attn",
    "flash_attn": "--flash-attn",
    "n_seq": "--parallel",
}


def in_options(text: str) -> str:
    """The text of an error, with the names of options in place of those of Python's arguments."""
    names = {
        option.name: f"--{option.long_name}"
        for option in (*LOADING, *CACHE, *SAMPLING, DRAFT_WIDTH)
        if option.name and "_" in option.name
    }
    for name, flag in (_FLAGS | names).items():
        text = re.sub(rf"(?<![\w.`-]){re.escape(name)}\b", flag, text)
    return text


def values_of(section: Sequence[click.Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a section's options; those without one keep the library's default."""
    names = [option.name for option in section if option.name and option.expose_value]
    return {name: values[name] for name in names if values.get(name) is not None}


QUIET = Option("-q --quiet", "Print only errors on stderr.")
JSON = Option("--json as_json", "Print one JSON object.")

TARGET_HELP = (
    "The model that answers: a name of `dflash-local list`, a GGUF file or a folder with one, or a "
    "hub repository, OWNER/REPO[:QUANT]."
)

TARGET = Option(
    "-m --target -hf --hf-repo MODEL",
    f"{TARGET_HELP} Without it, smollm2-135m is used.",
    type=WholeText(),
)


def _of_its_target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The drafter. A setting or a variable is for the target that stands there: a target on the
    command line comes without it."""

    def is_here(name: str) -> bool:
        return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    others = any(map(is_here, ("target", "model", "pair")))
    return value if is_here("draft") or not others else None


DRAFT = Option(
    "-md --draft --model-draft --spec-draft-model DRAFTER",
    "Its drafter: a GGUF file, a folder, or a hub repository, of a DFlash drafter, of a small "
    "model with the same vocabulary, or of an assistant; the word mtp for the heads that the "
    "target's own file has, which also draft where none is found, or a slower one. Without either, "
    "what the text repeats is drafted as copies, where that costs nothing; the word copies in its "
    "place asks for them also where they take memory, the word none for no drafter at all.",
    type=WholeText(),
    callback=_of_its_target,
    show_default="the name's own, a DFlash file in the folder or repository, or the model's heads",
)

FILES = (TARGET, DRAFT)

POOLING = Option(
    "--pooling",
    "What an embedding model makes of a text: the mean of its tokens' vectors, the first "
    "(cls), the last, or all (none); rank scores documents for a query. With it, a model that "
    "writes text makes vectors instead.",
    type=click.Choice(POOLINGS),
    show_default="as the file of an embedding model or a reranker says",
)

DRAFT_SHAPE = Option(
    "--draft-shape",
    "Draft a chain of tokens, or a tree of alternatives that are checked at once; auto "
    "chooses the faster.",
    type=click.Choice(SHAPES),
    show_default="auto on a GPU, else chain",
)

LOADING = (
    Option(
        "-c --ctx --ctx-size n_ctx",
        "Context length in tokens, prompt and answer together; 0 for what fits.",
        type=whole(1, words={"0": None}),
        show_default=_AUTO,
    ),
    Option(
        "-ngl --gpu-layers --n-gpu-layers n_gpu_layers",
        "Layers of the target on the GPU, or all.",
        type=whole(0, words={"auto": None, "-1": None, "all": -1}),
        show_default=_AUTO,
    ),
    Option("-cmoe --cpu-moe", "Keep all experts of a mixture in RAM, wherever its layers are."),
    Option(
        "-ncmoe --n-cpu-moe",
        "Keep the experts of the first N layers in RAM.",
        type=whole(0),
        show_default="as many as the memory needs",
    ),
    Option(
        "-ot --override-tensor REGEX=DEVICE,...",
        "Put the tensors whose names match on a device: CPU, or one that --version lists.",
        type=overrides,
    ),
    Option(
        "-t --threads n_threads",
        "CPU threads.",
        type=whole(1, 512),
        show_default="one per core; fewer while other processes want the cores",
    ),
    Option("--kv-type", "Type of the target's KV cache.", type=_KV_TYPE, default="f16"),
    Option(
        "-ctk --cache-type-k", "Type of its keys.", type=_KV_TYPE, show_default="that of --kv-type"
    ),
    Option(
        "-ctv --cache-type-v",
        "Type of its values.",
        type=_KV_TYPE,
        show_default="that of --kv-type",
    ),
    Option(
        "-b --batch-size -ub --ubatch-size n_batch",
        "The most tokens of a prompt that are computed at once.",
        type=whole(1, 65536),
        default=512,
    ),
    Option("--flash-attn/--no-flash-attn", "Use flash attention in the target.", default=True),
    Option(
        "--draft-window",
        "How many tokens the drafter looks back at and keeps in memory; 0 for all. Helps with "
        "texts that are longer than those it was trained on.",
        type=whole(0),
        show_default="the length that the drafter was trained on, if known, else the whole context",
    ),
    DRAFT_SHAPE,
    Option(
        "--draft-from",
        "Text to copy from besides what an answer has before it, such as files that an agent "
        "will write again.",
        type=READABLE,
    ),
    Option(
        "--exact",
        "Let each answer depend on its own request alone: chains only, and earlier prompts "
        "are used again in whole batches only. Drafted answers are then plain decoding's to the "
        "bit on NVIDIA GPUs from Ampere on, and on a CPU with Q8_0 weights and --kv-type q8_0: "
        "there several requests may be answered at once.",
    ),
    Option(
        "--override-kv KEY=TYPE:VALUE,...",
        "Other values for keys of the target's file; types are int, float, bool and str.",
        type=file_keys,
    ),
    Option(
        "-lm --load-mode",
        "How the target's file gets into memory: mmap maps it, none reads it, mlock keeps it "
        "there, dio reads it past the system's cache; auto is mmap where the devices allow it.",
        type=click.Choice(LOAD_MODES),
        default="auto",
    ),
    Option(
        "--rope-scaling",
        "How the target's positions are stretched, for a context beyond its training. The "
        "drafter's are not.",
        type=click.Choice(ROPE_SCALINGS),
        show_default=_FILE,
    ),
    Option("--rope-scale", "Stretch them so many times.", type=number(0, 1e6, above=True)),
    *(
        Option(f"--{name.replace('_', '-')}", text, type=number(-1, 1e9), show_default=_FILE)
        for name, text in {
            "rope_freq_base": "Base frequency of RoPE.",
            "rope_freq_scale": "1 / --rope-scale.",
            "yarn_ext_factor": "YaRN: how much is extrapolated; 0 interpolates all.",
            "yarn_attn_factor": "YaRN: scale of attention.",
            "yarn_beta_fast": "YaRN: lower dimension of correction.",
            "yarn_beta_slow": "YaRN: upper dimension of correction.",
        }.items()
    ),
    Option(
        "--yarn-orig-ctx",
        "YaRN: the context that the target was trained on.",
        type=whole(0),
        show_default=_FILE,
    ),
    Option(
        "-dev --device NAME,...",
        "The GPUs to use, as --list-devices names them; none for the CPU alone.",
        type=parts,
        show_default="all GPUs",
    ),
    Option("--list-devices", "List the devices of this machine.", **telling(_devices)),
    Option(
        "-sm --split-mode",
        "How several GPUs share the target.",
        type=click.Choice(SPLIT_MODES),
        default="layer",
    ),
    Option(
        "-mg --main-gpu", "The GPU to use with --split-mode none.", type=whole(0, 255), default=0
    ),
    Option("-ts --tensor-split X,X,...", "Share of each GPU, such as 3,1.", type=shares),
    Option("--lora FILE[:SCALE],...", "LoRA adapters, as GGUF files.", type=scaled),
    Option(
        "--control-vector control_vectors FILE[:SCALE],...",
        "Control vectors, as GGUF files.",
        type=scaled,
    ),
    Option(
        "--mmproj FILE",
        "A vision model's projector, as a GGUF file, to read images with; auto: the "
        "mmproj*.gguf beside the model or in its repository, fetched if missing. Without it, the "
        "only one beside the only model in a folder; none: no images.",
    ),
    Option(
        "--rpc HOST:PORT,...",
        "Other machines to put layers on, each with a `dflash-local worker`.",
        type=places,
    ),
)

CACHE = (
    Option(
        "--cache-mb",
        "MiB of host memory, for each model, that keep prompts and answers after they had to "
        "leave their slot, so that they need not be computed again; 0 keeps none.",
        type=whole(0, 1 << 24),
        default=1024,
    ),
    Option(
        "--cache-dir DIR",
        "A folder that keeps as many MiB again, also after the server has ended. Whoever can "
        "read the folder can read the texts in it.",
        type=click.Path(file_okay=False),
    ),
    Option(
        "--slot-save-path DIR",
        "A folder for what POST /slots/N?action=save keeps of a slot.",
        type=click.Path(file_okay=False, exists=True),
    ),
)

SAMPLING = (
    Option(
        "--temp --temperature temperature",
        "Temperature; 0 always takes the most likely token.",
        type=number(0, 100),
        show_default="what the model's makers advise, else 0.8 in chats and 0 in complete",
    ),
    Option(
        "--top-k",
        "Draw from the N most likely tokens; 0 for all.",
        type=whole(0),
        show_default=USUAL.format(40),
    ),
    Option(
        "--top-p",
        "Draw from the most likely tokens that together have this probability.",
        type=number(0, 1, above=True),
        show_default=USUAL.format(0.95),
    ),
    Option(
        "--min-p",
        "Leave out tokens that are less likely than this share of the most likely one.",
        type=number(0, 1),
        show_default=USUAL.format(0.05),
    ),
    Option(
        "-s --seed",
        "Seed of the draws; the same seed gives the same answer.",
        type=whole(0, 2**32 - 2),
        show_default="random",
    ),
    Option(
        "--repeat-penalty",
        "Divide the logits of recent tokens by this.",
        type=number(0, 100, above=True),
        show_default=USUAL.format(1),
    ),
    Option(
        "--repeat-last-n",
        "How many of the last tokens the penalties see; -1 for the whole context.",
        type=whole(-1),
        show_default=USUAL.format(64),
    ),
    Option(
        "--presence-penalty",
        "Subtract this from the logits of recent tokens.",
        type=number(-100, 100),
        show_default=USUAL.format(0),
    ),
    Option(
        "--frequency-penalty",
        "Subtract this from the logits of recent tokens once for each time they occurred.",
        type=number(-100, 100),
        show_default=USUAL.format(0),
    ),
    Option(
        "--logit-bias ID=BIAS",
        "Add BIAS to a token's logit; may be repeated.",
        type=token_bias,
        multiple=True,
    ),
)

DRAFT_WIDTH = Option(
    "--draft-width N",
    "Tokens that the target checks per round; 0 is plain decoding, auto chooses the fastest.",
    type=whole(0, words={"auto": "auto"}),
    show_default="auto",
)

ENDING = (
    Option("--stop", "End before this text; may be repeated.", type=WholeText(), multiple=True),
    Option(
        "--grammar-file", "A file with a GBNF grammar that the answer must follow.", type=READABLE
    ),
    DRAFT_WIDTH,
)

REPORTING = (
    Option(
        "--compare", "Answer twice more, with and without drafts, and print how the two compare."
    ),
    Option(
        "--json as_json", "Print one JSON object: text, tokens, finish_reason, stats, exactness."
    ),
    QUIET,
)

THINKING = Option(
    "--thinking/--no-thinking",
    "Ask the chat template for answers with a reasoning part, or without.",
    default=None,
    show_default="as the drafter was trained",
)

REASONING_BUDGET = (
    Option(
        "--reasoning-budget N",
        "End an answer's reasoning after N tokens, so that the rest of them are left for the "
        "answer.",
        type=whole(-1),
        show_default="no limit",
    ),
    Option(
        "--reasoning-budget-message TEXT", "What is written before such an end.", type=WholeText()
    ),
)

CHAT = (
    Option("--system", "System message.", type=WholeText()),
    THINKING,
    *REASONING_BUDGET,
    Option(
        "--chat-template-kwargs JSON",
        'Values for the chat template, such as {"enable_thinking": false}.',
        type=json_object,
    ),
)


def max_tokens(*, help: str = "End after this many tokens.", **default: Any) -> Option:
    """The length limit of an answer, in tokens. `default` are attributes of the option."""
    return Option("-n --max-tokens --predict --n-predict", help, type=whole(1), **default)


def generation_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `Model.stream` and `Model.stream_chat`. Reads the grammar's file."""
    arguments = values_of((*SAMPLING, max_tokens(), DRAFT_WIDTH, *REASONING_BUDGET), values)
    arguments["logit_bias"] = dict(values["logit_bias"])
    arguments["stop"] = list(values["stop"])
    if values["grammar_file"]:
        arguments["grammar"] = read_text(values["grammar_file"])
    return arguments
