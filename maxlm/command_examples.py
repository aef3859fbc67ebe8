"""Examples of every command, shown at the end of its help and in the reference."""

from collections.abc import Iterator

import typer

EXAMPLES = {
    "train": ("maxlm train runs/quickstart", "maxlm train runs/quickstart train.steps=100 run.name=short", "maxlm train runs/quickstart/"),
    "config": ("maxlm config runs/quickstart", "maxlm config --explain mesh.fsdp", "maxlm config --schema > maxlm.schema.json"),
    "compile": ("maxlm compile models/llama3-8b --topology v5p-128", "maxlm compile runs/llama3-8b-v5p-128 --json"),
    "plan": (
        "maxlm plan models/llama3-8b --topology v5p-128 --tokens 15e12",
        "maxlm plan models/llama3-8b --topology v5p --chips-at-most 512 --days-at-most 30 --tokens 15e12",
    ),
    "ladder": ("maxlm ladder ladders/quickstart --dry-run", "maxlm ladder ladders/quickstart"),
    "data prepare": ("maxlm data prepare runs/quickstart",),
    "data inspect": ("maxlm data inspect data/python-stdlib", "maxlm data inspect runs/quickstart --step 100"),
    "corpus run": ("maxlm corpus run corpus.yml",),
    "corpus report": ("maxlm corpus report corpus/",),
    "kernels report": ("maxlm kernels report --chip v6e --shape llama-8k",),
    "kernels sweep": ("maxlm kernels sweep --chip v6e --operation attention",),
    "generate": (
        'maxlm generate runs/quickstart "def " --tokens 100',
        'maxlm generate runs/sft-tiny "What is 2 + 2?" --chat',
    ),
    "import": ("maxlm import path/to/huggingface-folder --out models/imported",),
    "export": ("maxlm export runs/quickstart --out exported/", "maxlm export runs/quickstart --out exported/ --dtype bfloat16"),
    "eval": ("maxlm eval runs/quickstart --tasks brackets,counting",),
    "average": ("maxlm average runs/quickstart --out averaged/ --last 3",),
    "report": ("maxlm report runs/quickstart", "maxlm report runs/a runs/b --out both.html", "maxlm report runs/quickstart --live"),
    "runs": ("maxlm runs --sort loss", "maxlm runs --where 'loss<3' --columns +optimizer.peak_lr"),
    "query": ('maxlm query "select * from runs limit 5"',),
    "profile": ("maxlm profile runs/quickstart --steps 5",),
    "launch": ("maxlm launch -- train runs/quickstart",),
    "bench-comm": ("maxlm bench-comm mesh.data=2 --devices 2", "maxlm bench-comm runs/llama3-8b-v5p-128 --during-training"),
    "path": ("maxlm path configs/models", "maxlm path slurm/train.sbatch"),
    "doctor": ("maxlm doctor", "maxlm doctor --cluster"),
}


def commands_of(app: typer.Typer, path: str = "") -> Iterator[tuple[str, typer.models.CommandInfo]]:
    """Every command of an app and of the groups in it, by its words, in the order of the help."""
    for command in app.registered_commands:
        name = command.name or (command.callback.__name__.replace("_", "-") if command.callback is not None else "")
        yield f"{path} {name}".strip(), command
    for group in app.registered_groups:
        if group.typer_instance is not None:
            yield from commands_of(group.typer_instance, f"{path} {group.name}".strip())


def add_examples(app: typer.Typer) -> None:
    """Show the examples of every command at the end of its help."""
    for name, command in commands_of(app):
        if examples := EXAMPLES.get(name):
            command.epilog = "\n\n".join(("Examples:", *examples))
