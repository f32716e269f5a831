"""What `tqgguf plan` does with a request: read headers, print."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tqgguf.cli import plan_table
from tqgguf.cli.inspect_json import plain
from tqgguf.cli.json_text import json_text
from tqgguf.cli.plan_request import PlanRequest
from tqgguf.cli.progress import say
from tqgguf.formats.errors import MissingMLXError, RequestError
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.formats.models.embedded import embedded_model
from tqgguf.formats.planning.machine_memory import machine_bytes
from tqgguf.formats.planning.model_plan import Ask, default_device, plan_model
from tqgguf.formats.planning.weight_sizes import Device
from tqgguf.text.servable import Opened, check_servable


def plan(request: PlanRequest) -> int:
    """Print the plan and return the exit status: that of `ModelPlan.failure`."""
    for notice in request.notices:
        say(notice)
    memory = request.n_bytes or machine_bytes()
    if memory is None:
        raise RequestError("this system does not tell how much memory it has; say it with --memory, as in --memory 16G")
    device: Device = "gpu" if request.device == "gpu" else "cpu" if request.device == "cpu" else default_device()
    ask = Ask(memory, device, request.chunk, request.specs, request.context_list)
    found = plan_model(request.model or embedded_model(), ask, partial(check_servable, by_mlx=_open_folder))
    is_machines = request.memory is None
    if request.json_output:
        print(json_text(plain(plan_table.as_json(found, is_machines))), flush=True)
    else:
        print("\n".join(plan_table.lines(found, is_machines)), flush=True)
    return 0 if found.failure is None else found.failure.exit_status


def _open_folder(folder: Path) -> Opened | None:
    try:
        with needs_mlx("tqgguf run"):
            from tqgguf.runtime.models.mlx_folder import OpenFolder
    except MissingMLXError:
        return None
    opened = OpenFolder(folder)
    return opened.config.layer_shapes(), opened.tokenizer
