"""The commands `maxlm runs` and `maxlm query`."""

from pathlib import Path
from typing import Annotated

import typer

from maxlm.base.errors import UserError

FOLDERS = "Folders of runs, or folders with runs below them; runs, or else the folder here, if not given."
Places = Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help=FOLDERS)]


def runs(
    places: Places = None,
    where: Annotated[
        list[str] | None, typer.Option(metavar="CONDITION", help="Such as 'loss<3' or 'state=finished'; ~ is `contains`. Repeatable.")
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="NAME", help="Sort by a figure or a setting, such as optimizer.peak_lr.")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="The largest first.")] = False,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B", help="Figures and settings to show; with a + before them, after the usual ones.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Show so many runs, the first ones.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List runs: a row each, with its state, its last figures, and any of its settings."""
    from maxlm.telemetry.runs import listing

    conditions = [listing.Condition.parse(text) for text in where or []]
    named = _columns(columns)
    notes: list[str] = []
    rows = listing.rows_of(listing.find_runs(_places(places), notes))
    listing.check_names(rows, (condition.name for condition in conditions), "--where")
    listing.check_names(rows, [sort] if sort is not None else [], "--sort")
    listing.check_names(rows, named or (), "--columns")
    rows = [row for row in rows if all(condition(row) for condition in conditions)]
    if sort is not None:
        rows = listing.sort_rows(rows, sort, descending=reverse)
    elif reverse:
        rows.reverse()
    shown = rows[:limit]
    if json_:
        typer.echo(listing.as_json(shown, named, notes))
        return
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    extra = {condition.name: None for condition in conditions} | ({sort: None} if sort is not None else {})
    usual = list(dict.fromkeys([*listing.DEFAULT[:-1], *extra, listing.DEFAULT[-1]]))
    if not rows:
        typer.echo("no run is true of these conditions", err=True)
        return
    typer.echo(listing.as_text(shown, named or usual, asked=named is not None))
    if len(shown) < len(rows):
        typer.echo(f"{len(rows) - len(shown):,} more runs are not shown", err=True)


def _columns(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.removeprefix("+").split(",")]
    if not all(names):
        raise UserError(f"--columns {text!r}: give names with commas between them, such as run,loss,optimizer.peak_lr.")
    from maxlm.telemetry.runs.listing import DEFAULT

    return list(dict.fromkeys([*DEFAULT[:-1], *names, DEFAULT[-1]] if text.startswith("+") else names))


def query(
    sql: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over runs, configs, metrics, events, evaluations, checkpoints.")],
    places: Places = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=86400, metavar="SECONDS", help="Stop a query that takes longer.")] = 60.0,
) -> None:
    """Ask runs a question in SQL: one SELECT over their configs, metrics, events and evaluations."""
    if json_ and csv:
        raise UserError("--json and --csv exclude each other: leave one of them out.")
    from maxlm.telemetry.runs import listing, query as queries

    queries.check_installed()
    notes: list[str] = []
    rows = listing.rows_of(listing.find_runs(_places(places), notes))
    for line in queries.answer(sql, rows, notes, form="json" if json_ else "csv" if csv else "text", timeout_s=timeout):
        typer.echo(line)
    for note in notes if not json_ else ():
        typer.echo(f"note: {note}", err=True)


def _places(places: list[Path] | None) -> list[Path]:
    from maxlm.base.paths import user_path

    if places:
        return [user_path(str(place)) for place in places]
    return [Path("runs") if Path("runs").is_dir() else Path()]
