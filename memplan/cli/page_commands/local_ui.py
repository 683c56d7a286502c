"""``memplan ui``: the answer beside controls, on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from memplan.cli.grouped_command import command, without
from memplan.cli.option_groups import OutputOptions, option
from memplan.cli.output import deliver
from memplan.documents.escaping import json_text


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the page is served."""

    port: Annotated[int, option("Server", "--port N", "On 127.0.0.1; 0 for one that is free.", min=0, max=65535)] = 0


@command(example="memplan ui")
def ui_command(
    server: ServerOptions,
    output: Annotated[OutputOptions, without("form", "units", "file", "quiet")],
) -> int:
    """A page whose answer follows sliders: model, GPU, method, library, batch, length, precision; and its command line.

    Served on this machine alone, at the address that is printed, as JSON too, until it is interrupted. Names of the
    catalog are all that the page can ask for; it runs and writes nothing. Needs .[ui].
    """
    from memplan.cli.ui.serve import serve

    def tell(address: str) -> None:
        deliver(json_text({"schema": "memplan/ui/1", "address": address}) if output.as_json else f"{address}\n", None)

    serve(server.port, output.catalog_path, tell)
    return 0
