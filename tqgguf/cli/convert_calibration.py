"""What `tqgguf convert` says and does about the calibration of a model that it converts."""

from __future__ import annotations

from tqgguf.cli.progress import say
from tqgguf.conversion.calibration_carrying import carry_calibration, find_calibration
from tqgguf.formats.wording import readable


def take_calibration_along(source: str, target: str, *, in_original_order: bool = False) -> str | None:
    """Carry it, and say so in a line; the new sidecar's name, None where there is none. Errors as carry_calibration."""
    carried = carry_calibration(source, target, in_original_order=in_original_order)
    for notice in carried.notices:
        say(notice)
    if carried.source is None or carried.target is None:
        return None
    say(
        f"calibration {readable(carried.source)} goes along as {readable(carried.target)}: measured with the weights "
        "as they were"
    )
    return readable(carried.target)


def announce_calibration(source: str) -> None:
    """Say of a dry run that a calibration would go along."""
    path, notices = find_calibration(source)
    for notice in notices:
        say(notice)
    if path is not None:
        say(f"calibration {readable(path)} would go along")
