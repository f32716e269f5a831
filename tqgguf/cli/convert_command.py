"""What `tqgguf convert` does with a request: what SRC holds and DST is to be decides who serves it."""

from __future__ import annotations

from dataclasses import replace

from tqgguf.cli.convert_cache import convert_cache
from tqgguf.cli.convert_ends import CACHE_KINDS, End, source_end, target_end
from tqgguf.cli.convert_flags import check_flags, check_type
from tqgguf.cli.convert_folder import convert_to_folder
from tqgguf.cli.convert_request import ConvertRequest
from tqgguf.cli.convert_weights import convert_checkpoint, convert_weights
from tqgguf.formats.models.model_path import model_path

MODEL_ROUTES = {
    (End.GGUF, End.GGUF): convert_weights,
    (End.GGUF, End.FOLDER): convert_to_folder,
    (End.CHECKPOINT, End.GGUF): convert_checkpoint,
}


def convert(request: ConvertRequest) -> int:
    """Serve the request and return the exit status. What can be refused is refused before anything is written."""
    check_type(request.weight_type)
    request = replace(request, source=model_path(request.source))
    source = source_end(request.source)
    target = target_end(request, source)
    check_flags(request, source, target)
    if source in CACHE_KINDS:
        return convert_cache(request, source, target)
    return MODEL_ROUTES[source, target](request)
