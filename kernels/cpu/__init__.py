"""Kernels in C++ for AVX-512, AVX2 and NEON, compiled on the machine that uses them.

PyTorch ships no compiler and knows neither our rows nor our layers; where a C++ compiler is at
hand, ``dllm doctor --compile`` compiles these files once for the processor (some seconds), and
every process from then on uses them.  Without them everything runs as before, on oneDNN and plain
operations.  `vector.h` and `tiles.h` know the vector units; the other files are the same for all.
NEON, with dot products, was tested in an emulator only.

A row's numbers depend neither on the other rows nor on the number of threads.  Between compiled and
plain kernels, and between vector units, the last bits differ, except in products of 8-bit weights.
"""

from .compiled import build, built, library, missing_features, vectors

__all__ = ["build", "built", "library", "missing_features", "vectors"]
