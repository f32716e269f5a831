"""A model of mlx-lm's that decodes by compiled steps, to hand to `mlx_lm.generate` in its place."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from tqgguf.runtime.cache.compiled_steps import CompiledSteps


class CompiledModel:
    """See `compiled`. steps: of one token; says why there are none, if so."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.steps = CompiledSteps(lambda tokens, cache: model(tokens, cache=cache))

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None, **others: Any) -> mx.array:
        if cache is not None and not others and inputs.shape == (1, 1):
            logits = self.steps.step(inputs, cache)
            if logits is not None:
                return logits
        return self.model(inputs, cache=cache, **others)

    def __getattr__(self, name: str) -> Any:
        if name == "model":  # not there yet, as while a copy is made
            raise AttributeError(name)
        return getattr(self.model, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles compile steps of their own."""
        return type(self), (self.model,)


def compiled(model: Any) -> CompiledModel:
    """`model` with decode steps over caches of `make_prompt_cache` as one compiled function, on a GPU.

    The same answers with less work for the host, which is what a step waits for on a fast GPU. Everything else, and
    every step that cannot be compiled, is the model's as before. The weights must stay as they are.
    """
    return CompiledModel(model)
