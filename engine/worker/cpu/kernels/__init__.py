"""The C++ kernels of the CPU backend, compiled for this machine, and their build."""
