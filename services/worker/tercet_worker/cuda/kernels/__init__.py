"""Triton kernels. Each module has the kernels of one matter and the functions that launch them on tensors.

They run on the CPU too, slowly, where ``TRITON_INTERPRET=1`` was set before Triton was imported: that is how tests
compare them with the CPU's code. What they compute is defined there; a kernel's docstring says where.
"""
