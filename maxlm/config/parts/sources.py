"""Sources of `data.prepare.sources` that a name stands for, in place of a path."""

from maxlm.config.part import Part, SourceFacts

PARTS = (
    Part(
        kind="source",
        name="python-stdlib",
        place="maxlm.data.sources:standard_library",
        about="Modules of the running Python interpreter.",
        facts=SourceFacts(fields=False),
    ),
)
