"""What `tqgguf convert` does with a model's GGUF: plan, write, say what became of the tensors and what stayed."""

from __future__ import annotations

import os
import time
from collections import Counter

import tqgguf
from tqgguf.cli.convert_calibration import announce_calibration, take_calibration_along
from tqgguf.cli.convert_request import ConvertRequest, bytes_of
from tqgguf.cli.figures import aligned, size
from tqgguf.cli.json_text import json_text
from tqgguf.cli.product import name_product
from tqgguf.cli.progress import BytesLine, say
from tqgguf.conversion.files import Plan, PlannedTensor, write_plan
from tqgguf.conversion.gguf_to_gguf import plan_gguf
from tqgguf.conversion.weight_rules import summary
from tqgguf.formats.atomic import check_target
from tqgguf.formats.errors import RequestError
from tqgguf.formats.gguf.reader import open_gguf
from tqgguf.formats.gguf.types import ggml_type_name
from tqgguf.formats.wording import readable, shown


def convert_weights(request: ConvertRequest) -> int:
    """Serve a request whose SRC is a GGUF of weights and DST a GGUF; returns the exit status."""
    max_bytes = bytes_of(request.split_max_size)
    check_target(request.target)
    with open_gguf(request.source) as file:
        plan = plan_gguf(
            file,
            request.target,
            request.weight_type,
            max_bytes,
            requantise=request.requantise,
            step=f"{_step(request)}, weights to {request.weight_type}",
            only_look=request.dry_run,
        )
        return _carry_out(request, plan)


def convert_checkpoint(request: ConvertRequest) -> int:
    """Serve a request whose SRC is a Hugging Face folder; returns the exit status."""
    max_bytes = bytes_of(request.split_max_size)
    target = check_target(request.target)
    if target.is_relative_to(os.path.realpath(request.source)):
        raise RequestError(f"{request.target}: is inside the folder to be converted; give another place")
    from tqgguf.conversion.hf_convert import plan_checkpoint  # lazily: only this needs the tokenizers library

    plan = plan_checkpoint(request.source, request.target, request.weight_type, max_bytes, _step(request))
    return _carry_out(request, plan, from_checkpoint=True)


def _carry_out(request: ConvertRequest, plan: Plan, *, from_checkpoint: bool = False) -> int:
    if request.dry_run:
        _tell(request, plan, None)
        announce_calibration(request.source)
        if plan.refusal is not None:
            raise plan.refusal
        return 0
    _tell(request, plan, _write(plan))
    take_calibration_along(request.source, plan.files[0].path, in_original_order=from_checkpoint)
    return 0


def _step(request: ConvertRequest) -> str:
    """Who converted what, for a GGUF's metadata."""
    name = os.path.basename(os.path.abspath(request.source))
    return f"tqgguf {tqgguf.__version__}: from {readable(name)}"


def _write(plan: Plan) -> float:
    """Returns the seconds it took."""
    from tqgguf.runtime.native.encode_rows import row_encoder  # lazily: a dry run needs no C library

    line = BytesLine("converting")
    try:
        write_plan(plan, row_encoder(), line.update)
    finally:
        line.end()
    return time.perf_counter() - line.started


def _tell(request: ConvertRequest, plan: Plan, seconds: float | None) -> None:
    changed = Counter(
        f"{tensor.type_name} to {ggml_type_name(tensor.ggml_type)}" for tensor in plan.tensors if not tensor.is_copied
    )
    if seconds is not None and not request.json_output:
        name_product(plan.files[0].path)
    if request.json_output:
        print(json_text(_report(request, plan, seconds)), flush=True)
    elif request.dry_run:
        rows = [("tensor", "shape", "is", "becomes", "bytes", "")]
        print("\n".join(aligned([*rows, *map(_row, plan.tensors)], n_left=4)), flush=True)
    names = [readable(file.path) for file in plan.files]
    target = names[0] if len(names) == 1 else f"{len(names)} files, {names[0]} first"
    did = ", ".join(f"{n} {what}" for what, n in changed.most_common()) or "all as they were"
    rate = f" in {seconds:.1f} s, {size(int(plan.source_bytes / max(seconds, 1e-9)))}/s" if seconds is not None else ""
    files = "the file has" if len(names) == 1 else "the files have"
    say(
        f"{readable(request.source)} to {target}: {len(plan.tensors)} tensors, {did}; {size(plan.source_bytes)} of "
        f"tensors to {size(plan.tensor_bytes)}{rate}; {files} {size(plan.n_bytes)}"
        + ("; nothing was written" if request.dry_run else "")
    )
    _tell_of_large_files(request, plan)
    others = summary(tensor.reason for tensor in plan.tensors)
    if others:
        say(
            f"not made {request.weight_type or 'that'}: " + ", ".join(f"{n} ({reason})" for reason, n in others.items())
        )


def _tell_of_large_files(request: ConvertRequest, plan: Plan) -> None:
    """Files are larger than asked where one tensor or the metadata are, as those are not divided."""
    limit = bytes_of(request.split_max_size)
    for file in plan.files:
        if limit and file.n_bytes > limit:
            sizes = {f"its tensor {shown(tensor.name)}": tensor.n_bytes for tensor in file.tensors}
            sizes["its metadata"] = file.n_bytes - sum(sizes.values())
            what = max(sizes, key=lambda name: sizes[name])
            say(
                f"{readable(file.path)} has {size(file.n_bytes)}, more than --split-max-size {request.split_max_size}: "
                f"{what} has {size(sizes[what])}, which is not divided"
            )


def _row(tensor: PlannedTensor) -> tuple[str, ...]:
    shape = " x ".join(map(str, tensor.shape))
    becomes = "" if tensor.is_copied else ggml_type_name(tensor.ggml_type)
    return shown(tensor.name)[1:-1], shape, tensor.type_name, becomes, f"{tensor.n_bytes:,}", _remark(tensor)


def _remark(tensor: PlannedTensor) -> str:
    return "refused" if tensor.refusal is not None else tensor.reason


def _report(request: ConvertRequest, plan: Plan, seconds: float | None) -> dict[str, object]:
    return {
        "source": readable(request.source),
        "source_kind": "model",
        "target": readable(request.target),
        "target_kind": "gguf",
        "written": seconds is not None,
        "files": [
            {"path": readable(file.path), "bytes": file.n_bytes, "tensors": len(file.tensors)} for file in plan.files
        ],
        "source_bytes": plan.source_bytes,
        "tensor_bytes": plan.tensor_bytes,
        "bytes": plan.n_bytes,
        "seconds": seconds,
        "tensors": [
            {
                "name": readable(tensor.name),
                "shape": list(tensor.shape),
                "from": tensor.type_name,
                "to": ggml_type_name(tensor.ggml_type),
                "bytes": tensor.n_bytes,
                "reason": _remark(tensor),
            }
            for tensor in plan.tensors
        ],
    }
