"""The command line: ``regard show``, ``heads``, ``view``, ``survey``, ``train`` and ``generate``.

What a command needs is imported when it runs, so that ``regard --help`` is quick and
``regard show`` never loads torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

from regard._base.errors import RecordingError
from regard._base.extras import MissingPackageError, needed_by
from regard._base.tables import escaped
from regard.cli._errors import CommandError, one_line

with needed_by("The command line"):
    import typer

__all__ = ["main"]

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _model(name: str) -> str:
    """The name of a model; an empty one is not taken for the current folder."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; name builtin, or . for this folder.")
    return name


Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        parser=_model,
        help="The model: builtin, a folder that train wrote, or a model of Hugging Face.",
    ),
]
OwnModel = Annotated[
    str,
    typer.Option(
        metavar="NAME", parser=_model, help="The model: builtin, or a folder that train wrote."
    ),
]


def _folder(name: str) -> Path:
    """The folder of that name; an empty one, as of an unset variable, is not taken for this one."""
    if not name.strip():
        raise typer.BadParameter("the name is empty; name a folder, or . for this one.")
    return Path(name)


RemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python that comes with a model of Hugging Face."),
]
Group = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Group of a recording's layers, by default the first."),
]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 0, 1 for a failure, 2 for bad input, 130 for Ctrl-C.

    Args:
        arguments: by default those of the process.
    """
    try:
        code, message = _run(arguments)
    except KeyboardInterrupt:
        code, message = INTERRUPTED, ""
    except BrokenPipeError:  # the reader has closed the pipe
        code, message = _abandoned_output(), ""
    except OSError as error:
        where = error.filename or "the output cannot be written"
        code, message = _abandoned_output(), f"{where}: {error.strerror or error}."
    if message and sys.stderr is not None:
        with contextlib.suppress(OSError):  # standard error is closed too
            sys.stderr.write(f"regard: {escaped(message)}\n")
            sys.stderr.flush()
    raise SystemExit(code)


def _run(arguments: list[str] | None) -> tuple[int, str]:
    """Exit code and error message; flushes the output."""
    if sys.stdout is None:
        return CommandError.code, "standard output is closed; open it, or give it a file."
    code, message = _carried_out(arguments)
    sys.stdout.flush()
    return code, message


def _carried_out(arguments: list[str] | None) -> tuple[int, str]:
    try:
        return app(arguments, prog_name="regard", standalone_mode=False) or 0, ""
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED, ""
    except CommandError as failure:
        return failure.code, str(failure)
    except (
        MissingPackageError,
        RecordingError,
    ) as error:  # the latter: a file cut while shown
        return CommandError.code, one_line(error)
    except MemoryError:
        return CommandError.code, "out of memory. Give a shorter text."
    except Exception as error:
        if isinstance(error, RuntimeError) and (refused := _refused_target()):
            return CommandError.code, refused
        # Usage errors; their class is not typer's own, and moved between its versions.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if "unexpected extra argument" in message:
            message += ". A text of several words stands in quotes."
        return getattr(error, "exit_code", 2), message


def _refused_target() -> str | None:
    """Why the instruction set that the environment names cannot run; None where it can."""
    from regard._backends.kernel_calls import refused_target

    return refused_target()


def _abandoned_output() -> int:
    """Sends the rest of the output to the null device, or Python would fail on it again at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CommandError.code


@app.callback(invoke_without_command=True)
def regard(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say what is installed.")] = False,
) -> None:
    """Exact self-attention that you can see.

    Start with: regard show "Your journey starts with one step"
    """
    if version:
        from regard.cli._version import version_text

        sys.stdout.write(version_text())
    elif context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


@app.command()
def show(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A text, a text file, a recording or its https:// address, or - for input.",
        ),
    ],
    layer: Annotated[int | None, typer.Option(help="Layer of the head to show, from 0.")] = None,
    head: Annotated[int | None, typer.Option(help="Head in that layer, from 0.")] = None,
    group: Group = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="A token or position whose attention to show."),
    ] = None,
    steps: Annotated[
        bool, typer.Option("--steps", help="Write out the formula, every step with its numbers.")
    ] = False,
    words: Annotated[
        bool | None,
        typer.Option(
            "--words/--pieces",
            help="Join the pieces of a word; by default below 200 tokens.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save the recording, a .safetensors file.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    model: Model = "builtin",
    width: Annotated[
        int | None, typer.Option(min=60, help="Columns to print, by default the terminal's.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Take TEXT as a text even if it looks like a file.")
    ] = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Show what a model attends to in a text: tokens, heads and weights."""
    from regard.cli._show import ShowOptions
    from regard.cli._show import show as run
    from regard.cli._source import ModelChoice

    chosen = ModelChoice(model, trust_remote_code)
    options = layer, head, query, steps, save, json, width, text, group, words
    run(source, ShowOptions(chosen, *options))


@app.command()
def heads(
    source: Annotated[
        str,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A text, a text file, a recording or its https:// address, or - for input.",
        ),
    ],
    group: Group = None,
    model: Model = "builtin",
    text: Annotated[
        bool, typer.Option("--text", help="Take TEXT as a text even if it looks like a file.")
    ] = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure every head: role, weight by place, entropy, distance, and where most weight goes."""
    from regard.cli._heads import heads as run
    from regard.cli._source import ModelChoice

    run(source, ModelChoice(model, trust_remote_code), group, text)


@app.command()
def view(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="TEXT|FILE|-",
            help="A text, a text file, a recording or its https:// address, or - for input; without"
            " one the page has an input to type a text.",
            show_default=False,
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option("--with", metavar="TEXT|FILE", help="A second one, to compare with."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer to open, from 0; with --export, the only one written.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="Head in that layer, from 0.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Group of a recording to open, by default the first; with --export, the only one"
            " written.",
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="A token or position to open at.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write one file, and stop: an .html page that works offline; or the figure of one"
            " head as .pdf, .svg or .png.",
        ),
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Queries of the figure, by position.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="A:B", help="Keys of the figure, likewise.")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Colours of the figure: auto, linear, log or uniform."),
    ] = None,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address and open no browser.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to serve on; 0 takes one that is free.")
    ] = 0,
    model: Model = "builtin",
    text: Annotated[
        bool, typer.Option("--text", help="Take TEXT as a text even if it looks like a file.")
    ] = False,
    words: Annotated[
        bool | None,
        typer.Option(
            "--words/--pieces",
            help="Open with the pieces of a word joined; by default below 200 tokens.",
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(
            metavar="POSITION",
            help="Show what each pair does to the loss of the token at this position, -1 for the"
            " last. Needs torch.",
        ),
    ] = None,
    survey: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Show the means of this survey beside those of the text's heads."
        ),
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Look at every weight in the browser, until Ctrl-C. Prints the address."""
    from regard.cli._source import ModelChoice
    from regard.cli._view import ViewOptions
    from regard.cli._view import view as run

    run(
        source,
        ViewOptions(
            other,
            ModelChoice(model, trust_remote_code),
            text,
            layer,
            head,
            query,
            port,
            not no_open,
            export,
            group,
            rows,
            columns,
            scale,
            words,
            explain,
            survey,
        ),
    )


@app.command()
def survey(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATHS",
            help="Text files, folders, patterns, .jsonl and .parquet files, or recordings. Without"
            " --output: the folder of a survey, to show.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            parser=_folder,
            help="Folder for the survey; it resumes.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            parser=_model,
            help="The model: builtin, the default, a folder that train wrote, or a model of Hugging"
            " Face. Recordings need none.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that are read of a document; by default 1024.", show_default=False
        ),
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a shard, about; by default a million, less for a small corpus.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the text in .jsonl and .parquet files; by default text.",
            show_default=False,
        ),
    ] = None,
    documents: Annotated[
        bool, typer.Option("--documents", help="Also write the sums of every document.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of each process, by default 1; the last bits depend on it, so it is kept.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes; by default as many as processors.", show_default=False
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="K/N", help="Compute the K-th of N parts of the shards, from 0/N to N-1/N."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the picture into a .png, .pdf or .svg file."),
    ] = None,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Survey what every head does over a corpus; a survey that was stopped resumes."""
    from regard.cli._survey import SurveyOptions
    from regard.cli._survey import survey as run

    run(
        paths,
        SurveyOptions(
            output, model, max_tokens, shard_tokens, column, documents, threads, workers, shard,
            json, plot, trust_remote_code,
        ),
    )  # fmt: skip


@app.command()
def train(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Text files, in UTF-8.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", parser=_folder, help="Folder for the model."),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Pieces of text in a step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens in a piece.")] = 256,
    vocab_size: Annotated[int, typer.Option(help="Tokens in the vocabulary, 257 or more.")] = 1024,
    embed_dim: Annotated[int, typer.Option(help="Size of a token's vector.")] = 128,
    num_heads: Annotated[int, typer.Option(help="Heads in a layer.")] = 4,
    windows: Annotated[
        str,
        typer.Option(help="For each layer, how many previous tokens a token attends to, or all."),
    ] = "63,127,all,127",
    repeats: Annotated[
        int, typer.Option(help="Pieces in a step that repeat themselves, for induction.")
    ] = 1,
    bfloat16: Annotated[
        bool, typer.Option("--bfloat16", help="Multiply in bfloat16, where the CPU is fast at it.")
    ] = False,
    save_every: Annotated[int, typer.Option(help="Steps between two checkpoints.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same model.")] = 0,
) -> None:
    """Train a model on text files. A run that was stopped resumes."""
    from regard.cli._train import train as run

    run(
        files, output,
        steps=steps, batch=batch, length=length, vocab_size=vocab_size, embed_dim=embed_dim,
        num_heads=num_heads, windows=windows, repeats=repeats, bfloat16=bfloat16,
        save_every=save_every, seed=seed,
    )  # fmt: skip


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT|-", help="A text, or - for input.")],
    tokens: Annotated[int, typer.Option(min=0, help="How many tokens to add, at most.")] = 100,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="0: always the likeliest token; 1: as the model learned."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws, above temperature 0.")] = 0,
    model: OwnModel = "builtin",
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Save what the whole text attends to.")
    ] = None,
) -> None:
    """Continue a text. Prints the prompt and its continuation, and nothing else."""
    from regard.cli._generate import generate as run

    run(prompt, tokens, temperature, seed, model, record)
