"""GPU kernels: their text in Metal (read as CUDA too), and one Python module a kernel, its only caller."""
