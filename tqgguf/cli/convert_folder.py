"""What `tqgguf convert` does where a model's GGUF becomes a folder for mlx-lm: write it, say what is not exact."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tqgguf.cli.convert_calibration import announce_calibration, take_calibration_along
from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.figures import aligned, size
from tqgguf.cli.json_text import json_text
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import BytesLine, say
from tqgguf.formats.atomic import check_new_folder
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.missing_mlx import needs_mlx
from tqgguf.formats.wording import readable, shown

if TYPE_CHECKING:
    from tqgguf.runtime.models.mlx_folder_write import Written


def convert_to_folder(request: ConvertRequest) -> int:
    """Serve a request whose SRC is a GGUF and whose DST a folder; returns the exit status."""
    check_new_folder(request.target)
    with needs_mlx("a folder for mlx-lm"):
        from tqgguf.runtime.models.mlx_folder_write import examine_mlx_folder, write_mlx_folder
    line = BytesLine("converting")
    with open_gguf(request.source) as file:
        try:
            if request.dry_run:
                written = examine_mlx_folder(file, line.update)
            else:
                written = write_mlx_folder(file, request.target, line.update)
        finally:
            line.end()
    _tell(request, written)
    if request.dry_run:
        announce_calibration(request.source)
        return 0
    take_calibration_along(request.source, request.target)
    return 0


def _tell(request: ConvertRequest, written: list[Written]) -> None:
    if request.dry_run:  # without config and tokenizer
        n_bytes = sum(tensor.n_bytes for tensor in written)
    else:
        n_bytes = sum(entry.stat().st_size for entry in os.scandir(request.target))
    if request.json_output:
        report = {
            "source": readable(request.source),
            "source_kind": "model",
            "target": readable(request.target),
            "target_kind": "mlx-lm",
            "written": not request.dry_run,
            "bytes": n_bytes,
            "tensors": [
                {
                    "name": readable(tensor.name),
                    "parameter": tensor.parameter,
                    "from": tensor.type_name,
                    "to": tensor.form,
                    "bytes": tensor.n_bytes,
                    "exact": tensor.is_exact,
                    "largest_error": tensor.error,
                }
                for tensor in written
            ],
        }
        print(json_text(report), flush=True)
    elif request.dry_run:
        rows = [("tensor", "is", "becomes", "bytes", "off by at most"), *map(_row, written)]
        print("\n".join(aligned(rows, n_left=3)), flush=True)
    else:
        name_product(request.target)
    n_exact = sum(tensor.is_exact for tensor in written)
    say(
        f"{readable(request.source)} to {readable(request.target)}: {len(written)} tensors, {n_exact} exact; "
        f"{size(n_bytes)}" + ("; nothing was written" if request.dry_run else "")
    )
    kinds = sorted({(tensor.type_name, tensor.form) for tensor in written if not tensor.is_exact})
    for type_name, form in kinds:
        errors = [tensor.error for tensor in written if (tensor.type_name, tensor.form) == (type_name, form)]
        say(f"{len(errors)} of {type_name} as {form}: a value is off by at most {max(errors):.3g}")


def _row(tensor: Written) -> tuple[str, ...]:
    off_by = "" if tensor.is_exact else f"{tensor.error:.3g}"
    return shown(tensor.name)[1:-1], tensor.type_name, tensor.form, f"{tensor.n_bytes:,}", off_by
