"""The kernels' exact Metal text on a CPU: exported by MLX, compiled by g++ over the headers here, run with every check.

`launcher.EmulatedLauncher` takes the place of MLX's launcher, so that everything above it is what a Mac would run.
"""
