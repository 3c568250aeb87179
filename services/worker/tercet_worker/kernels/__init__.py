"""Tercet's own CPU kernels: C++ sources, their build and cache, and ctypes bindings.

How to add a kernel: put ``csrc/NAME.cpp`` (plain C functions over raw pointers, ``extern "C"``, no exceptions across)
next to the others and declare its functions in a ``NAME_abi.py``; parts that need an instruction set go to
``NAME_<isa>.cpp`` (``isa.hpp`` says what may be in those). All sources become one shared library, so that all kernels
share one OpenMP runtime with torch.
"""
