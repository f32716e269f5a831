"""From a path to a model that can be evaluated."""
